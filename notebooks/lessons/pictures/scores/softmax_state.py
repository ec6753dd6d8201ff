"""The state of the online softmax: m, l and acc of a few rows, block after block.

A step is one of `lessons.record`, or anything with the dicts `before` and `after` of arrays:
row_max (rows,), row_sum (rows,), and acc or o (rows, head_dim); `j` is its KV block.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lessons.pictures.style import BLUE, GREEN, INK, ORANGE, SKY, VERMILION, styled

ROWS = (0, 1, 2, 3)
PANELS = {
    "m": "m, the maximum of scores",
    "l": "l, the sum of exponentials",
    "acc": "acc, its length",
}


class Step(Protocol):
    """What a picture reads of a step."""

    @property
    def j(self) -> int: ...  # noqa: D102
    @property
    def before(self) -> dict[str, np.ndarray]: ...  # noqa: D102
    @property
    def after(self) -> dict[str, np.ndarray]: ...  # noqa: D102


def state(arrays: dict[str, np.ndarray], rows: Sequence[int]) -> dict[str, np.ndarray]:
    """m, l and the length of acc (or o, where it is kept normalised) of some rows.

    Raises:
        ValueError: an array is missing, or has not so many rows.
    """
    big = arrays.get("acc", arrays.get("o"))
    if big is None or "row_max" not in arrays or "row_sum" not in arrays:
        raise ValueError(
            f"the state has {', '.join(arrays)}; row_max, row_sum and acc (or o) are needed."
        )
    if max(rows) >= len(big):
        raise ValueError(f"rows={tuple(rows)} is not possible; there are {len(big)} rows.")
    at = list(rows)
    return {
        "m": np.asarray(arrays["row_max"], dtype=float)[at],
        "l": np.asarray(arrays["row_sum"], dtype=float)[at],
        "acc": np.linalg.norm(np.asarray(big, dtype=float)[at], axis=1),
    }


def name_of(step: Step) -> str:
    """What its accumulator is called: FA1 keeps o."""
    return "acc" if "acc" in step.after else "o"


def frames(steps: Sequence[Step]) -> list[tuple[Sequence[Step], int]]:
    """A moment for each step."""
    return [(steps, index) for index in range(len(steps))]


@styled
def frame(moment: tuple[Sequence[Step], int], rows: Sequence[int] = ROWS) -> Figure:
    """m, l and the length of acc of a few rows after each block of one query tile, up to one block;
    the axes are those of all blocks. A picture of `film(frames(steps), frame, caption)`.
    """
    steps, last = moment
    states = [state(step.after, rows) for step in steps]
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    colours, markers = (BLUE, ORANGE, GREEN, VERMILION, SKY, INK), "osD^vX"
    for ax, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items()):
        for number, row in enumerate(rows):
            values = [s[name][number] for s in states[: last + 1]]
            ax.plot(
                range(len(values)),
                values,
                color=colours[number % len(colours)],
                marker=markers[number % len(markers)],
                label=f"row {row}",
            )
        limits(ax, np.array([s[name] for s in states]), len(steps))
        ax.set_xticks(range(len(steps)), [str(step.j) for step in steps])
        ax.set_xlabel("KV block")
        ax.set_title(title.replace("acc", name_of(steps[0])), loc="left")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(rows), fontsize=8, frameon=False
    )
    return figure


def limits(ax: Axes, values: np.ndarray, blocks: int) -> None:
    """Axes that hold all values, so that a film does not jump."""
    found = values[np.isfinite(values)]
    low, high = (found.min(), found.max()) if found.size else (0.0, 1.0)
    room = 0.1 * (high - low) or 0.5
    ax.set_ylim(low - room, high + room)
    ax.set_xlim(-0.3, blocks - 0.7)
