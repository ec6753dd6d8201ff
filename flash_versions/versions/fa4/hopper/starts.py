"""Exponents of scores in 16 bits by one multiply-add.

FA3 subtracts a row's maximum from its scores before it multiplies them, because fp16 has that
difference exactly (`fa3/fp8/pairs.py`). FA4's reference may be any number near the maximum
(`softmax.py`). So let it be one for which fp16 has shift - reference, the start of the row:

    x = s * scale + start,    p = 2^x

That is one instruction in place of two, and rounds once. Consumers keep starts in the place of
references. A block's maximum gives a start in fp32, which is rounded to fp16 where it becomes the
row's: by half a unit at most if no score exceeds 2^11 in log2 units. Then p is at most 2^8.5, and
e4m3 ends at 448.

Whether scores are so small, the scale of a tile says, as products of 8-bit numbers have a largest
one. Tiles of larger scores subtract first; the branch is around all of a tile's work, because it
costs what this gains around a block's (docs/understand/log.md). Scales of blocks come with shifts
of their own, for each of which a start would be rounded anew: they always subtract first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.fp8.pairs import largest, number_of, powers_from, sums, twice
from flash_versions.versions.fp8.quantize import P_OFFSET

LARGEST_START = gl.constexpr(2.0**11 - P_OFFSET)  # of scores, without a shift
NO_START = gl.constexpr(65504.0)  # fp16's largest number: the row has seen no key


@gluon.jit
def raise_start(s, start, row_sum, scale_log2, shift, THRESHOLD: gl.constexpr):
    """A step of the online softmax on pairs of scores: (p, start, row_sum, alpha); start is inf
    before the first.
    """
    before = start
    own = shift - largest(s, start) * scale_log2
    start = twice(gl.where(own < before - THRESHOLD, own, before))
    p = powers_from(s, scale_log2, start)
    start = number_of("cvt.f32.f16 $0, low;", start)
    alpha = gl.where(before == float("inf"), 1.0, gl.exp2(start - before))
    return p, start, row_sum.grown(alpha, sums(p), 1.0), alpha


@gluon.jit
def reference_of(start, shift):
    """The reference that a start stands for: -inf for a row that has seen no key."""
    return gl.where(start == NO_START, float("-inf"), shift - start)
