"""`python -m docs.report`: see `documents.py`."""

import argparse
import sys

from docs.report.documents import main

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m docs.report",
        description="write the tables of docs/results into the documents",
    ).parse_args()
    sys.exit(main())
