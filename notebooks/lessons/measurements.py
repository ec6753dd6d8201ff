"""What was measured on an H200, as it is committed; and what the reader's own GPU does."""

import json
import subprocess
import sys
from typing import Any

import matplotlib as mpl
import torch
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from flash_versions.bench.results import RESULTS, any_row, mask, rate_of, read_results, shapes
from flash_versions.plot.figures import PLOTS, STYLE, label, style_of
from lessons.kernels.compiled import cache_folder, finding
from lessons.pictures.films import picture, png

DPI = 100
SUITE = "quick"
MEASURED_IN = "table"  # the suite of the H200's results that has the shapes of `SUITE`


def measured(name: str, caption: str = "") -> None:
    """Display a figure of docs/figures, drawn from the committed results.

    Args:
        name: such as "forward", "speedup", "ablation", "memory".
        caption: what there is to see.

    Raises:
        ValueError: there is no such figure, or nothing was measured for it.
    """
    if name not in PLOTS:
        raise ValueError(f"there is no figure {name!r}; there are {', '.join(PLOTS)}.")
    if not RESULTS.exists():
        raise ValueError(f"{RESULTS} is missing; install from a clone with `pip install -e .`.")
    data = PLOTS[name].data(read_results())
    if data is None:
        raise ValueError(f"nothing was measured to draw {name!r} from.")
    with mpl.rc_context(STYLE):
        show_figure(PLOTS[name].draw(data), f"measured on an H200: {name}")
    if caption:
        display(Markdown(f"*{caption}*"))


def show_figure(figure: Figure, alt: str) -> None:
    """Display a figure as a PNG."""
    display(Image(png(picture(figure, DPI)), alt=alt))


def own_gpu() -> None:
    """Time the versions on this machine's GPU, in a minute or two, and draw them beside an H200.

    What was timed is kept for the next notebook, in the user's cache folder.
    """
    if not torch.cuda.is_available():
        display(Markdown("There is no GPU here, so nothing is timed. On one, this cell draws its "
                         "speed beside the H200's."))  # fmt: skip
        return
    path = cache_folder() / "own_gpu.json"
    command = [sys.executable, "-m", "flash_versions.bench", "--suite", SUITE, "--out", str(path)]
    done = subprocess.run(command, env=finding(), capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        display(Markdown(f"The benchmark failed: {said}"))
        return
    document = json.loads(path.read_text())
    rows = {"rows": document["rows"], "suites": {}, "trace": None}
    with mpl.rc_context(STYLE):
        figure = beside(document["machine"]["gpu"], shapes(rows, SUITE), h200_shapes())
    show_figure(figure, "this machine's GPU beside an H200")


def h200_shapes() -> dict[tuple, dict[str, Any]]:
    """What was measured on the H200, by shape."""
    return shapes(read_results(), MEASURED_IN) if RESULTS.exists() else {}


def beside(
    gpu: str, here: dict[tuple, dict[str, Any]], there: dict[tuple, dict[str, Any]]
) -> Figure:
    """A panel for each shape: TFLOP/s of every competitor here, and a mark where an H200 is."""
    figure = Figure(figsize=(9, 2.2 * -(-len(here) // 2) + 0.4), layout="constrained")
    axes = figure.subplots(-(-len(here) // 2), 2, squeeze=False).flatten()
    for ax in axes[len(here) :]:
        ax.set_axis_off()
    for ax, (shape, group) in zip(axes, here.items()):
        row = any_row(group)
        rates = {name: rate for name in group if (rate := rate_of(group, name))}
        versions = [name for name in rates if name.startswith("fa")]
        colours = [style_of(name, versions)["color"] for name in rates]
        ax.barh([label(name) for name in rates], list(rates.values()), color=colours, height=0.6)
        for place, name in enumerate(rates):
            if rate := rate_of(there.get(shape, {}), name):
                ax.plot(rate, place, "k|", markersize=12)
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_title(f"S={row['N']} D={row['D']} {mask(row)}", loc="left")
        ax.set_xlabel("TFLOP/s")
    figure.suptitle(f"{gpu}; the black marks are an H200's", x=0.01, ha="left")
    return figure
