"""The H200's roofline with arithmetic intensity as it is counted from each version's schedule.

A version is a line: at its left end the intensity by the bytes that its programs ask for, at its
right end, with the marker, by the least, every input and result once (`traffic.py`). No kernel is
above the roof by what comes out of HBM; a left end above it says that the L2 cache answered. Plain
attention has its S and P in HBM and stands where they put it, under the slope of the memory.
"""

import math

from matplotlib.figure import Figure

from flash_versions.bench.results import rate_of, read_results, shapes
from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS, exp2_roof
from lessons.pictures.memory.traffic import count
from lessons.pictures.style import INK, TITLES, line_of, styled

SHOWN = ("plain", "fa1", "fa2", "fa3", "fa4")
LENGTH = 4096


def intensity(
    version: str, length: int = LENGTH, head_dim: int = 128, causal: bool = False
) -> tuple[float, float]:
    """FLOP that are needed, per byte: (that programs ask for, at the least)."""
    found = count(version, length, head_dim, causal)
    return found.needed / found.asked, found.needed / found.least


def points(
    length: int = LENGTH, head_dim: int = 128, causal: bool = False
) -> dict[str, tuple[float, float, float]]:
    """{version: (FLOP per byte asked for, at the least, measured TFLOP/s)} of the committed table.

    Raises:
        ValueError: the table has no such shape.
    """
    groups = [
        group
        for shape, group in shapes(read_results(), "table").items()
        if (shape[4], shape[5], shape[6]) == (length, head_dim, causal)
    ]
    if not groups:
        raise ValueError(
            f"length={length}, head_dim={head_dim}, causal={causal} was not measured; "
            "docs/results/forward/h200.json has lengths 512 to 16384 and head_dim 64, 128 and 256."
        )
    return {
        version: (*intensity(version, length, head_dim, causal), rate)
        for version in SHOWN
        if (rate := rate_of(groups[0], version)) is not None
    }


@styled
def draw(head_dim: int = 128, length: int = LENGTH, causal: bool = False) -> Figure:
    """Measured TFLOP/s over counted FLOP per byte, under the roofs of the H200."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    ax = figure.subplots()
    least, most, ridge = 10.0, 30000.0, TENSOR_TFLOPS / HBM_TB_PER_S
    roof = [least * HBM_TB_PER_S, TENSOR_TFLOPS, TENSOR_TFLOPS]
    ax.plot([least, ridge, most], roof, color=INK, linewidth=1.2, gid="roof")
    exp2 = exp2_roof(head_dim)
    serial = 1 / (1 / TENSOR_TFLOPS + 1 / exp2)
    ax.axhline(serial, color=INK, linewidth=0.8, linestyle=":", gid="one after the other")
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
    for version, (asked, least_bytes, rate) in points(length, head_dim, causal).items():
        style = line_of(version)
        ax.plot([asked, least_bytes], [rate, rate], color=style["color"], linewidth=2.5)
        style |= {"linestyle": "none", "markersize": 9}
        ax.plot([least_bytes], [rate], **style, gid=version, label=f"{TITLES[version]}: {rate:.0f}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(least, most)
    ax.set_ylim(30, 2000)
    ax.set_xlabel("FLOP for each byte (counted): left end, as programs read; right end, once")
    ax.set_ylabel("TFLOP/s (measured)")
    mask = "causal" if causal else "full"
    ax.set_title(f"{length} queries and keys, head_dim {head_dim}, {mask}, bf16, H200", loc="left")
    ax.legend(fontsize=8, frameon=False, loc="lower right", title="TFLOP/s")
    return figure
