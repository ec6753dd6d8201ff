"""Counted, not measured: the bytes and operations of one head, by the schedule of each version.

Two counts of bytes. `asked`: every tile that a program loads or stores, with the rows that it has.
Programs that work on one head read the same keys, at about the same time, and the L2 cache answers
all but one of them; so less comes out of HBM. `least`: every number of the inputs and results once,
as with an L2 cache that forgets nothing. What a GPU does lies between the two.

Of plain attention the least is counted, for both: S and P, of 16 bits here, are each written once
and read once. The matrices of all heads are far larger than an L2 cache, which cannot help.

Sizes of tiles are those that the versions use on an H200 for 16-bit inputs (`tile_sizes`).
"""

from typing import NamedTuple

from matplotlib.figure import Figure

from flash_versions.versions.fa1.forward import MEASURED as FA1_SIZES
from flash_versions.versions.fa2.forward import MEASURED as FA2_SIZES
from flash_versions.versions.fa3.hopper.config import HopperConfig
from lessons.pictures.scores.schedule import Shape
from lessons.pictures.style import GREEN, INK, TITLES, line_of, styled

ITEM = 2  # bytes of bf16
STATISTIC = 4  # bytes of an fp32 number
LEAST = "each number of inputs and results once"
COUNTED = ("plain", "paper", "fa1", "fa2", "fa3", "fa4")
LENGTHS = tuple(512 * 2**i for i in range(6))
STATISTICS = {"paper": 2, "fa1": 3}  # numbers stored for a row; the others store the LSE alone


class Count(NamedTuple):
    """Of one head. Divide by q_length * kv_length for numbers that do not depend on the length."""

    read: int  # bytes that programs ask for
    written: int  # bytes
    least: int  # bytes of inputs and results; of plain attention of S and P, too
    flops: int  # of the tensor cores, in tiles as they are multiplied
    needed: int  # of these, for scores that a query sees
    exponentials: int
    rescales: int  # products with elements of o or acc, beside those of the tensor cores
    masked: int  # scores that are compared with the mask

    @property
    def asked(self) -> int:
        """Bytes that programs read and write."""
        return self.read + self.written


def tile_sizes(version: str, head_dim: int) -> tuple[int, int]:
    """(block_q, block_kv) on an H200, for long sequences.

    Raises:
        ValueError: no such version, or a head_dim that is not 64, 128 or 256.
    """
    if version not in COUNTED:
        raise ValueError(f"version={version!r} is not counted; {', '.join(COUNTED)} are.")
    if head_dim not in FA1_SIZES:
        raise ValueError(f"head_dim={head_dim} is not counted; 64, 128 and 256 are.")
    if version in ("plain", "paper", "fa1"):
        return FA1_SIZES[head_dim].block_q, FA1_SIZES[head_dim].block_kv
    if version == "fa2":
        return FA2_SIZES[head_dim].block_q, FA2_SIZES[head_dim].block_kv
    # The explicit kernel, as fa3.config.default_config has it.
    consumers, block_kv = (3 if head_dim == 64 else 2), (64 if head_dim == 256 else 128)
    config = HopperConfig(consumers, block_kv)
    return config.block_q, config.block_kv


def count(
    version: str,
    length: int,
    head_dim: int = 128,
    causal: bool = False,
    sizes: tuple[int, int] | None = None,
) -> Count:
    """What one head of `length` queries and keys takes.

    Args:
        version: "plain", "paper" (FA1's own loop) or "fa1" .. "fa4". FA4's rescaling is that of
            scores of which none exceeds its row's reference by 2^8: of its first block only.
        length: of queries and of keys.
        head_dim: of q, k and v.
        causal: whether a query sees only the keys up to its own place.
        sizes: (block_q, block_kv) in the place of `tile_sizes`.
    """
    block_q, block_kv = sizes or tile_sizes(version, head_dim)
    shape = Shape(length, length, block_q, block_kv, causal)
    row = head_dim * ITEM
    seen = length * (length + 1) // 2 if causal else length * length
    if version == "plain":
        square = length * length
        return Count(
            read=3 * length * row + 2 * square * ITEM,
            written=length * row + 2 * square * ITEM,
            least=4 * length * row + 4 * square * ITEM,
            flops=4 * square * head_dim,
            needed=4 * seen * head_dim,
            exponentials=square,
            rescales=0,
            masked=square if causal else 0,
        )
    statistics = STATISTICS.get(version, 1)
    read, written, scores, rescales, masked = 0, 0, 0, 0, 0
    for tile in range(shape.tiles):
        end, full_end = shape.blocks(tile)
        rows = min(block_q, length - tile * block_q)
        keys = min(end * block_kv, length)
        scores += block_q * end * block_kv
        tile_bytes, numbers = rows * row, statistics * rows * STATISTIC
        if version == "paper":  # q, o, l and m for each block; k and v below, once
            read += end * (2 * tile_bytes + numbers)
            written += end * (tile_bytes + numbers)
        else:
            read += tile_bytes + 2 * keys * row
            written += tile_bytes + numbers
        products = {"paper": 2, "fa1": 2}.get(version, 1)
        folds = min(end, 1) if version == "fa4" else end
        rescales += products * folds * block_q * head_dim
        cut = end if version in ("paper", "fa1") else end - full_end
        masked += cut * block_q * block_kv
    if version == "paper":
        read += 2 * length * row
    return Count(
        read=read,
        written=written,
        least=length * (4 * row + statistics * STATISTIC),
        flops=4 * scores * head_dim,
        needed=4 * seen * head_dim,
        exponentials=scores,
        rescales=rescales,
        masked=masked,
    )


@styled
def against_length(
    head_dim: int = 128, causal: bool = False, lengths: tuple[int, ...] = LENGTHS
) -> Figure:
    """Over the length: bytes, the intensity that follows, FLOPs against those that are needed."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    axes = figure.subplots(1, 3)
    titles = ("MB, read and written", "needed FLOP for each byte", "FLOP / needed FLOP")
    for ax, title in zip(axes, titles):
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        ax.tick_params(axis="x", labelsize=8)
        ax.set_xlabel("sequence length")
        ax.set_title(title, loc="left")
    found: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for version in COUNTED:  # those with the same numbers are one line
        counts = [count(version, n, head_dim, causal) for n in lengths]
        found.setdefault(tuple((c.asked, c.flops) for c in counts), []).append(version)
    for same in found.values():
        counts = [count(same[0], n, head_dim, causal) for n in lengths]
        version, style = same[0], line_of(same[0])
        label = ", ".join(TITLES[one] for one in same)
        label += ": S and P in memory" if version == "plain" else ": read and written by programs"
        axes[0].plot(lengths, [c.asked / 1e6 for c in counts], **style, label=label, gid=version)
        axes[1].plot(lengths, [c.needed / c.asked for c in counts], **style, gid=version)
        axes[2].plot(lengths, [c.flops / c.needed for c in counts], **style, gid=version)
    style = {"color": GREEN, "marker": "P", "linestyle": "-"}
    axes[0].plot(lengths, [c.least / 1e6 for c in counts], **style, label=LEAST, gid="least")
    axes[1].plot(lengths, [c.needed / c.least for c in counts], **style, gid="least")
    for ax in axes[:2]:
        ax.set_yscale("log")
    axes[2].set_ylim(0, 2.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    mask = "causal" if causal else "full"
    figure.suptitle(f"One head, head_dim {head_dim}, {mask}: counted", x=0.01, ha="left")
    return figure


@styled
def ordinary_work(head_dim: int = 128, length: int = 8192, causal: bool = True) -> Figure:
    """What there is to do beside the tensor cores' products, for each score that a query sees:
    exponentials, comparisons with the mask, and products with o or acc.
    """
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    versions = ("paper", "fa1", "fa2", "fa3", "fa4")
    counts = [count(v, length, head_dim, causal) for v in versions]
    panels = {
        "exponentials": "exponentials",
        "masked": "compared with the mask",
        "rescales": "products with o or acc",
    }
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (field, title) in zip(axes, panels.items()):
        values = [getattr(c, field) * 4 * head_dim / c.needed for c in counts]
        colours = [line_of(v)["color"] for v in versions]
        labels = TITLES | {"fa4": "FA4, threshold on"}
        drawn = ax.barh([labels[v] for v in versions], values, color=colours, height=0.65)
        ax.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
        ax.margins(x=0.2)
        ax.grid(visible=False, axis="y")
        ax.set_title(title, loc="left")
        ax.set_xlabel("for each visible score")
        ax.axvline(0, color=INK, linewidth=0.8)
    axes[0].invert_yaxis()
    return figure


def data() -> dict[str, object]:
    """What the committed figures of this module are drawn from."""
    return {v: [count(v, n) for n in LENGTHS] for v in COUNTED}
