"""`python -m flash_versions.report`: see `documents.py`."""

import argparse
import sys

from flash_versions.report.documents import main

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m flash_versions.report",
        description="write the tables of docs/results into the documents",
    ).parse_args()
    sys.exit(main())
