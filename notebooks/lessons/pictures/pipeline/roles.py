"""FA4's roles on Hopper as a state machine: the table of
flash_versions/versions/fa4/hopper/roles.py, drawn.

Every arrow is a row of `TABLE`; a test counts them. What is added is the decision inside the state
`score`, which the function `correct` of flash_versions/versions/fa4/hopper/correction.py makes.
"""

import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from flash_versions.versions.fa4.hopper.roles import DONE, MEANING, START, TABLE, Transition
from lessons.pictures.style import GREEN, INK, ORANGE, SKY, bare, styled

COLOURS = {"loader": SKY, "consumer": ORANGE, "storer": GREEN}
X = {"loader": 0.0, "consumer": 5.6, "storer": 14.5}
DRAIN_X = 10.8
# (role, state) -> centre of its box.
PLACES = {
    **{(role, START): (x - 0.6, 8.0) for role, x in X.items()},
    **{(role, DONE): (x + 0.7, 8.0) for role, x in X.items()},
    ("loader", "claim"): (X["loader"], 6.5),
    ("loader", "load"): (X["loader"], 4.1),
    ("consumer", "await"): (X["consumer"], 6.5),
    ("consumer", "score"): (X["consumer"], 4.9),
    ("consumer", "softmax"): (X["consumer"], 3.3),
    ("consumer", "correct"): (X["consumer"], 1.7),
    ("consumer", "drain"): (DRAIN_X, 1.7),
    ("consumer", "hand over"): (DRAIN_X, 6.5),
    ("storer", "idle"): (X["storer"], 6.5),
    ("storer", "store"): (X["storer"], 4.1),
}
HALF_W, HALF_H = 1.0, 0.36  # of a box
END_W, END_H = 0.55, 0.2  # of start and done
ASIDE = 0.55  # how far from the middle two arrows between the same boxes are
WRAPPED = {"left": 19, "right": 19, "center": 24}  # characters of a line, by side

Point = tuple[float, float]


class Way(NamedTuple):
    """How an arrow goes, and where its text stands."""

    points: list[Point]
    text: Point
    side: str  # of the text that is at that point


def way(role: str, state: str, then: str) -> Way:
    """The way of a transition's arrow."""
    (x, y), (u, v) = PLACES[role, state], PLACES[role, then]
    half = (y + v) / 2
    if state == then:  # a loop on the left
        left, out = x - HALF_W, x - HALF_W - 0.45
        points = [(left, y - 0.18), (out, y - 0.18), (out, y + 0.18), (left, y + 0.18)]
        return Way(points, (out - 0.1, y), "right")
    if then == DONE:
        return Way([(u, y + HALF_H), (u, v - END_H)], (u + 0.1, half), "left")
    if state == START:
        return Way([(x, y - END_H), (x, v + HALF_H)], (x, half), "left")
    if (state, then) == ("correct", "score"):  # back, past softmax
        out = x - HALF_W - 0.5
        points = [(x - HALF_W, y), (out, y), (out, v), (u - HALF_W, v)]
        return Way(points, (out - 0.1, half), "right")
    if y == v:
        right = 1 if u > x else -1
        points = [(x + right * HALF_W, y), (u - right * HALF_W, v)]
        return Way(points, ((x + u) / 2, y + 0.12), "center")
    down = 1 if v < y else -1
    if role == "consumer":
        aside, side = 0.0, "left"
    else:  # there and back
        aside, side = (-ASIDE, "right") if down > 0 else (ASIDE, "left")
    points = [(x + aside, y - down * HALF_H), (u + aside, v + down * HALF_H)]
    return Way(points, (x + aside + (0.1 if side == "left" else -0.1), half), side)


@styled
def state_machine() -> Figure:
    """States as boxes, transitions as arrows with their conditions, and what each state does."""
    figure = Figure(figsize=(9.8, 6.5), layout="constrained")
    ax = figure.subplots()
    bare(ax)
    ax.set_xlim(-3.4, 17.6)
    ax.set_ylim(-0.6, 9.1)
    for (role, state), place in PLACES.items():
        box(ax, role, state, place)
    for step in TABLE:
        connect(ax, step)
    for role, x in X.items():
        x, title = (x, role) if role != "consumer" else (8.05, "consumers, 64 query rows each")
        ax.text(x, 8.8, title, ha="center", va="center", fontsize=11, weight="bold")
    decision(ax)
    return figure


def box(ax: Axes, role: str, state: str, place: Point) -> None:
    """A state; start and done have no work in them."""
    (x, y), ends = place, state in (START, DONE)
    half_w, half_h = (END_W, END_H) if ends else (HALF_W, HALF_H)
    shape = FancyBboxPatch(
        (x - half_w, y - half_h),
        2 * half_w,
        2 * half_h,
        boxstyle="round,pad=0,rounding_size=0.15",
        facecolor="white" if ends else COLOURS[role],
        edgecolor=INK,
        linewidth=0.8,
    )
    ax.add_patch(shape)
    ax.text(x, y, state, ha="center", va="center", fontsize=8 if ends else 10)


def connect(ax: Axes, step: Transition) -> None:
    """The arrow of a transition."""
    points, (x, y), side = way(step.role, step.state, step.then)
    arrow = FancyArrowPatch(
        path=Path(points),
        arrowstyle="-|>",
        mutation_scale=9,
        color=INK,
        fill=False,
        linewidth=0.9,
        gid=f"{step.role}: {step.state} to {step.then}",
    )
    ax.add_patch(arrow)
    if step.when != "always":
        align = "bottom" if side == "center" else "center"
        text = textwrap.fill(step.when, WRAPPED[side])
        ax.text(x, y, text, ha=side, va=align, fontsize=7, linespacing=1.1)


def decision(ax: Axes) -> None:
    """What is decided in `score`, warp by warp; and what is done in the states."""
    x, y = PLACES["consumer", "score"]
    ax.text(
        x + 1.7,
        y,
        "each warp decides:\nwas one of its rows raised?\nyes: acc *= alpha\nno: acc stays",
        ha="left",
        va="center",
        fontsize=8,
        bbox={"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": INK},
    )
    ax.plot([x + HALF_W, x + 1.5], [y, y], linestyle=":", color=INK, linewidth=1)
    lines = [f"{state}: {what}" for (_, state), what in MEANING.items()]
    half = -(-len(lines) // 2)
    for x, part in ((-3.3, lines[:half]), (7.6, lines[half:])):
        ax.text(x, 0.7, "\n".join(part), ha="left", va="top", fontsize=7, linespacing=1.35)
