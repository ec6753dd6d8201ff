"""The tiles of S and the order in which they are visited, as figures."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lessons.pictures.scores.schedule import (
    Visit,
    finish_time,
    square,
    starting_orders,
    visits,
    walk,
)
from lessons.pictures.style import BLUE, INK, ORANGE, PALE, SKY, TITLES, bare, styled

SKIPPED, MASKED, WHOLE = range(3)  # kinds of tiles
COLOURS = ListedColormap([PALE, ORANGE, SKY])
NAMES = {**TITLES, "fa3 hopper": "FA3, for Hopper"}


@styled
def compare(*versions: str, blocks: int = 6) -> Figure:
    """Causal S in square tiles, of several versions: a number for each visit, in the order of its
    program. Programs run at the same time, so each row begins at 1; the paper's loop is one.
    """
    figure = Figure(figsize=(9.5, 9.5 / len(versions) + 0.8), layout="constrained")
    axes = figure.subplots(1, len(versions), squeeze=False).flatten()
    for ax, version in zip(axes, versions):
        draw_order(ax, version, blocks)
    legend(figure)
    return figure


def draw_order(ax: Axes, version: str, blocks: int) -> None:
    """The numbered tiles of a version, and in front of each row its program."""
    found = visits(version, square(blocks, causal=True))
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
    kinds = np.full((blocks, blocks), SKIPPED)
    begun: dict[int, int] = {}
    for visit in found:
        kinds[visit.tile, visit.block] = MASKED if visit.masked else WHOLE
        begun[visit.program] = begun.get(visit.program, 0) + 1
        ax.text(visit.block, visit.tile, str(begun[visit.program]), ha="center", va="center")
    draw_tiles(ax, kinds)
    ax.set_xlabel("KV blocks")


def draw_tiles(ax: Axes, kinds: np.ndarray) -> None:
    """Tiles of S, kinds (tiles of queries, blocks of keys). A masked one has a bar at its foot, for
    readers who do not see colours.
    """
    bare(ax)
    rows, columns = kinds.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    ax.pcolormesh(*edges, kinds, cmap=COLOURS, vmin=SKIPPED, vmax=WHOLE, edgecolor="white")
    row, column = np.nonzero(kinds == MASKED)
    ax.hlines(row + 0.33, column - 0.3, column + 0.3, color=INK, linewidth=1.2)
    ax.invert_yaxis()
    ax.set_aspect("equal")


def legend(figure: Figure, *more: Patch) -> None:
    """What the colours say."""
    names = ("skipped", "computed with the mask (barred)", "computed without it")
    handles = [Patch(facecolor=COLOURS(kind), label=name) for kind, name in enumerate(names)]
    figure.legend(
        handles=[*handles, *more], loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )


@styled
def walk_order(tiles: int = 4, heads: int = 3, sms: int = 5) -> Figure:
    """Which SM works on which tile, and when, in FA2's order and in FA3's: a bar for each tile, as
    long as it has KV blocks, and darker the longer. Its name is a letter for the head, a number for
    the query tile.
    """
    shown = {name: x for name, x in starting_orders(heads, tiles).items() if "most" in name}
    figure = Figure(figsize=(9.5, 0.26 * sms * len(shown) + 1.8), layout="constrained")
    axes = figure.subplots(len(shown), 1, sharex=True)
    for ax, (name, order) in zip(axes, shown.items()):
        for sm, head, tile, start, end in walk(order, sms):
            share, middle = (tile + 1) / tiles, (start + end) / 2
            ax.broken_barh([(start, end - start)], (sm - 0.42, 0.84), color=BLUE,
                           alpha=0.25 + 0.75 * share, edgecolor="white", linewidth=1.2)  # fmt: skip
            ax.text(middle, sm, f"{'abcdefgh'[head]}{tile}", ha="center", va="center", fontsize=7,
                    color="white" if share > 0.45 else INK)  # fmt: skip
        last = finish_time(order, sms)
        ax.axvline(last, color=INK, linewidth=1)
        ax.set_title(f"{name}: {last} blocks until the last tile is done", loc="left")
        ax.set_yticks(range(sms), [f"SM {sm}" for sm in range(sms)])
        ax.set_ylim(sms - 0.4, -0.6)
        ax.grid(visible=False, axis="y")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("time, in KV blocks; b3 is query tile 3 of head b")
    return figure
