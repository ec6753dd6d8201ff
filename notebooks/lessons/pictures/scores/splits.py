"""Split-KV: which keys each split sees, and how their results become one.

The numbers in the tree are computed: one query, its keys shared out, each split's (m, l, acc) and
every combination of two. The kernel (flash_versions/versions/fa2/combine.py) takes all splits of a
row at once; as combining is associative, any tree gives the same.
"""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lessons.pictures.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, bare, styled

COLOURS = (SKY, ORANGE, GREEN, PURPLE, VERMILION, BLUE)
FORMULA = (
    r"$m=\max(m_a,m_b)\qquad l=2^{m_a-m}\,l_a+2^{m_b-m}\,l_b\qquad "
    r"\mathrm{acc}=2^{m_a-m}\,\mathrm{acc}_a+2^{m_b-m}\,\mathrm{acc}_b$"
)
END = r"$o=\mathrm{acc}\,/\,l$"


class Partial(NamedTuple):
    """What a range of keys leaves of one query: log2 units; acc has one dimension here."""

    m: float
    l: float  # noqa: E741
    acc: float


def attend(scores: np.ndarray, values: np.ndarray) -> Partial:
    """Unnormalised attention of one query over some keys; scores in log2 units."""
    m = float(scores.max())
    p = np.exp2(scores - m)
    return Partial(m, float(p.sum()), float(p @ values))


def combine(a: Partial, b: Partial) -> Partial:
    """Two partial results over disjoint keys into the one over both."""
    m = max(a.m, b.m)
    wa, wb = float(np.exp2(a.m - m)), float(np.exp2(b.m - m))
    return Partial(m, wa * a.l + wb * b.l, wa * a.acc + wb * b.acc)


def inputs(n: int, keys: int = 4, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Random scores (log2 units) and values of one query's keys, each (n, keys of a split)."""
    random = np.random.default_rng(seed)
    return random.normal(size=(n, keys)) * 2, random.normal(size=(n, keys))


def levels(n: int = 4) -> list[list[Partial]]:
    """The tree over n splits: partial results, level by level, one at the end.

    Raises:
        ValueError: n is not possible.
    """
    if not 1 <= n <= 8:
        raise ValueError(f"n={n} is not possible; 1 to 8 splits can be drawn.")
    scores, values = inputs(n)
    found = [[attend(s, v) for s, v in zip(scores, values)]]
    while len(found[-1]) > 1:
        last = found[-1]
        pairs = [combine(*last[i : i + 2]) for i in range(0, len(last) - 1, 2)]
        found.append(pairs + last[len(pairs) * 2 :])
    return found


@styled
def tree(n: int = 4) -> Figure:
    """Splits of the keys of one query, their partial results, and the tree that combines them."""
    found = levels(n)
    figure = Figure(figsize=(9.0, 1.6 + 1.05 * (len(found) + 1)), layout="constrained")
    ax = figure.subplots()
    bare(ax)
    ax.set_xlim(-0.6, n - 0.4)
    bottom = -1.0 * len(found) - 0.3
    ax.set_ylim(bottom, 1.25)
    for split in range(n):
        keys_of(ax, split)
    places: list[list[float]] = [[float(split) for split in range(n)]]
    for level, partials in enumerate(found):
        if level:
            before = places[-1]
            pairs = [sum(before[i : i + 2]) / 2 for i in range(0, len(before) - 1, 2)]
            places.append(pairs + before[len(pairs) * 2 :])
            for number, x in enumerate(places[-1]):
                for child in before[2 * number : 2 * number + 2]:
                    arrow(ax, (child, -level + 0.68), (x, -level + 0.32))
        for x, partial in zip(places[-1], partials):
            box(ax, x, -level, partial, COLOURS[round(x) % len(COLOURS)] if not level else "white")
    root = found[-1][0]
    ax.text(
        places[-1][0],
        -len(found) + 0.45,
        f"{END} $=$ {root.acc / root.l:.3f}",
        ha="center",
        va="center",
        fontsize=11,
    )
    ax.text((n - 1) / 2, bottom + 0.2, FORMULA, ha="center", va="center", fontsize=11)
    ax.set_title(
        "One query, its keys in splits: each leaves m, l and acc, two become one", loc="left"
    )
    return figure


def keys_of(ax: Axes, split: int, keys: int = 4) -> None:
    """The keys of a split, and the arrow to what it leaves."""
    width = 0.84 / keys
    for key in range(keys):
        place = (split - 0.42 + key * width, 0.66)
        colour = COLOURS[split % len(COLOURS)]
        ax.add_patch(Rectangle(place, width * 0.92, 0.26, facecolor=colour, edgecolor="white"))
    ax.text(split, 0.96, f"keys of split {split}", ha="center", va="bottom", fontsize=8)
    arrow(ax, (split, 0.64), (split, 0.32))


def box(ax: Axes, x: float, y: float, partial: Partial, colour: str) -> None:
    """A partial result."""
    place = (x - 0.42, y - 0.3)
    ax.add_patch(
        Rectangle(place, 0.84, 0.6, facecolor=colour, alpha=0.35, edgecolor=INK, linewidth=0.8)
    )
    text = f"m = {partial.m:.2f}\nl = {partial.l:.2f}\nacc = {partial.acc:.2f}"
    ax.text(x, y, text, ha="center", va="center", fontsize=8)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From one to the other."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.0})


def data() -> dict[str, object]:
    """What the committed figures of this module are drawn from."""
    return {"levels": [[[round(x, 4) for x in partial] for partial in level] for level in levels()]}
