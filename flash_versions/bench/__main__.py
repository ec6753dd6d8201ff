"""`python -m flash_versions.bench`: see `run.py`."""

import sys

from flash_versions.bench.run import main

if __name__ == "__main__":
    sys.exit(main())
