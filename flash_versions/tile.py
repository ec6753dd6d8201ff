"""Algebra on register tiles, shared by every version: which keys a query sees, and which KV blocks
that touches.

These functions take tiles and position vectors and touch no memory, so they compile unchanged from
Triton and from Gluon kernels.
"""

import math

import triton
import triton.language as tl

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def last_visible_key(q_pos, q_length, kv_length, CAUSAL: tl.constexpr):
    """Position of the last key that a query sees; negative if it sees none.

    Causal is bottom-right aligned: the last query sees the last key, whatever the two lengths are.
    """
    end = q_pos * 0 + kv_length - 1
    return tl.minimum(q_pos + (kv_length - q_length), end) if CAUSAL else end


@triton.jit
def kv_block_range(first_query_sees, last_query_sees, BLOCK_KV: tl.constexpr):
    """The KV blocks of a query tile, from the last visible key of its first and of its last query:
    (n_full, n_all).

    Blocks [0, n_full) are visible to all its queries in full and need no mask; blocks [n_full,
    n_all) are cut by the diagonal or by the end of the keys; blocks from n_all on are visible to
    none.
    """
    n_full = tl.maximum(first_query_sees + 1, 0) // BLOCK_KV
    n_all = tl.cdiv(tl.maximum(last_query_sees + 1, 0), BLOCK_KV)
    return n_full, n_all


@triton.jit
def mask_scores(s, k_pos, last_key):
    """Scores (queries, keys) with -inf at every key past the last one that the query sees."""
    return tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
