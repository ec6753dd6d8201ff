"""`python -m lessons.build`, in notebooks/: see `notebooks.py`."""

import sys

from lessons.build.notebooks import main

if __name__ == "__main__":
    sys.exit(main())
