"""`python -m flash_versions.report`: see `documents.py`."""

import sys

from flash_versions.report.documents import main

if __name__ == "__main__":
    sys.exit(main())
