"""The state of FA1's online softmax: m, l and o of a few rows, block after block."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from lessons.kernels.recording import Step
from lessons.pictures.style import BLUE, GREEN, ORANGE, VERMILION, styled

ROWS = 4
LINES = [(BLUE, "o"), (ORANGE, "s"), (GREEN, "D"), (VERMILION, "^")]  # of each row
PANELS = ("m, the maximum of scores", "l, the sum of exponentials", "o, its length")


def frames(steps: Sequence[Step]) -> list[tuple[Sequence[Step], int]]:
    """A moment for each step of one query tile."""
    return [(steps, index) for index in range(len(steps))]


@styled
def frame(moment: tuple[Sequence[Step], int]) -> Figure:
    """m, l and the length of o of the first rows after each block, up to one block; the axes are
    those of all blocks. A picture of `film(frames(steps), frame, caption)`.
    """
    steps, last = moment
    after = [step.after for step in steps]
    states = np.array(
        [[x["row_max"], x["row_sum"], np.linalg.norm(x["o"], axis=1)] for x in after]
    )[..., :ROWS]
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    for panel, ax in enumerate(figure.subplots(1, len(PANELS))):
        values = states[:, panel]
        for row, (colour, marker) in enumerate(LINES):
            ax.plot(values[: last + 1, row], color=colour, marker=marker, label=f"row {row}")
        room = 0.1 * (values.max() - values.min())
        ax.set_ylim(values.min() - room, values.max() + room)
        ax.set_xlim(-0.3, len(steps) - 0.7)
        ax.set_xticks(range(len(steps)), [str(step.j) for step in steps])
        ax.set_xlabel("KV block")
        ax.set_title(PANELS[panel], loc="left")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=ROWS,
                  fontsize=8, frameon=False)  # fmt: skip
    return figure
