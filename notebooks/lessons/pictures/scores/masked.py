"""Interval masks in tiles: what of the score matrix is computed, by the lists that kernels use."""

from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from flash_versions import masks
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.masks import MaskOptions
from flash_versions.versions.tiles.intervals import Intervals
from lessons.pictures.scores.tiles import CUT, FULL, UNSEEN
from lessons.pictures.style import INK, bare, styled

SIZE = 64  # rows and columns of a tile
SHADE = 0.25  # of scores that queries see
SKIPPED, MASKED, WHOLE = "skipped", "masked", "full"
COLOURS = {SKIPPED: UNSEEN, MASKED: CUT, WHOLE: FULL}
# A tree of answers: (parent's number, or None, and number of tokens) of each branch.
BRANCHES = [(None, 280), (0, 130), (1, 110), (1, 150), (0, 100), (4, 124), (4, 130)]


class Tiled(NamedTuple):
    """A mask, cut into tiles."""

    kinds: list[list[str]]  # of each tile of queries, of each block of keys
    seen: list[tuple[int, int]]  # of each key: the first query that sees it, and the end of these

    def count(self, *kinds: str) -> int:
        """How many tiles are of these kinds."""
        return sum(kind in kinds for row in self.kinds for kind in row)


def tree_of(branches: list[tuple[int | None, int]]) -> list[int]:
    """The parent of each token, for `masks.tree`, of branches without a fork within."""
    parents: list[int] = []
    last: list[int] = []  # token of each branch
    for parent, length in branches:
        first = len(parents)
        parents += [-1 if parent is None else last[parent], *range(first, first + length - 1)]
        last.append(len(parents) - 1)
    return parents


def examples() -> dict[str, MaskOptions]:
    """Masks of 1024 tokens."""
    return {
        "causal alone": {"causal": True, "query_ends": torch.full((1024,), 1024)},
        "four documents": masks.documents([300, 120, 364, 240]),
        "a prompt and three answers": masks.shared_prompt(400, [200, 150, 274]),
        "a tree with four leaves": masks.tree(tree_of(BRANCHES)),
    }


def request_of(options: MaskOptions) -> Request:
    """A request with a mask, as many queries as keys."""
    x = next(options[name] for name in ("query_ends", "query_starts") if name in options)
    q = torch.zeros(1, x.shape[-1], 1, 16)
    return make_request(q, q, q, **options)


def tiled(options: MaskOptions, size: int = SIZE) -> Tiled:
    """A mask, cut into tiles as `Intervals.of` lists them for FA2's kernels."""
    request = request_of(options)
    intervals = Intervals.of(request, size, size)
    if intervals is None:
        raise ValueError("the options have no interval; add query_ends.")
    kinds = []
    for line in intervals.lists[0].tolist():
        masked, whole = line[:2]
        row = [SKIPPED] * (intervals.blocks // 2)  # numbers are doubled there
        for block in line[2 : 2 + masked]:
            row[block] = MASKED
        for block in line[len(line) - whole :]:
            row[block] = WHOLE
        kinds.append(row)
    starts, ends = intervals.bounds[0].transpose(0, 1).flatten(1)[:, : request.k.shape[1]]
    return Tiled(kinds, list(zip(starts.tolist(), ends.tolist())))


def data() -> dict[str, Tiled]:
    """What the picture is drawn from."""
    return {name: tiled(options) for name, options in examples().items()}


@styled
def draw() -> Figure:
    """The score matrix of each mask: its tiles, and darker the scores that queries see."""
    found = data()
    figure = Figure(figsize=(9.5, 3.3), layout="constrained")
    axes = figure.subplots(1, len(found))
    causal = next(iter(found.values())).count(MASKED, WHOLE)
    for ax, (name, one) in zip(axes, found.items()):
        draw_tiles(ax, one)
        computed = one.count(MASKED, WHOLE)
        share = "" if computed == causal else f", {computed / causal:.0%}"
        ax.set_title(f"{name}\n{computed} tiles{share}", loc="left", fontsize=9)
        ax.set_xlabel("blocks of keys", fontsize=8)
    axes[0].set_ylabel("tiles of queries", fontsize=8)
    handles = [
        Patch(facecolor=UNSEEN, edgecolor="#bbbbbb", label="skipped"),
        Patch(facecolor=CUT, edgecolor="#bbbbbb", label="computed with the mask (barred)"),
        Patch(facecolor=FULL, edgecolor="#bbbbbb", label="computed without it"),
        Patch(facecolor=INK, alpha=SHADE, label="darker: scores that queries see"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def draw_tiles(ax: Axes, one: Tiled) -> None:
    """The tiles of a mask."""
    bare(ax)
    tiles, blocks = len(one.kinds), len(one.kinds[0])
    ax.set_xlim(-0.5, blocks - 0.5)
    ax.set_ylim(tiles - 0.5, -0.5)
    ax.set_aspect("equal")
    for kind, colour in COLOURS.items():
        places = [(t, b) for t, row in enumerate(one.kinds) for b, x in enumerate(row) if x == kind]
        squares = Path.make_compound_path(*(box(b, t, 0.46, -0.46, 0.46) for t, b in places))
        ax.add_patch(PathPatch(squares, facecolor=colour, edgecolor="#bbbbbb", linewidth=0.6))
        if kind == MASKED:
            bars = Path.make_compound_path(*(box(b, t, 0.3, 0.3, 0.36) for t, b in places))
            ax.add_patch(PathPatch(bars, facecolor=INK, linewidth=0))
    starts, ends = (np.array(x) for x in zip(*one.seen))
    corners = corners_of(starts) | corners_of(ends)
    keys, starts, ends = (x[corners] / SIZE - 0.5 for x in (np.arange(len(ends)), starts, ends))
    ax.fill_between(keys, starts, ends, facecolor=INK, alpha=SHADE, linewidth=0)


def box(block: int, tile: int, half: float, top: float, bottom: float) -> Path:
    """A part of a tile, around its middle."""
    left, right = block - half, block + half
    corners = [(left, tile + top), (right, tile + top), (right, tile + bottom)]
    return Path([*corners, (left, tile + bottom), (left, tile + top)], closed=True)


def corners_of(x: np.ndarray) -> np.ndarray:
    """Where a line through all points bends, and its ends."""
    bends = np.diff(x, 2) != 0
    return np.concatenate(([True], bends, [True]))
