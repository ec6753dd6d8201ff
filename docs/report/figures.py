"""Figures of the transformer: the losses of training, generation, and the gap of GRPO."""

import statistics
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flash_versions import VERSIONS
from flash_versions.bench.results import Document, rows_of
from flash_versions.plot.figures import Plot, grid, style_of

WINDOW = 10  # steps that a loss is a mean of: batches differ more than versions do
MARKERS = "osD^vP"  # of models, as COLOURS
COLOURS = ["#56B4E9", "#0072B2", "#D55E00", "#CC79A7", "#009E73"]
STYLES: dict[str, Any] = {  # of who generates
    "ours": "-",
    "transformers": "--",
    "transformers compiled": ":",
    "torch compiled": "-.",
}


def generation_data(document: Document) -> dict[str, Any] | None:
    """Tokens per second by model: over the batch with a prompt of one length, and over the length
    with one prompt; {model: {"batch" or "prompt": {who: [(x, rate)]}}}.
    """
    found: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {}
    rows = [row for row in rows_of(document, "generate") if "ms_per_step" in row]
    shortest = min((row["prompt"] for row in rows), default=0)
    for row in sorted(rows, key=lambda row: (row["prompt"], row["batch"])):
        rate = 1000 * row["batch"] / row["ms_per_step"]
        panels = found.setdefault(row["case"], {"batch": {}, "prompt": {}})
        for axis, wanted in (("batch", row["prompt"] == shortest), ("prompt", row["batch"] == 1)):
            if wanted:
                panels[axis].setdefault(row["contestant"], []).append((row[axis], rate))
    return found or None


def draw_generation(found: dict[str, Any]) -> Figure:
    """Two panels: over the batch, and over the tokens before. Single points are left out."""
    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    titles = {"batch": "rows of a batch", "prompt": "tokens before, one row"}
    for ax, (axis, title) in zip(figure.subplots(1, 2, sharey=True), titles.items()):
        lines = {
            (case, who): points
            for case, panels in found.items()
            for who, points in panels[axis].items()
            if len(points) > 1
        }
        for (case, who), points in lines.items():
            number = [*found].index(case)
            look = {"marker": MARKERS[number], "color": COLOURS[number], "linestyle": STYLES[who]}
            ax.plot(*zip(*points), **look, gid=f"{case} {who}")
        ax.set(xscale="log", yscale="log")
        ax.minorticks_off()
        ax.set_title(title, loc="left")
        ticks = sorted({x for points in lines.values() for x, _ in points})
        ax.set_xticks(ticks, [str(x) for x in ticks])
    figure.axes[0].set_ylabel("tokens per second, all rows")
    models = [
        Line2D([], [], color=colour, marker=marker, label=case)
        for case, colour, marker in zip(found, COLOURS, MARKERS)
    ]
    whose = [Line2D([], [], color="#666666", linestyle=x, label=who) for who, x in STYLES.items()]
    figure.legend(handles=models + whose, loc="outside right center", frameon=False, fontsize=8)
    return figure


def loss_curves(document: Document, window: int) -> dict[str, list[list[float]]] | None:
    """{version: [losses of each seed]}, a mean for each `window` steps; None if not measured."""
    found: dict[str, list[list[float]]] = {}
    for row in rows_of(document, "training curve"):
        losses, starts = row["losses"], range(0, len(row["losses"]), window)
        means = [statistics.fmean(losses[start : start + window]) for start in starts]
        found.setdefault(row["version"], []).append(means)
    return found or None


def draw_curves(curves: dict[str, list[list[float]]]) -> Figure:
    """A panel for each version: its loss and torch's, a mean of the seeds and their range."""
    ours = [name for name in curves if name != "sdpa"]
    figure, axes = grid(len(ours), 2)
    for ax, name in zip(axes, ours):
        for one, colour in (("sdpa", "black"), (name, style_of(name, [*VERSIONS])["color"])):
            losses = np.array(curves[one])
            steps = WINDOW * np.arange(1, losses.shape[1] + 1)
            low, high = losses.min(axis=0), losses.max(axis=0)
            ax.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0, gid=one)
            ax.plot(steps, losses.mean(axis=0), color=colour, linewidth=1.1, gid=one, label=one)
        ax.set(xlabel="step", yscale="log")
        ax.set_title(f"sdpa and {name}", loc="left")
        ax.set_yticks([1, 2, 3, 4, 5], "12345")
        ax.minorticks_off()
        ax.legend(frameon=False)
    axes[0].set_ylabel(f"loss of a token, mean of {WINDOW} steps")
    figure.suptitle("Training from scratch: mean and range of the seeds", x=0.01, ha="left")
    return figure


def gaps(document: Document) -> list[tuple[str, list[tuple[int, float]]]] | None:
    """Each run with its largest gap in every step that learned: [(name, [(step, nats)])]."""
    found = []
    for row in rows_of(document, "run"):
        points = [(step, x) for step, x in enumerate(row["gap_max"], 1) if x is not None]
        found.append(("--exact" if row["exact"] else f"ordinary, seed {row['seed']}", points))
    return found or None


def draw_gaps(runs: list[tuple[str, list[tuple[int, float]]]]) -> Figure:
    """The gap over the steps, a point for each."""
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    ax = figure.subplots()
    for (name, points), marker, colour in zip(runs, MARKERS, ["black", *COLOURS]):
        ax.plot(*zip(*points), marker, color=colour, markersize=3, gid=name, label=name)
    ax.set(xlabel="step", ylabel="nats")
    ax.set_title("Largest gap of sampler and trainer", loc="left")
    ax.legend(frameon=False)
    return figure


FIGURES = {
    "training": Plot("transformer", lambda document: loss_curves(document, WINDOW), draw_curves),
    "generation": Plot("transformer", generation_data, draw_generation),
    "gap": Plot("transformer", gaps, draw_gaps),
}
