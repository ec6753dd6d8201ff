"""The parts of a GPU that kernels are written for, with the sizes and rates of an H200.

Where the numbers are from: docs/learn/gpu.md.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS
from lessons.pictures.style import GREEN, GREY, INK, ORANGE, PALE, SKY, YELLOW, bare, styled

SMS, WARPS, THREADS = 132, 64, 32
REGISTERS_KIB, SHARED_KIB, L2_MIB, HBM_GB = 256, 228, 60, 141
# In a cycle of an SM: multiply-adds of tensor cores in bf16 and of other units, exponentials, and
# bytes of shared memory.
TENSOR_FMA, OTHER_FMA, EXPONENTIALS, SHARED_BYTES = 2048, 128, 16, 128
SHOWN = 8  # warps in the picture


def box(ax: Axes, place: tuple[float, float, float, float], text: str, colour: str) -> None:
    """A filled box (left, bottom, width, height) with a text in its middle."""
    left, bottom, width, height = place
    look: dict[str, Any] = {"facecolor": to_rgba(colour, 0.6), "edgecolor": INK, "linewidth": 0.8}
    ax.add_patch(Rectangle((left, bottom), width, height, **look))
    middle = left + width / 2, bottom + height / 2
    ax.text(*middle, text, ha="center", va="center", fontsize=8.5, linespacing=1.25)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Data that moves, both ways."""
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="<|-|>", mutation_scale=11, color=INK, linewidth=1.1)
    )


def warps(ax: Axes, left: float, bottom: float, width: float) -> None:
    """Warps as boxes, their threads as lines, and four of them as a warpgroup."""
    each = width / SHOWN
    for warp in range(SHOWN):
        x = left + warp * each
        box(ax, (x + 0.04, bottom, each - 0.08, 0.75), "", SKY)
        for thread in range(1, THREADS):
            at = x + 0.04 + (each - 0.08) * thread / THREADS
            ax.plot([at, at], [bottom + 0.12, bottom + 0.63], color=INK, linewidth=0.35)
    for group in range(SHOWN // 4):
        x = left + 4 * group * each
        ax.plot([x + 0.04, x + 4 * each - 0.04], [bottom + 0.88] * 2, color=INK, linewidth=1.2)
        ax.text(
            x + 2 * each, bottom + 0.94, "warpgroup: 4 warps", ha="center", va="bottom", fontsize=8
        )


@styled
def draw() -> Figure:
    """One SM with what is in it; behind it the other SMs, L2 and HBM."""
    figure = Figure(figsize=(9.8, 5.2), layout="constrained")
    ax = figure.subplots()
    bare(ax)
    ax.set_xlim(-0.1, 15.4)
    ax.set_ylim(-0.5, 8.1)
    for step in (3, 2, 1):
        shift = 0.16 * step
        ax.add_patch(Rectangle((shift, shift), 8.8, 7.2, facecolor=PALE, edgecolor=INK))
    ax.add_patch(Rectangle((0, 0), 8.8, 7.2, facecolor="white", edgecolor=INK))
    ax.text(0.25, 6.85, f"SM, one of {SMS}", va="center", fontsize=11, weight="bold")
    ax.text(
        8.55,
        6.85,
        f"at most {WARPS} warps (blue boxes) of {THREADS} threads (lines)",
        va="center",
        ha="right",
        fontsize=8.5,
    )
    warps(ax, 0.25, 5.3, 8.3)
    box(ax, (0.25, 4.3, 8.3, 0.75), f"registers, {REGISTERS_KIB} KiB: up to 255 a thread", SKY)
    units = (
        ("tensor cores", f"{TENSOR_FMA} multiply-adds\na cycle, in bf16", ORANGE),
        ("other arithmetic", f"{OTHER_FMA} multiply-adds\na cycle, in fp32", YELLOW),
        ("exponentials", f"{EXPONENTIALS} a cycle", YELLOW),
    )
    for number, (name, rate, colour) in enumerate(units):
        box(ax, (0.25 + 2.8 * number, 2.7, 2.7, 1.25), f"{name}\n{rate}", colour)
    box(
        ax,
        (0.25, 1.35, 8.3, 1.0),
        f"shared memory, {SHARED_KIB} KiB: {SHARED_BYTES} bytes a cycle\n"
        "tiles of K and V, and the barriers that warps wait on",
        GREEN,
    )
    box(ax, (5.0, 0.2, 3.55, 0.8), "TMA: copies tiles while\nwarps compute", GREY)
    ax.text(0.25, 0.6, "a program of a Triton kernel runs\non one SM, from start to end",
            va="center", fontsize=8.5, style="italic")  # fmt: skip
    box(ax, (10.0, 0, 1.7, 7.2), f"L2\n\n{L2_MIB} MiB\n\na cache\nfor all SMs", PALE)
    memory = f"HBM\n\n{HBM_GB} GB\n\nall tensors:\nQ, K, V, O"
    box(ax, (13.3, 0, 2.0, 7.2), memory, PALE)
    arrow(ax, (8.57, 0.6), (9.97, 0.6))
    arrow(ax, (9.32, 4.6), (9.97, 4.6))
    arrow(ax, (11.73, 3.6), (13.27, 3.6))
    ax.text(12.5, 3.8, f"{HBM_TB_PER_S:g} TB/s", ha="center", fontsize=9)
    ax.plot([0, 11.7], [7.85, 7.85], color=INK, linewidth=1.2)
    ax.text(5.85, 7.92, f"on the chip: {TENSOR_TFLOPS:.0f} TFLOP/s in bf16, all SMs together",
            ha="center", va="bottom", fontsize=9)  # fmt: skip
    return figure


def data() -> dict[str, object]:
    """What the committed figure of this module is drawn from."""
    return {
        "sms": SMS,
        "warps": WARPS,
        "registers": REGISTERS_KIB,
        "shared": SHARED_KIB,
        "l2": L2_MIB,
        "hbm": HBM_GB,
        "rates": [TENSOR_FMA, OTHER_FMA, EXPONENTIALS, SHARED_BYTES, HBM_TB_PER_S, TENSOR_TFLOPS],
    }
