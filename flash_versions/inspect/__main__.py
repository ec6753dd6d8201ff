"""`python -m flash_versions.inspect`: see `command.py`."""

import sys

from flash_versions.inspect.command import main

if __name__ == "__main__":
    sys.exit(main())
