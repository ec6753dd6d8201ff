"""Interval masks in tiles: what of the score matrix is computed, by the lists that kernels use."""

from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flash_versions import masks
from flash_versions.dispatch.request import make_request
from flash_versions.versions.masks import MaskOptions
from flash_versions.versions.tiles.intervals import Intervals
from lessons.pictures.scores.tiles import MASKED, SKIPPED, WHOLE, draw_tiles, legend
from lessons.pictures.style import INK, styled

LENGTH, SIZE = 1024, 64  # tokens; rows and columns of a tile
SHADE = 0.25  # of scores that queries see
# A tree of answers: (parent's number, or None, and number of tokens) of each branch.
BRANCHES = [(None, 280), (0, 130), (1, 110), (1, 150), (0, 100), (4, 124), (4, 130)]


class Tiled(NamedTuple):
    """A mask, cut into tiles."""

    kinds: list[list[int]]  # of each tile of queries, of each block of keys
    seen: list[tuple[int, int]]  # of each key: the first query that sees it, and the end of these


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
    """Masks of LENGTH tokens."""
    return {
        "causal alone": {"causal": True, "query_ends": torch.full((LENGTH,), LENGTH)},
        "four documents": masks.documents([300, 120, 364, 240]),
        "a prompt and three answers": masks.shared_prompt(400, [200, 150, 274]),
        "a tree with four leaves": masks.tree(tree_of(BRANCHES)),
    }


def tiled(options: MaskOptions) -> Tiled:
    """A mask, cut into tiles as `Intervals.of` lists them for FA2's kernels."""
    q = torch.zeros(1, LENGTH, 1, 16)
    intervals = Intervals.of(make_request(q, q, q, **options), SIZE, SIZE)
    assert intervals is not None
    kinds = np.full((LENGTH // SIZE, LENGTH // SIZE), SKIPPED)
    for row, line in zip(kinds, intervals.lists[0].tolist()):
        masked, whole = line[:2]
        row[line[2 : 2 + masked]] = MASKED
        row[line[len(line) - whole :]] = WHOLE
    starts, ends = intervals.bounds[0].transpose(0, 1).flatten(1)[:, :LENGTH].tolist()
    return Tiled(kinds.tolist(), list(zip(starts, ends)))


def data() -> dict[str, Tiled]:
    """What the picture is drawn from."""
    return {name: tiled(options) for name, options in examples().items()}


@styled
def draw() -> Figure:
    """The score matrix of each mask: its tiles, and darker the scores that queries see."""
    found = data()
    figure = Figure(figsize=(9.5, 3.3), layout="constrained")
    axes = figure.subplots(1, len(found))
    causal = np.count_nonzero(found["causal alone"].kinds)
    for ax, (name, one) in zip(axes, found.items()):
        draw_tiles(ax, np.array(one.kinds))
        seen = np.array(one.seen).T
        corners = np.flatnonzero(np.pad(np.diff(seen, 2).any(0), 1, constant_values=True))
        keys, starts, ends = (x / SIZE - 0.5 for x in (corners, *seen[:, corners]))
        ax.fill_between(keys, starts, ends, facecolor=INK, alpha=SHADE, linewidth=0)
        computed = np.count_nonzero(one.kinds)
        share = "" if computed == causal else f", {computed / causal:.0%}"
        ax.set_title(f"{name}\n{computed} tiles{share}", loc="left", fontsize=9)
        ax.set_xlabel("blocks of keys", fontsize=8)
    axes[0].set_ylabel("tiles of queries", fontsize=8)
    legend(figure, Patch(facecolor=INK, alpha=SHADE, label="darker: scores that queries see"))
    return figure
