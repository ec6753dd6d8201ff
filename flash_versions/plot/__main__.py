"""`python -m flash_versions.plot`: see `figures.py`."""

import argparse
import sys

from flash_versions.plot.figures import main

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m flash_versions.plot", description="redraw the figures of docs/results"
    ).parse_args()
    sys.exit(main())
