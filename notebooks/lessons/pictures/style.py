"""The look of all pictures: that of flash_versions.plot.figures, and colours that the colour-blind
tell apart; a pattern or a word says the same again.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flash_versions import VERSIONS
from flash_versions.plot.figures import STYLE, style_of

# Okabe and Ito's.
BLUE, SKY, GREEN, VERMILION = "#0072B2", "#56B4E9", "#009E73", "#D55E00"
ORANGE, PURPLE, YELLOW = "#E69F00", "#CC79A7", "#F0E442"
GREY, PALE, INK = "#999999", "#ececec", "#222222"
TITLES = {
    "plain": "plain attention",
    "paper": "FA1 as in the paper",
    "fa1": "FA1",
    "fa2": "FA2",
    "fa3": "FA3",
    "fa4": "FA4",
}
Parameters = ParamSpec("Parameters")


def styled(draw: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """A function that draws a figure, in the house style."""

    @wraps(draw)
    def drawn(*arguments: Parameters.args, **options: Parameters.kwargs) -> Figure:
        with mpl.rc_context(STYLE):
            figure = draw(*arguments, **options)
            figure.draw_without_rendering()  # fixes what the style decides
        return figure

    return drawn


def line_of(version: str) -> dict[str, Any]:
    """Colour, marker and line of a version; what is no version is grey and dashed."""
    if version in VERSIONS:
        return style_of(version, [*VERSIONS])
    marker = "." if version == "plain" else "x"
    return {"color": GREY if version == "plain" else INK, "marker": marker, "linestyle": "--"}


def bare(ax: Axes) -> None:
    """No frame, no ticks, no grid."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
