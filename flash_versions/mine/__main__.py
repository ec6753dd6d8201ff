"""`python -m flash_versions.mine`: see `command.py`."""

import sys

from flash_versions.mine.command import main

if __name__ == "__main__":
    sys.exit(main())
