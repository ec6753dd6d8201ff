"""`python -m flash_versions.plot`: see `figures.py`."""

import argparse

from flash_versions.plot.figures import PLOTS, draw_all

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m flash_versions.plot", description="redraw the figures of docs/results"
    ).parse_args()
    draw_all(PLOTS)
