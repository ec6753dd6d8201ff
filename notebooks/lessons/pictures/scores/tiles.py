"""The tiles of S and the order in which they are visited, as figures."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lessons.pictures.scores.schedule import Visit, Walked, square, visits, walk
from lessons.pictures.style import BLUE, INK, ORANGE, PALE, SKY, TITLES, bare, styled

FULL, CUT, UNSEEN = SKY, ORANGE, PALE
NAMES = {**TITLES, "fa3 hopper": "FA3, for Hopper"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COMPARED = ("paper", "fa1", "fa2", "fa4")


@styled
def compare(causal: bool = True, versions: tuple[str, ...] = COMPARED, blocks: int = 6) -> Figure:
    """S in square tiles, of several versions: a number for each visit, in the order of its program.
    Programs run at the same time, so each row begins at 1; the paper's loop is one program.
    """
    figure = Figure(figsize=(9.5, 9.5 / len(versions) + 0.8), layout="constrained")
    axes = figure.subplots(1, len(versions), squeeze=False).flatten()
    for ax, version in zip(axes, versions):
        draw_order(ax, version, blocks, causal)
    legend(figure)
    return figure


def draw_order(ax: Axes, version: str, blocks: int, causal: bool) -> None:
    """The numbered tiles of a version, and in front of each row its program."""
    found = visits(version, square(blocks, causal))
    draw(ax, found, blocks)
    if version == "paper":
        ax.set_ylabel("query tiles")
    else:
        programs = {visit.tile: f"p{visit.program}" for visit in found}
        ax.set_yticks(list(programs), list(programs.values()))
        ax.tick_params(axis="y", length=0)
    ax.set_title(NAMES[version], loc="left")


def draw(ax: Axes, found: list[Visit], blocks: int) -> None:
    """Tiles of S with the numbers of their visits within their program."""
    bare(ax)
    ax.set_xlim(-0.5, blocks - 0.5)
    ax.set_ylim(blocks - 0.5, -0.5)
    ax.set_aspect("equal")
    seen = {(visit.tile, visit.block) for visit in found}
    for tile in range(blocks):
        for block in range(blocks):
            colour = "white" if (tile, block) in seen else UNSEEN
            square_at(ax, tile, block, colour)
    begun: dict[int, int] = {}
    for visit in found:
        begun[visit.program] = begun.get(visit.program, 0) + 1
        square_at(ax, visit.tile, visit.block, CUT if visit.masked else FULL, visit.masked)
        ax.text(visit.block, visit.tile, str(begun[visit.program]), ha="center", va="center")
    ax.set_xlabel("KV blocks")


def square_at(ax: Axes, tile: int, block: int, colour: str, masked: bool = False) -> None:
    """One tile; a masked one has a bar at its foot, for who does not see colours."""
    place = (block - 0.46, tile - 0.46)
    ax.add_patch(Rectangle(place, 0.92, 0.92, facecolor=colour, edgecolor="#bbbbbb", linewidth=0.6))
    if masked:
        ax.add_patch(Rectangle((block - 0.3, tile + 0.3), 0.6, 0.06, facecolor=INK, linewidth=0))


def legend(figure: Figure) -> None:
    """What the colours say."""
    handles = [
        Patch(facecolor=FULL, edgecolor="#bbbbbb", label="visited without a mask"),
        Patch(facecolor=CUT, edgecolor="#bbbbbb", label="visited with the mask (barred)"),
        Patch(facecolor=UNSEEN, edgecolor="#bbbbbb", label="never visited"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


WALKS = {
    "a grid, head by head (FA2)": ("grid", 1),
    "a grid, the heaviest tiles of all heads first (FA3)": ("grid", None),
    "persistent, in static rounds back and forth": ("static", None),
    "persistent, tiles claimed from a counter": ("dynamic", None),
}


def walks(tiles: int, heads: int, programs: int, causal: bool) -> dict[str, list[Walked]]:
    """What `walk_order` shows: {name: who works on what}."""
    shape = square(tiles, causal)
    return {
        name: walk(scheduler, shape, heads, programs, section or heads)
        for name, (scheduler, section) in WALKS.items()
    }


@styled
def walk_order(tiles: int = 4, heads: int = 3, programs: int = 5, causal: bool = True) -> Figure:
    """Which multiprocessor works on which tile, and when: a bar for each tile, as long as it has KV
    blocks. Its name is a letter for the head, a number for the query tile.
    """
    found = walks(tiles, heads, programs, causal)
    figure = Figure(figsize=(9.5, 0.26 * programs * len(found) + 3.0), layout="constrained")
    axes = figure.subplots(len(found), 1, sharex=True)
    for ax, (name, walk_) in zip(axes, found.items()):
        end = max(walked.end for walked in walk_)
        for walked in walk_:
            draw_walked(ax, walked, tiles)
        busy = sum(walked.end - walked.start for walked in walk_) / (programs * end)
        ax.axvline(end, color=INK, linewidth=1)
        ax.set_title(f"{name}: {end} steps, busy {100 * busy:.0f} %", loc="left")
        ax.set_yticks(range(programs), [f"SM {p}" for p in range(programs)])
        ax.set_ylim(programs - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("time, in KV blocks; b3 is query tile 3 of head b")
    return figure


def draw_walked(ax: Axes, walked: Walked, tiles: int) -> None:
    """A bar, the darker the heavier."""
    length, share = walked.end - walked.start, (walked.end - walked.start) / tiles
    ax.broken_barh(
        [(walked.start, length)],
        (walked.program - 0.42, 0.84),
        facecolor=BLUE,
        alpha=0.25 + 0.75 * share,
        edgecolor="white",
        linewidth=1.2,
    )
    ax.text(
        walked.start + length / 2,
        walked.program,
        f"{LETTERS[walked.head % 26]}{walked.tile}",
        ha="center",
        va="center",
        fontsize=7,
        color="white" if share > 0.45 else INK,
    )
