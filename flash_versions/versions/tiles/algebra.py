"""Algebra on register tiles, shared by the versions: which keys a query sees, which KV blocks that
touches, a step of the online softmax and its end.

These functions take tiles and position vectors and touch no memory, so they compile unchanged from
Triton and from Gluon kernels. Whatever is None is a compile-time None: it leaves no instruction.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
EVER = tl.constexpr(2**30)  # later than every query


class Window(NamedTuple):
    """Query i of m sees keys i + n - m - left .. i + n - m + right of n; None is no bound.

    Causal is (None, 0): bottom-right aligned, so the last query sees the last key. Where keys have
    intervals of queries (`tiles/intervals.py`), these say it all.
    """

    left: Any
    right: Any
    intervals: Any = None


@triton.jit
def first_visible(pos, offset, before):
    """First position that `pos` sees, at least 0: offset aligns the two axes, `before` positions
    count back.

    A query sees keys with (offset, before) = (n - m, left). The relation is symmetric: a key is
    seen by queries with (m - n, right).
    """
    return tl.maximum(pos + (offset - before), 0) if before is not None else pos * 0


@triton.jit
def last_visible(pos, offset, after, length):
    """Last position that `pos` sees, at most length - 1; less than the first if it sees none.

    A query sees keys with (n - m, right, n), a key is seen by queries with (m - n, left, m).
    """
    end = pos * 0 + (length - 1)
    return tl.minimum(pos + (offset + after), end) if after is not None else end


@triton.jit
def block_range(first_low, last_low, first_high, last_high, BLOCK: tl.constexpr):
    """The blocks that a tile of positions touches: (begin, full_begin, full_end, end).

    The tile's first position sees first_low .. last_low, its last one first_high .. last_high.
    Blocks [full_begin, full_end) are visible to all of the tile in full and need no mask; the rest
    of [begin, end) is cut by an edge of the window or by the end.
    """
    begin = first_low // BLOCK
    end = tl.maximum(tl.cdiv(last_high + 1, BLOCK), begin)
    full_begin = tl.minimum(tl.maximum(tl.cdiv(first_high, BLOCK), begin), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(last_low + 1, 0) // BLOCK, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def seen_blocks(low, high, offset, before, after, length, BLOCK: tl.constexpr):
    """The blocks that the positions low .. high see, as `block_range` gives them; the others are
    those of `first_visible` and `last_visible`.
    """
    return block_range(
        first_visible(low, offset, before),
        last_visible(low, offset, after, length),
        first_visible(high, offset, before),
        last_visible(high, offset, after, length),
        BLOCK,
    )


@triton.jit
def blocks_in_span(
    first_start, last_start, first_end, last_end, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """The blocks of query rows, GROUP to a query, that see any of some keys, as `block_range` gives
    them: of these keys' intervals, the first and the last start and end.
    """
    first_start = tl.minimum(first_start, last_end)  # of a tile that no query sees
    last_start = tl.minimum(last_start, last_end)
    begin = first_start * GROUP // BLOCK_Q
    end = tl.maximum(tl.cdiv(last_end * GROUP, BLOCK_Q), begin)
    full_begin = tl.minimum(tl.cdiv(last_start * GROUP, BLOCK_Q), end)
    full_end = tl.minimum(tl.maximum(first_end * GROUP // BLOCK_Q, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def blocks_of_queries(
    tile, q_length, kv_length, window,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """The KV blocks that a query tile sees, as `block_range` gives them; GROUP rows to a query."""
    low = tile * BLOCK_Q // GROUP
    high = tl.minimum((tile * BLOCK_Q + BLOCK_Q - 1) // GROUP, q_length - 1)
    offset = kv_length - q_length
    return seen_blocks(low, high, offset, window.left, window.right, kv_length, BLOCK_KV)


@triton.jit
def mask_scores(s, k_pos, first_key, last_key, window):
    """Scores with -inf at the keys outside first_key .. last_key of each query.

    The vectors broadcast against s: k_pos[None, :] with last_key[:, None] for (queries, keys), the
    other way round for (keys, queries). Without a left bound first_key is not looked at.
    """
    visible = k_pos <= last_key
    if window.left is not None:
        visible = visible & (k_pos >= first_key)
    return tl.where(visible, s, float("-inf"))


@triton.jit
def mask_outside(s, query, starts, ends):
    """Scores with -inf where a query is outside the interval of a key. The vectors broadcast
    against s: query (queries, 1) and the others (1, keys), or the other way round.
    """
    return tl.where((query >= starts) & (query < ends), s, float("-inf"))


@triton.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    s is unscaled, row_max scaled and in log2 units. The caller owes acc * alpha + p @ v.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp2(s * scale_log2 - pivot[:, None])
    alpha = tl.exp2(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def finalize(acc, row_max, row_sum):
    """Normalise an accumulator: (o, lse in natural units); a row that saw no key: 0 and -inf."""
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    return acc * (1.0 / row_sum)[:, None], (row_max + tl.log2(row_sum)) * LN2
