"""The H200's roofline: measured rates over the operations for each byte, where every number of the
inputs and the result counts once (`traffic.py`). Plain attention moves S and P, too.
"""

import math

from matplotlib.figure import Figure

from flash_versions.bench.results import rate_of, read_results, shapes
from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS, exp2_roof
from lessons.pictures.memory.traffic import count
from lessons.pictures.style import INK, TITLES, line_of, styled

SHOWN = ("plain", "fa1", "fa2", "fa3", "fa4")
LENGTH, HEAD_DIM = 4096, 128


def points() -> dict[str, tuple[float, float]]:
    """{version: (needed FLOP per byte, measured TFLOP/s)} without a mask."""
    table = shapes(read_results(), "table")
    group = next(x for shape, x in table.items() if shape[4:7] == (LENGTH, HEAD_DIM, False))
    counts = {version: count(version, LENGTH, HEAD_DIM) for version in SHOWN}
    rates = {version: rate_of(group, version) or 0.0 for version in SHOWN}
    return {name: (x.needed / x.least, rates[name]) for name, x in counts.items()}


@styled
def draw() -> Figure:
    """The versions under the roofs of the H200."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    ax = figure.subplots()
    least, most, ridge = 10.0, 30000.0, TENSOR_TFLOPS / HBM_TB_PER_S
    ax.loglog([least, ridge, most], [least * HBM_TB_PER_S, TENSOR_TFLOPS, TENSOR_TFLOPS], color=INK)
    serial = 1 / (1 / TENSOR_TFLOPS + 1 / exp2_roof(HEAD_DIM))
    ax.axhline(serial, color=INK, linewidth=0.8, linestyle=":")
    ax.text(11, serial * 1.04, f"products, then exponentials: {serial:.0f}", fontsize=7)
    ax.text(11, TENSOR_TFLOPS * 1.04, f"tensor cores: {TENSOR_TFLOPS:.0f}", fontsize=7)
    ax.text(
        30,
        30 * HBM_TB_PER_S * 1.15,
        f"HBM: {HBM_TB_PER_S} TB/s",
        fontsize=7,
        rotation=math.degrees(math.atan(HBM_TB_PER_S)),
        rotation_mode="anchor",
        transform_rotates_text=True,
    )
    for version, (intensity, rate) in points().items():
        style = line_of(version) | {"linestyle": "none", "markersize": 9}
        ax.plot([intensity], [rate], **style, label=f"{TITLES[version]}: {rate:.0f}")
    ax.set(xlim=(least, most), ylim=(30, 2000), ylabel="TFLOP/s (measured)")
    ax.set_xlabel("needed FLOP for each byte of the inputs and the result (counted)")
    ax.set_title(f"{LENGTH} queries and keys, head_dim {HEAD_DIM}, bf16, H200", loc="left")
    ax.legend(fontsize=8, frameon=False, loc="lower right", title="TFLOP/s")
    return figure
