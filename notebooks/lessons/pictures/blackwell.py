"""FA4's kernel for Blackwell in time: modelled, never measured."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lessons.modelled import compare
from lessons.modelled.model import TENSOR, Run
from lessons.pictures.style import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, styled

LANES = (TENSOR, "softmax 0", "softmax 1", "correction")
SHOWN = ("as in FA3", "both")
COLOURS = {
    "maximum": ORANGE,
    "exponentials": GREEN,
    "load": GREY,
    "store": GREY,
}
PRODUCTS = {0: BLUE, 1: SKY}  # by tile
BEGIN, WINDOW = 9000, 5600  # cycles: some blocks in the middle of the run


@styled
def timeline() -> Figure:
    """Two variants over a few blocks of keys, on one axis of time."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    for ax, name in zip(figure.subplots(len(SHOWN), 1, sharex=True), SHOWN):
        draw(ax, compare.run(name))
        ax.set_title(f"modelled, never measured: {name}", loc="left")
    ax.set_xlabel("cycles")
    ax.set_xlim(0, WINDOW)
    legend(figure)
    return figure


def draw(ax: Axes, run: Run) -> None:
    """The lanes of one run."""
    for span in run.spans:
        if span.lane not in LANES or not BEGIN <= span.start < BEGIN + WINDOW:
            continue
        row = LANES.index(span.lane)
        if span.tile is None:
            colour = VERMILION if span.lane == "correction" else COLOURS[span.what]
        else:
            colour = PRODUCTS[span.tile]
        bar = [(span.start - BEGIN, span.end - span.start)]
        ax.broken_barh(bar, (row - 0.4, 0.8), color=colour, linewidth=0)
        if span.tile is not None:
            middle = (span.start + span.end) / 2 - BEGIN
            if middle < WINDOW:
                ax.text(middle, row, span.what, ha="center", va="center", fontsize=6, color="white")
    ax.set_yticks(range(len(LANES)), LANES)
    ax.set_ylim(len(LANES) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")


def legend(figure: Figure) -> None:
    """What the colours mean."""
    labels = {
        "product, tile 0": BLUE,
        "product, tile 1": SKY,
        "largest score": ORANGE,
        "exponentials": GREEN,
        "tensor memory": GREY,
        "rescale": VERMILION,
    }
    handles = [Patch(color=colour, label=label) for label, colour in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)


def data() -> dict[str, object]:
    """What the committed figure is drawn from."""
    return {name: compare.run(name).spans for name in SHOWN}
