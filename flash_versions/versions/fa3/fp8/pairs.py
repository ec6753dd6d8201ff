"""Scores of 8-bit numbers in 16 bits, two of them in a register, in the kernels for Hopper.

What fp32 scores waste. With products in 8 bits, a consumer's time is the way from S to P: for a
block of 128 keys a thread has 64 scores, and each takes a maximum, a multiply-add, an exponential,
an addition to its row's sum and half of a conversion. P in e4m3 keeps 3 bits behind the leading one
of all that.

What changes. The tensor cores add up S in fp16, of Q and K that were quantised to small numbers
(`quantize.largest_factor`). Every instruction but the exponential then works on two neighbours of
a row, S takes half the registers, so that a third consumer can have S of a block in flight, and P
is rounded from what the exponentials leave:

    x = (s - pivot / scale) * scale + shift,    p = 2^x

The difference comes first: next to the maximum it is exact, however large scores are. No score is
larger than half of what fp16 holds, so it holds every difference. A score is rounded to fp16 after
every 32 dims, an exponent x above -16 by 2^-8 at most (`oracle/budget.py`). Where scores are small,
FA4 computes x by one instruction (`fa4/hopper/starts.py`).

A pair is an int32 to Gluon, so that loops and branches carry it as what it is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fp8.quantize import LARGEST_SCORE
from flash_versions.versions.tiles.wgmma import sums_of_threads

MOST = gl.constexpr(LARGEST_SCORE)
LARGEST, SMALLEST = gl.constexpr(65504.0), gl.constexpr(2.0**-24)  # of fp16
HIDDEN = gl.constexpr(-0x03FF0400)  # -inf, twice
LEFT = gl.constexpr(0x0000FFFF)  # of a pair, the score of the first key
RIGHT = gl.constexpr(-0x00010000)


@gluon.constexpr_function
def are_pairs(s):
    """Whether scores, or exponentials of them, are pairs."""
    return s.dtype == gl.int32


@gluon.jit
def paired(s):
    """Scores in fp16 (rows, keys) as pairs (rows, keys / 2)."""
    words = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, 0;", "=r,=r,r", [s], dtype=gl.int32, is_pure=True, pack=2
    )
    pairs, _ = gl.split(words.reshape([s.shape[0], s.shape[1] // 2, 2]))
    return pairs


@gluon.jit
def of_both(INSTRUCTION: gl.constexpr, a, b):
    """An instruction on two tensors of pairs."""
    PTX: gl.constexpr = INSTRUCTION + " $0, $1, $2;"
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def twice(x):
    """A number in fp32 as a pair, no larger than fp16's largest."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 half; cvt.rn.satfinite.f16.f32 half, $1; mov.b32 $0, {half, half}; }",
        "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def number_of(INSTRUCTIONS: gl.constexpr, pairs):
    """A number in fp32 of each pair: what instructions make of its halves, `low` and `high`."""
    PTX: gl.constexpr = (
        "{ .reg .b16 low, high; .reg .f32 first, second; mov.b32 {low, high}, $1; "
        + INSTRUCTIONS
        + " }"
    )
    return gl.inline_asm_elementwise(PTX, "=f,r", [pairs], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def first_of(pairs):
    """The first number of each pair, in fp32."""
    return number_of("cvt.f32.f16 $0, low;", pairs)


@gluon.jit
def folded(INSTRUCTION: gl.constexpr, pairs):
    """(rows, columns) of pairs, folded to (rows, 4), where each of the four threads that share a
    row has its own.
    """
    COLUMNS: gl.constexpr = pairs.shape[1]
    if COLUMNS == 4:
        return pairs
    else:
        halves = pairs.reshape([pairs.shape[0], 2, COLUMNS // 2]).permute((0, 2, 1))
        first, second = gl.split(halves)
        return folded(INSTRUCTION, of_both(INSTRUCTION, first, second))


@gluon.jit
def largest(s, like):
    """The largest score of each row, in fp32, where a number for each row is."""
    if are_pairs(s):
        of_threads = number_of(
            "max.f16 low, low, high; cvt.f32.f16 $0, low;", folded("max.f16x2", s)
        )
        return gl.convert_layout(gl.max(of_threads, axis=1), like.type.layout, assert_trivial=True)
    else:
        return gl.max(s, axis=1)


@gluon.jit
def powers(s, scale_log2, pivot, shift, OF_BLOCKS: gl.constexpr):
    """2^(s * scale_log2 - pivot + shift); pivot is a number for each row, in log2 units, that no
    score exceeds by much. With OF_BLOCKS it may come from a block of another scale.
    """
    if are_pairs(s):
        return powers_of_pairs(s, scale_log2, pivot, shift, OF_BLOCKS)
    else:
        return gl.exp2(s * scale_log2 - (pivot - shift)[:, None])


@gluon.jit
def powers_of_pairs(s, scale_log2, pivot, shift, OF_BLOCKS: gl.constexpr):
    """`powers` in fp16, of a scale from `scale_of_pairs`. A pivot of this scale is a score, which
    fp16 has; of another one, the rest is added in fp32.
    """
    LAYOUT: gl.constexpr = s.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    pivot = gl.convert_layout(pivot, rows, assert_trivial=True)
    subtracted = pivot * (-1.0 / scale_log2)
    if OF_BLOCKS:
        subtracted = gl.minimum(gl.maximum(subtracted, -MOST), MOST)
    subtracted = twice(subtracted)
    if OF_BLOCKS:
        shift = shift - (first_of(subtracted) * scale_log2 + pivot)
    start = twice(shift + gl.zeros([s.shape[0]], gl.float32, rows))
    scale = twice(scale_log2 + gl.zeros([1, 1], gl.float32, LAYOUT))
    PTX: gl.constexpr = powers_ptx("add.f16x2 x, $1, $2; fma.rn.f16x2 x, x, $3, $4;")
    return gl.inline_asm_elementwise(
        PTX, "=r,r,r,r,r", [s, subtracted[:, None], scale, start[:, None]],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def powers_from(s, scale_log2, start):
    """2^(s * scale_log2 + start) of pairs; start is a pair for each row, of one number twice."""
    LAYOUT: gl.constexpr = s.type.layout
    start = gl.convert_layout(start, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    scale = twice(scale_log2 + gl.zeros([1, 1], gl.float32, LAYOUT))
    PTX: gl.constexpr = powers_ptx("fma.rn.f16x2 x, $1, $2, $3;")
    return gl.inline_asm_elementwise(
        PTX, "=r,r,r,r", [s, scale, start[:, None]], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def powers_ptx(exponents):
    """PTX that computes a pair of exponents, x, by the given instructions, and a pair of powers.

    ex2.approx.f16x2 is these two, but ptxas then puts them together anew for each use.
    """
    return (
        "{ .reg .b32 x, first, second; .reg .b16 low, high; "
        + exponents
        + " mov.b32 {low, high}, x; ex2.approx.f16 low, low; ex2.approx.f16 high, high;"
        " cvt.u32.u16 first, low; cvt.u32.u16 second, high; prmt.b32 $0, first, second, 0x5410; }"
    )


@gluon.jit
def scale_of_pairs(scale_log2):
    """A scale that pairs are multiplied by, rounded to fp16. With less than fp16's smallest number
    all scores are alike, and 0 would make -inf NaN. A larger one than fp16 has stays what it is;
    `twice` then makes it fp16's largest, with which all but the largest scores count nothing.
    """
    inside = gl.minimum(gl.maximum(scale_log2, SMALLEST), LARGEST).to(gl.float16).to(gl.float32)
    return gl.where(scale_log2 > LARGEST, scale_log2, inside)


@gluon.jit
def sums(p):
    """The sums of rows in parts (rows, 4), see `wgmma.sums_of_threads`."""
    if are_pairs(p):
        return number_of(
            "cvt.f32.f16 first, low; cvt.f32.f16 second, high; add.f32 $0, first, second;",
            folded("add.f16x2", p),
        )
    else:
        return sums_of_threads(p)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, shift, weight, OF_BLOCKS: gl.constexpr):
    """A step of the online softmax, as `algebra.softmax_step`: (p, row_max, row_sum, alpha). p is
    2^shift times as large, and row_sum (`wgmma.RowSums`) grows by weight times the sum of it.
    """
    new_max = gl.maximum(row_max, largest(s, row_max) * scale_log2)
    pivot = gl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet
    p = powers(s, scale_log2, pivot, shift, OF_BLOCKS)
    alpha = gl.exp2(row_max - pivot)
    return p, new_max, row_sum.grown(alpha, sums(p), weight), alpha


@gluon.jit
def hidden(s, first_seen, second_seen):
    """Pairs, -inf for the keys that are not seen."""
    kept = gl.where(first_seen, LEFT, 0) | gl.where(second_seen, RIGHT, 0)
    return (s & kept) | (HIDDEN & ~kept)
