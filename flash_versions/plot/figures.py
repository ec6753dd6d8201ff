"""Draw the figures of the documents from measured results: `python -m flash_versions.plot`.

Figures are made of docs/results/*/*.json alone: nothing is measured here and no GPU is needed. A
figure is two functions: one takes its data out of the results, None if they were not measured; one
draws them. The SVG names a digest of the data that it was drawn from, so that a test can tell an
outdated figure whatever version of matplotlib drew it.
"""

import hashlib
import io
import json
import sys
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flash_versions.bench.peers import PEERS
from flash_versions.bench.results import (
    ROOT,
    Document,
    ablation_ratios,
    any_row,
    label,
    mask,
    names,
    rate_of,
    ratio,
    read_results,
    shapes,
)
from flash_versions.files import write
from flash_versions.plot.timeline import draw_timeline, timeline_data

FIGURES = ROOT / "docs" / "figures"

# The H200's roofs, from NVIDIA's datasheet "H200 Tensor Core GPU" (SXM): memory bandwidth, and bf16
# without sparsity, half of the number with it.
HBM_TB_PER_S = 4.8
TENSOR_TFLOPS = 989.0
# 16 special functions per clock and multiprocessor (CUDA C++ Programming Guide, throughput of
# native arithmetic instructions, compute capability 9.0), at the clock that the datasheet's tensor
# throughput stands for: 4096 bf16 operations per clock and multiprocessor.
EXP2_PER_TENSOR_FLOP = 16 / 4096

# Okabe and Ito's colours, which the colour-blind tell apart; markers say the same again.
VERSION_STYLES = [("#56B4E9", "o"), ("#0072B2", "s"), ("#D55E00", "D"), ("#CC79A7", "^")]
PEER_STYLES = {
    "torch fa2": ("#666666", "v"),
    "cudnn": ("#009E73", "P"),
    "flash-attn-4": ("#B8860B", "X"),
    "plain": ("#999999", "."),
    "cudnn fp8": ("#117733", "*"),
}
# A version keeps its colour in FP8 and in order; line and marker tell the variants apart.
VARIANT_STYLES = {"fp8 head": ("-", "<"), "fp8 block": (":", ">"), "deterministic": (":", "d")}
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "flash-versions",
}

Points = list[tuple[float, float]]
Panels = dict[str, dict[str, Points]]  # panel -> competitor -> points


class Plot(NamedTuple):
    """A figure: its folder in docs/figures, its data out of a document, or None, and the drawing of
    them.
    """

    folder: str
    data: Callable[[Document], Any]
    draw: Callable[[Any], Figure]


def lines_over_length(
    document: Document, suite: str, value: Callable[[dict[str, Any], str], float | None]
) -> Panels | None:
    """{panel: {competitor: [(S, value)]}} with a panel for each mask and head dim."""
    panels: Panels = {}
    order, keys = names(document, suite), itemgetter("causal", "D", "N")
    for group in sorted(shapes(document, suite).values(), key=lambda group: keys(any_row(group))):
        row = any_row(group)
        for name in group:
            if (found := value(group, name)) is not None:
                lines = panels.setdefault(f"D={row['D']} {mask(row)}", {})
                lines.setdefault(name, []).append((row["N"], found))
    return {x: {n: lines[n] for n in order if n in lines} for x, lines in panels.items()} or None


def peak_memory(group: dict[str, Any], name: str) -> float | None:
    """MiB of a forward at its peak, beside its inputs."""
    return group[name].get("peak_mib") if name in group else None


def memory_data(document: Document) -> Panels | None:
    """Peak memory over S; the mask makes no difference to anyone's but plain PyTorch's."""
    panels = lines_over_length(document, "table", peak_memory) or {}
    return {name: lines for name, lines in panels.items() if name.endswith("full")} or None


def style_of(name: str, versions: list[str]) -> dict[str, Any]:
    """Colour and marker; versions are solid lines, peers dashed ones."""
    if name in PEERS:
        colour, marker = PEER_STYLES[name]
        return {"color": colour, "marker": marker, "linestyle": "--", "linewidth": 1.1}
    base, _, variant = name.partition(" ")
    bases = list(dict.fromkeys(version.partition(" ")[0] for version in versions))
    colour, marker = VERSION_STYLES[bases.index(base) % len(VERSION_STYLES)]
    line, marker = VARIANT_STYLES.get(variant, ("-", marker))
    return {"color": colour, "marker": marker, "linestyle": line}


def grid(panels: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, some in a row."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(4.2 * columns, 3.3 * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure, list(axes[:panels])


def draw_lines(panels: Panels, title: str, unit: str, log: bool = False) -> Figure:
    """One panel for each mask and head dim: a line for each competitor over S, named at its end."""
    versions = list(dict.fromkeys(n for lines in panels.values() for n in lines if n not in PEERS))
    figure, axes = grid(len(panels), 3)
    for ax, (panel, lines) in zip(axes, panels.items()):
        for name, points in lines.items():
            ax.plot(*zip(*points), **style_of(name, versions), gid=name)
        lengths = sorted({x for points in lines.values() for x, _ in points})
        ax.set_xscale("log", base=2)
        if log:
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
        ax.set_xlim(lengths[0] / 1.3, lengths[-1] * 4.5)  # room for the names
        ax.set_xticks(lengths, [f"{x // 1024}k" if x >= 1024 else str(x) for x in lengths])
        ax.set_title(panel, loc="left")
        ax.set_xlabel("sequence length")
    axes[0].set_ylabel(unit)
    figure.suptitle(title, x=0.01, ha="left")
    figure.draw_without_rendering()  # fixes the limits
    for ax, lines in zip(axes, panels.values()):
        name_ends(ax, lines, versions)
    return figure


def name_ends(ax: Axes, lines: dict[str, Points], versions: list[str]) -> None:
    """The name of each line at its last point, moved apart where they would touch."""
    place = ax.transData + ax.transAxes.inverted()
    ends = {name: place.transform(points[-1]) for name, points in lines.items()}
    ordered = sorted(ends, key=lambda name: ends[name][1])
    heights = spread([ends[name][1] for name in ordered], gap=0.062)
    for name, height in zip(ordered, heights):
        x, y = ends[name]
        colour = style_of(name, versions)["color"]
        text = ax.annotate(
            label(name),
            (x, y),
            (x + 0.04, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4},
        )
        text.set_in_layout(False)  # it stands in the room that the axes have for it


def spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights in 0 .. 1 moved apart to at least `gap`: what would touch becomes a pile,
    centred on where it was as far as it fits.
    """
    piles: list[list[float]] = []
    for height in heights:
        piles.append([height])
        while len(piles) > 1 and bottom(piles[-1], gap) < bottom(piles[-2], gap) + gap * len(
            piles[-2]
        ):
            piles[-2:] = [piles[-2] + piles[-1]]
    return [bottom(pile, gap) + gap * place for pile in piles for place in range(len(pile))]


def bottom(pile: list[float], gap: float) -> float:
    """Where the lowest of a pile goes."""
    height = gap * (len(pile) - 1)
    return max(0.0, min(sum(pile) / len(pile) - height / 2, 1.0 - height))


def draw_ablation(found: dict[str, dict[str, dict[str, float]]]) -> Figure:
    """A row of panels for each version: how much faster or slower each variant is."""
    panels = {(v, panel): bars for v, rows in found.items() for panel, bars in rows.items()}
    figure, axes = grid(len(panels), 3)
    for ax, ((version, panel), bars) in zip(axes, panels.items()):
        names_, percents = list(bars), [100 * (ratio - 1) for ratio in bars.values()]
        others = {*map(label, PEERS), *found}
        colours = ["#009E73" if name in others else "#0072B2" for name in names_]
        drawn = ax.barh(names_, percents, color=colours, height=0.6)
        ax.bar_label(drawn, [f"{x:+.1f} %" for x in percents], padding=3, fontsize=8)
        ax.axvline(0, color="black", linewidth=0.8)
        ax.invert_yaxis()
        ax.use_sticky_edges = False  # a bar that begins at 0 needs room for its label, too
        ax.margins(x=0.3)
        ax.grid(visible=False, axis="y")
        ax.set_title(f"{version}, {panel}", loc="left")
        ax.set_xlabel("faster or slower than the version, %")
    figure.suptitle("One thing changed: mean over the lengths", x=0.01, ha="left")
    return figure


def exp2_roof(head_dim: int) -> float:
    """TFLOP/s of attention if only the exponentials took time: one for each 4 head_dim FLOP."""
    return TENSOR_TFLOPS * EXP2_PER_TENSOR_FLOP * 4 * head_dim


PLOTS = {
    "forward": Plot(
        "attention",
        lambda document: lines_over_length(document, "table", rate_of),
        lambda data: draw_lines(data, "Forward, bf16, 16k tokens, hidden size 2048", "TFLOP/s"),
    ),
    "speedup": Plot(
        "attention",
        lambda document: lines_over_length(document, "table", partial(ratio, base="torch fa2")),
        lambda data: draw_lines(data, "Forward, against torch's FlashAttention-2", "speed-up"),
    ),
    "backward": Plot(
        "attention",
        lambda document: lines_over_length(document, "backward", rate_of),
        lambda data: draw_lines(data, "Backward, bf16, 16k tokens, hidden size 2048", "TFLOP/s"),
    ),
    "memory": Plot(
        "attention",
        memory_data,
        lambda data: draw_lines(data, "Memory of a forward beside q, k and v", "MiB", log=True),
    ),
    "ablation": Plot("attention", ablation_ratios, draw_ablation),
    "fp8": Plot(
        "attention",
        lambda document: lines_over_length(document, "fp8", rate_of),
        lambda data: draw_lines(data, "Forward in FP8, the kernel alone, and in bf16", "TFLOP/s"),
    ),
    "ablation-fp8": Plot(
        "attention",
        lambda document: ablation_ratios(document, "ablation fp8", "cudnn fp8"),
        draw_ablation,
    ),
    "timeline": Plot(
        "attention", lambda document: timeline_data(document.get("trace")), draw_timeline
    ),
}


def path_of(name: str, plot: Plot) -> Path:
    """Where a figure is."""
    return FIGURES / plot.folder / f"{name}.svg"


def digest(data: Any) -> str:
    """What an SVG says of the data that it was drawn from."""
    return f"data {hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]}"


def svg(plot: Plot, data: Any) -> str:
    """A figure as SVG: the same text for the same data and the same matplotlib."""
    with mpl.rc_context(STYLE):
        figure = plot.draw(data)
        buffer = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Description": digest(data)}
        figure.savefig(buffer, format="svg", metadata=metadata)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def draw_all(plots: dict[str, Plot]) -> None:
    """Draw figures anew; one whose data were not measured is removed."""
    document = read_results()
    for name, plot in plots.items():
        path, data = path_of(name, plot), plot.data(document)
        if data is None:
            path.unlink(missing_ok=True)
            sys.stderr.write(f"{name}: nothing was measured to draw it from\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, svg(plot, data))
            sys.stderr.write(f"{path.relative_to(ROOT)}: drawn\n")
