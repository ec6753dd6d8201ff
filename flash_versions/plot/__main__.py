"""`python -m flash_versions.plot`: see `figures.py`."""

import sys

from flash_versions.plot.figures import main

if __name__ == "__main__":
    sys.exit(main())
