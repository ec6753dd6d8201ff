"""Causal attention: what a query does not see costs nothing.

A query sees the keys up to its own, and the last query sees all of them: with M queries and N keys,
query i sees key j if j <= i + N - M.

    M = N = 4 blocks     M = 2, N = 4 blocks     / cut: some scores are hidden
      / . . .              x x / .               x whole: no mask needed
      x / . .              x x x /               . skipped: neither loaded nor computed
      x x / .
      x x x /

With more queries than keys the first ones see none: o = 0, lse = -inf. The check counts loads.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def spec(q, k, v):
    """What is wanted, in PyTorch."""
    m, n = q.shape[0], k.shape[0]
    seen = torch.arange(n)[None, :] <= torch.arange(m)[:, None] + n - m
    s = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~seen, float("-inf"))
    return torch.softmax(s, 1).nan_to_num(0.0) @ v, torch.logsumexp(s, 1)


@triton.jit
def causal_kernel(q, k, v, o, lse, queries, keys, scale_log2, D: tl.constexpr, BLOCK: tl.constexpr):
    """Causal attention of BLOCK queries; scale_log2 is scale * log2(e)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    q_tile = tl.load(q + row[:, None] * D + dim[None, :], mask=(row < queries)[:, None], other=0.0)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    # write: `end`, the number of keys that the tile's last query sees, at most `keys`
    end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK + keys - queries)
    # end
    for start in range(0, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = (key < keys)[:, None]
        k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        s = tl.dot(q_tile, k_tile.T) * scale_log2
        # write: -inf for keys that a query does not see; new_m, p and alpha, with no inf - inf
        seen = key[None, :] <= row[:, None] + keys - queries
        s = tl.where(seen & (key < keys)[None, :], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        pivot = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2(s - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        # end
        l = alpha * l + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        m = new_m
    result = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(o + row[:, None] * D + dim[None, :], result, mask=(row < queries)[:, None])
    tl.store(lse + row, (m + tl.log2(l)) / 1.4426950408889634, mask=row < queries)


def causal(q, k, v):
    """Causal attention of q (M, D) over k and v (N, D), and the LSE (M,)."""
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[0])
    scale_log2 = LOG2_E * q.shape[1] ** -0.5
    grid = (triton.cdiv(q.shape[0], 16),)
    causal_kernel[grid](q, k, v, o, lse, q.shape[0], k.shape[0], scale_log2, D=q.shape[1], BLOCK=16)
    return o, lse


# ---- check ----
HINTS = (
    "The last query of tile t is (t + 1) * BLOCK - 1. It sees keys up to that number + keys - "
    "queries, so one more is the end of the loop. A loop with a negative end does nothing.",
    "seen = key[None, :] <= row[:, None] + keys - queries. In a block that is cut, a query may "
    "have seen nothing yet: subtract 0 where new_m is -inf.",
    "end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK + keys - queries); pivot = tl.where("
    'new_m == float("-inf"), 0.0, new_m), p = tl.exp2(s - pivot[:, None]), '
    "alpha = tl.exp2(m - pivot)",
)
RESULTS = ("o", "lse")
TILE = 256


def cases():
    """Inputs by what is special about them."""
    return {
        f"{m} queries, {n} keys": (torch.randn(m, 16), torch.randn(n, 16), torch.randn(n, 16))
        for m, n in ((48, 48), (37, 37), (10, 50), (40, 21))
    }


def reads(q, k, v):
    """Elements that may be loaded: of the blocks that hold a visible key."""
    m, n = q.shape[0], k.shape[0]
    ends = (min(n, i + 16 + n - m) for i in range(0, m, 16))
    rows = sum(min(n, triton.cdiv(max(end, 0), 16) * 16) for end in ends)
    return {"q": q.numel(), "k": rows * k.shape[1], "v": rows * v.shape[1]}
