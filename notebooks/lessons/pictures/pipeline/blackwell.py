"""FA4's kernel for Blackwell in time: modelled, never measured."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lessons.modelled import compare
from lessons.modelled.model import TENSOR, Run, Span
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
USERS = {TENSOR: BLUE, "softmax 0": GREEN, "softmax 1": ORANGE, "correction": VERMILION}
BEGIN, WINDOW = 9000, 5600  # cycles: some blocks in the middle of the run
FILM, APART = 2400, 40  # cycles: the film covers a block of each tile; least between two frames
REGIONS = {"S 0": (0, 128), "S 1": (128, 256), "O 0": (256, 384), "O 1": (384, 512)}


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


def moments() -> list[float]:
    """The times of the film's frames, in cycles: the middle of each thing that is done."""
    spans = [x for x in compare.run("both").spans if x.lane in LANES]
    middles = sorted((x.start + x.end) / 2 for x in spans)
    chosen = [x for x in middles if BEGIN <= x < BEGIN + FILM]
    return [x for before, x in zip([BEGIN, *chosen], chosen) if x - before > APART]


@styled
def memory(time: float) -> Figure:
    """What each role does at a moment of a run with both ideas, and where in tensor memory."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    ax = figure.subplots()
    now = [span for span in compare.run("both").spans if span.start <= time < span.end]
    for row, lane in enumerate(LANES):
        doing = next((span for span in now if span.lane == lane), None)
        text = "waits" if doing is None else described(doing)
        colour = GREY if doing is None else USERS[lane]
        ax.text(-8, row, lane, ha="right", va="center", fontsize=8)
        ax.text(0, row, text, ha="left", va="center", fontsize=8, color=colour)
    top = len(LANES) - 0.3
    for span in now:
        for first, behind in span.touched:
            wide = max(behind - first, 4)  # so that a single column can be seen
            ax.add_patch(Rectangle((first, top), wide, 1, color=USERS[span.lane], linewidth=0))
    for name, (first, behind) in REGIONS.items():
        ax.add_patch(Rectangle((first, top), behind - first, 1, fill=False, color="black"))
        ax.text((first + behind) / 2, top + 0.5, name, ha="center", va="center", fontsize=8)
    ax.set_xlim(-100, 514)
    ax.set_ylim(top + 1.05, -0.6)
    ax.set_xticks(range(0, 513, 64))
    ax.set_yticks([])
    ax.spines[["left", "top", "right"]].set_visible(False)
    ax.grid(visible=False)
    ax.set_title(f"modelled, never measured: cycle {time - BEGIN:.0f}", loc="left", fontsize=8)
    ax.set_xlabel("columns of tensor memory", fontsize=8)
    return figure


def described(span: Span) -> str:
    """What is done, in words."""
    if span.lane == TENSOR:
        return f"{span.what} of tile {span.tile}"
    if span.what not in ("load", "store"):
        return span.what
    first, behind = span.touched[0]
    if span.lane == "correction":
        what = "alpha" if behind - first == 1 else "O"
    else:
        what = "alpha" if behind - first == 1 else "S" if span.what == "load" else "P"
    return f"{'reads' if span.what == 'load' else 'writes'} {what}"


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
