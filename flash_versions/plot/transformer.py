"""Figures of the transformer's own kernels and of its generation, from measured results."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flash_versions.bench.results import Document, any_row, lines, rate_of, ratio, rows_of

# Suite -> what its products are held against, and how a figure calls it.
PRODUCTS = {"gemm": ("cuBLAS", "a product"), "norm gemm": ("cuBLAS alone", "a norm and a product")}
OURS, OTHERS = "#D55E00", "#666666"  # Okabe and Ito's vermilion, and grey
MARKERS = "osD^vP"  # of models, as COLOURS
COLOURS = ["#56B4E9", "#0072B2", "#D55E00", "#CC79A7", "#009E73"]
STYLES: dict[str, Any] = {  # of who generates
    "ours": "-",
    "transformers": "--",
    "transformers compiled": ":",
    "torch compiled": "-.",
}


def products_data(document: Document) -> dict[str, dict[str, dict[str, float]]] | None:
    """{suite: {shape: {who: rate over the library's}}}; None if nothing was measured."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for suite, (base, _) in PRODUCTS.items():
        for shape, group in lines(document, suite, "shape").items():
            ratios = {x: times for x in group if x != base and (times := ratio(group, x, base))}
            if rate_of(group, base):
                name = "{}\n{M} x {K} x {N}".format(shape, **any_row(group))
                panels.setdefault(suite, {})[name] = ratios
    return panels or None


def draw_products(panels: dict[str, dict[str, dict[str, float]]]) -> Figure:
    """A panel for each suite: bars of the ratio for each shape, and a line at the library's."""
    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for ax, (suite, shapes) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items()
    ):
        everyone = [*dict.fromkeys(who for ratios in shapes.values() for who in ratios)]
        height = 0.8 / len(everyone)
        for number, who in enumerate(everyone):
            places = [at + (number + 0.5) * height - 0.4 for at in range(len(shapes))]
            ratios = [found.get(who, 0.0) for found in shapes.values()]
            colour = OURS if who.startswith("ours") else OTHERS
            bars = ax.barh(places, ratios, height * 0.9, color=colour, label=who)
            ax.bar_label(bars, [f"{x:.2f}" if x else "" for x in ratios], padding=2, fontsize=7)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set_yticks(range(len(shapes)), shapes, fontsize=7)
        ax.invert_yaxis()
        ax.set(xlabel=f"speed, {PRODUCTS[suite][0]} = 1", xlim=(0, 1.25))
        ax.set_title(PRODUCTS[suite][1], loc="left")
        ax.legend(
            frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3
        )
    return figure


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
    whose = [Line2D([], [], color=OTHERS, linestyle=x, label=who) for who, x in STYLES.items()]
    figure.legend(handles=models + whose, loc="outside right center", frameon=False, fontsize=8)
    return figure
