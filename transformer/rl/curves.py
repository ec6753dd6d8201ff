"""The curves of GRPO runs: what was earned, on held-out problems too, and what goes with it."""

import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from transformer import missing
from transformer.generation.command import Parser
from transformer.model.files import replacing
from transformer.rl.run import read_metrics

# Okabe and Ito's colours, one for each run.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
# (metric of a step, title of its panel).
PANELS = (
    ("reward", "reward of the rollouts"),
    ("length", "tokens of a completion"),
    ("entropy", "entropy of a token, nats"),
    ("skipped", "groups without a spread"),
    ("gradient_norm", "norm of the gradient"),
    ("gap_max", "largest gap of sampler and trainer, nats"),
    ("sampler_kl", "KL of sampler and trainer, nats"),
)


def draw(folders: Sequence[Path], path: Path) -> None:
    """Draw runs over their steps into an image file.

    Raises:
        ImportError: matplotlib is not installed.
        FileNotFoundError: a folder holds no run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [folder.name for folder in folders]
    alike = len({*names}) < len(names) or "" in names
    runs = {str(x) if alike else x.name: read_metrics(x) for x in folders}
    figure = Figure(figsize=(15, 6.4), layout="constrained")
    axes = figure.subplots(2, 4).flat
    _held_out(axes[0], runs)
    for axis, (metric, title) in zip(axes[1:], PANELS):
        for colour, lines in zip(cycle(COLOURS), runs.values()):
            if points := _points(lines, "step", metric):
                axis.plot(*zip(*points), color=colour, linewidth=1.2)
            if metric == "reward" and (held_out := _points(lines, "evaluation", metric)):
                axis.plot(*zip(*held_out), "o", color=colour, markersize=4, label="held-out")
                axis.legend(fontsize=8)
        axis.set_title(title, fontsize=10)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_xlabel("step")
    figure.suptitle(", ".join(runs))
    with replacing(path) as temporary:
        FigureCanvasAgg(figure).print_figure(
            temporary, format=path.suffix.removeprefix(".") or "png"
        )


def _points(lines: Sequence[dict[str, Any]], kind: str, metric: str) -> list[tuple[float, float]]:
    """What steps or evaluations measured, each with its number."""
    return [(line[kind], line[metric]) for line in lines if kind in line and metric in line]


def _held_out(axis: Any, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Accuracy on held-out problems: greedy, sampled, and pass@k."""
    styles = {"greedy": "--", "sampled": "-"}  # and dots for each pass@k
    for colour, (name, lines) in zip(cycle(COLOURS), runs.items()):
        for key in dict.fromkeys(x for line in lines if "evaluation" in line for x in line):
            if key in styles or key.startswith("pass@"):
                points, style = _points(lines, "evaluation", key), styles.get(key, ":")
                label = f"{name}, {key}" if len(runs) > 1 else key
                axis.plot(*zip(*points), style, color=colour, label=label, marker="o", markersize=3)
    axis.set_title("right answers to held-out problems", fontsize=10)
    axis.set_ylim(-0.02, 1.02)
    if axis.lines:
        axis.legend(fontsize=8)


def main(argv: Sequence[str]) -> None:
    """`python -m transformer.grpo plot RUN ... --out FILE`."""
    parser = Parser(prog="python -m transformer.grpo plot", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="(curves.png)")
    arguments = parser.parse_args(argv)
    if sentence := missing("plot", "matplotlib"):
        raise ValueError(sentence)
    draw(arguments.runs, arguments.out)
    sys.stderr.write(f"wrote {arguments.out}\n")
