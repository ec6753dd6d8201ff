"""Draw the pictures that documents show: `python -m lessons.pictures`, in notebooks/.

Writes docs/figures/flash-attention.gif and docs/figures/lessons/*/*.svg, whose folders are those of
this package. Like the figures of flash_versions.plot.figures, each names a digest of the data that
it was drawn from.
"""

import sys
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from flash_versions.bench.results import ROOT
from flash_versions.files import replacing
from flash_versions.plot.figures import FIGURES, Plot, draw_all
from lessons.pictures.memory import animation, gpu, traffic
from lessons.pictures.pipeline import gantt
from lessons.pictures.scores import masked, splits

ANIMATION = FIGURES / "flash-attention.gif"


def picture(room: str, data: Callable[[], Any], draw: Callable[[], Figure]) -> Plot:
    """A picture that is not drawn from results."""
    return Plot(f"lessons/{room}", lambda document: data(), lambda found: draw())


PICTURES = {
    "gpu": picture("memory", gpu.data, gpu.draw),
    "masks": picture("scores", masked.data, masked.draw),
    "splits": picture("scores", splits.data, splits.tree),
    "schedules": picture("pipeline", gantt.data, gantt.schedules),
    "traffic": picture("memory", traffic.data, traffic.against_length),
    "ordinary-work": picture("memory", traffic.data, traffic.ordinary_work),
}


def main() -> int:
    """Redraw all pictures; returns the exit code."""
    draw_all(PICTURES)
    with replacing(ANIMATION) as file:
        file.write_bytes(animation.gif())
    sys.stderr.write(f"{ANIMATION.relative_to(ROOT)}: drawn\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
