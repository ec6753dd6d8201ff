"""Exponents of scores in 16 bits by one multiply-add.

FA3 subtracts a row's maximum from its scores before it multiplies them, because fp16 has that
difference exactly (`fa3/fp8/pairs.py`). FA4's reference may be any number near the maximum
(`softmax.py`). So let it be one for which fp16 has shift - reference, the start of the row:

    x = s * scale + start,    p = 2^x

That is one instruction in place of two, and rounds once. Consumers keep starts in the place of
references. A block's maximum gives a start in fp32, which is rounded to fp16 where it becomes the
row's. No start exceeds 2^11 if no score exceeds 2^11 - 8 in log2 units, so rounding moves it by
half a unit at most. Then p is at most 2^8.5, with a threshold of 1/2 or more 2^8; e4m3 ends at 448.
A reference may be above the row's maximum by half a unit: P then loses half a bit of its range, and
the row sum counts 2^-0.5 at least, in place of 1.

The scale of a tile says whether its scores are so small, as products of 8-bit numbers have a
largest one. Tiles of larger scores subtract first. The branch is around all of a tile's work:
around the loop over its blocks of keys, it costs a third of the gain or all of it
(docs/understand/log.md). Scales of blocks come with shifts of their own, for each of which a start
would be rounded anew: they always subtract first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.fp8.pairs import (
    LARGEST,
    first_of,
    largest,
    powers_from,
    sums,
    twice,
)
from flash_versions.versions.fp8.quantize import P_OFFSET

LIMIT = gl.constexpr(2.0**11 - P_OFFSET)  # of scores, in log2 units: no start exceeds 2^11
NO_START = LARGEST  # the row has seen no key


@gluon.jit
def raise_start(s, start, row_sum, scale_log2, shift, THRESHOLD: gl.constexpr):
    """A step of the online softmax on pairs of scores: (p, start, row_sum, alpha); start is inf
    before the tile's first block, and NO_START until the row sees a key.
    """
    before = start
    own = shift - largest(s, start) * scale_log2
    start = twice(gl.where(own < before - THRESHOLD, own, before))
    p = powers_from(s, scale_log2, start)
    start = first_of(start)
    alpha = gl.where(before >= NO_START, 1.0, gl.exp2(start - before))
    return p, start, row_sum.grown(alpha, sums(p), 1.0), alpha


@gluon.jit
def reference_of(start, shift):
    """The reference of a start: shift - start, or -inf for a row that has seen no key."""
    return gl.where(start == NO_START, float("-inf"), shift - start)
