"""Draw the pictures that documents show: `python -m lessons.pictures`, in notebooks/.

Writes docs/figures/flash-attention.gif and docs/figures/lessons/*/*.svg, whose folders are those of
this package. Like the figures of flash_versions.plot.figures, each names a digest of the data that
it was drawn from.
"""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from flash_versions.bench.results import ROOT
from flash_versions.files import replacing, write
from flash_versions.plot.figures import FIGURES, STYLE, digest
from lessons.pictures.memory import animation, gpu, traffic
from lessons.pictures.pipeline import gantt
from lessons.pictures.scores import masked, splits

ANIMATION = FIGURES / "flash-attention.gif"
FOLDER = FIGURES / "lessons"


class Picture(NamedTuple):
    """A committed picture: what it is drawn from, and its drawing."""

    data: Callable[[], Any]
    draw: Callable[[], Figure]


PICTURES = {
    "memory/gpu": Picture(gpu.data, gpu.draw),
    "scores/masks": Picture(masked.data, masked.draw),
    "scores/splits": Picture(splits.data, splits.tree),
    "pipeline/schedules": Picture(gantt.data, gantt.schedules),
    "memory/traffic": Picture(traffic.data, traffic.against_length),
    "memory/ordinary-work": Picture(traffic.data, traffic.ordinary_work),
}


def path_of(name: str) -> Path:
    """Where a picture is."""
    return FOLDER / f"{name}.svg"


def svg(name: str) -> str:
    """A picture as SVG: the same text for the same data and the same matplotlib."""
    picture, buffer = PICTURES[name], io.StringIO()
    metadata = {"Date": None, "Creator": None, "Description": digest(picture.data())}
    figure = picture.draw()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def main() -> int:
    """Redraw all pictures; returns the exit code."""
    for name in PICTURES:
        path = path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, svg(name))
        sys.stderr.write(f"{path.relative_to(ROOT)}: drawn\n")
    with replacing(ANIMATION) as file:
        file.write_bytes(animation.gif())
    sys.stderr.write(f"{ANIMATION.relative_to(ROOT)}: drawn\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
