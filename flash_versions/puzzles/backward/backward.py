"""The backward of causal attention: dQ, dK and dV from what the forward has left.

Put the pieces together: delta, dK and dV, dQ. Query i sees key j if j <= i + N - M. The blocks that
the mask hides cost nothing here either, and a mirror helps: the keys that a query tile sees END
with its last query, the queries that see a key tile BEGIN with its first key.

           keys ->                          dK, dV of key tile 1: from the query tile on
    q    / . . .      dQ of query tile 2:       whose last query sees key tile 1
    |    x / . .      key tiles 0, 1, 2
    v    x x / .
         x x x /

The kernels are given. Write their two bounds, and the host's part. A query that sees no key has
LSE = -inf; nothing of it may reach a gradient, NaN least of all.
"""

import torch
import triton
import triton.language as tl


def spec(q, k, v, o, lse, do):
    """What is wanted, in PyTorch."""
    m, n, scale = q.shape[0], k.shape[0], q.shape[1] ** -0.5
    seen = torch.arange(n)[None, :] <= torch.arange(m)[:, None] + n - m
    p = torch.where(seen, torch.exp(q @ k.T * scale - lse[:, None]), 0.0)
    ds = p * (do @ v.T - (o * do).sum(1)[:, None])
    return scale * ds @ k, scale * ds.T @ q, p.T @ do


@triton.jit
def load_tile(x, row, rows, D: tl.constexpr):
    """Rows of x (rows, D); 0 where there are none."""
    address = row[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(x + address, mask=(row < rows)[:, None], other=0.0)


@triton.jit
def store_tile(x, row, rows, tile, D: tl.constexpr):
    """Store rows of x (rows, D)."""
    address = row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(x + address, tile, mask=(row < rows)[:, None])


@triton.jit
def probabilities(q_tile, k_tile, row_lse, row, key, queries, keys, scale):
    """P of a tile of queries and one of keys; 0 where a query does not see a key."""
    seen = (key[None, :] <= row[:, None] + keys - queries) & (row < queries)[:, None]
    # write: exp(scale * q k^T - LSE) where `seen`, 0 elsewhere, and no NaN where the LSE is -inf
    s = tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None]
    return tl.where(seen, tl.exp(tl.where(seen, s, 0.0)), 0.0)
    # end


@triton.jit
def delta_kernel(o, do, delta, queries, D: tl.constexpr, BLOCK: tl.constexpr):
    """delta of BLOCK queries."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    product = load_tile(o, row, queries, D) * load_tile(do, row, queries, D)
    tl.store(delta + row, tl.sum(product, 1), mask=row < queries)


@triton.jit
def dk_dv_kernel(
    q, k, v, do, lse, delta, dk, dv, queries, keys, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    """dK and dV of BLOCK keys."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k_tile = load_tile(k, key, keys, D)
    v_tile = load_tile(v, key, keys, D)
    dk_tile = tl.zeros((BLOCK, D), tl.float32)
    dv_tile = tl.zeros((BLOCK, D), tl.float32)
    # write: `begin`, the first query of the first tile that sees one of these keys
    first = tl.maximum(0, tl.program_id(0) * BLOCK - (keys - queries))
    begin = first // BLOCK * BLOCK
    # end
    for start in range(begin, queries, BLOCK):
        row = start + tl.arange(0, BLOCK)
        q_tile = load_tile(q, row, queries, D)
        do_tile = load_tile(do, row, queries, D)
        row_lse = tl.load(lse + row, mask=row < queries, other=0.0)
        row_delta = tl.load(delta + row, mask=row < queries, other=0.0)
        p = probabilities(q_tile, k_tile, row_lse, row, key, queries, keys, scale)
        dv_tile += tl.dot(p.T, do_tile)
        ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None])
        dk_tile += tl.dot(ds.T, q_tile)
    store_tile(dk, key, keys, dk_tile * scale, D)
    store_tile(dv, key, keys, dv_tile, D)


@triton.jit
def dq_kernel(
    q, k, v, do, lse, delta, dq, queries, keys, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    """dQ of BLOCK queries."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    q_tile = load_tile(q, row, queries, D)
    do_tile = load_tile(do, row, queries, D)
    row_lse = tl.load(lse + row, mask=row < queries, other=0.0)
    row_delta = tl.load(delta + row, mask=row < queries, other=0.0)
    dq_tile = tl.zeros((BLOCK, D), tl.float32)
    # write: `end`, the number of keys that these queries see
    end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK + keys - queries)
    # end
    for start in range(0, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        k_tile = load_tile(k, key, keys, D)
        v_tile = load_tile(v, key, keys, D)
        p = probabilities(q_tile, k_tile, row_lse, row, key, queries, keys, scale)
        ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None])
        dq_tile += tl.dot(ds, k_tile)
    store_tile(dq, row, queries, dq_tile * scale, D)


def backward(q, k, v, o, lse, do):
    """dQ, dK and dV of causal attention; q, o and do are (M, D), k and v (N, D), lse (M,)."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    queries, keys, scale = q.shape[0], k.shape[0], q.shape[1] ** -0.5
    # write: launch the three kernels in an order that gives each what it needs
    sizes = {"D": q.shape[1], "BLOCK": 16}
    of_queries, of_keys = (triton.cdiv(queries, 16),), (triton.cdiv(keys, 16),)
    delta_kernel[of_queries](o, do, delta, queries, **sizes)
    dk_dv_kernel[of_keys](q, k, v, do, lse, delta, dk, dv, queries, keys, scale, **sizes)
    dq_kernel[of_queries](q, k, v, do, lse, delta, dq, queries, keys, scale, **sizes)
    # end
    return dq, dk, dv


# ---- check ----
HINTS = (
    "Key j is seen by the queries i >= j - (N - M). The first key of tile t is t * BLOCK, so the "
    "first query that sees it is t * BLOCK - (keys - queries), at least 0; begin with its tile.",
    "exp(s - LSE) with LSE = -inf is inf, and 0 * inf is NaN: choose with tl.where before the "
    "exponential and after it.",
    "delta_kernel first. The grids are (triton.cdiv(queries, 16),) for delta and dQ, and "
    "(triton.cdiv(keys, 16),) for dK and dV, each with D=q.shape[1], BLOCK=16.",
)
RESULTS = ("dq", "dk", "dv")
TILE = 256


def given(m, n, d=16):
    """What a causal forward leaves: q, k, v, o, lse, and a gradient of o."""
    q, k, v, do = torch.randn(m, d), torch.randn(n, d), torch.randn(n, d), torch.randn(m, d)
    seen = torch.arange(n)[None, :] <= torch.arange(m)[:, None] + n - m
    s = (q.double() @ k.double().T * d**-0.5).masked_fill(~seen, float("-inf"))
    o = torch.softmax(s, 1).nan_to_num(0.0) @ v.double()
    return q, k, v, o.float(), torch.logsumexp(s, 1).float(), do


def cases():
    """Inputs by what is special about them."""
    return {
        f"{m} queries, {n} keys": given(m, n) for m, n in ((48, 48), (37, 37), (10, 50), (40, 21))
    }


def reads(q, k, v, o, lse, do):
    """Elements that may be loaded: of the blocks of which something is seen."""
    m, n, d = q.shape[0], k.shape[0], q.shape[1]
    ends = (min(n, i + 16 + n - m) for i in range(0, m, 16))
    keys = sum(min(n, triton.cdiv(max(end, 0), 16) * 16) for end in ends)
    begins = (max(0, j - (n - m)) // 16 * 16 for j in range(0, n, 16))
    queries = sum(max(m - begin, 0) for begin in begins)
    return {
        "q": d * (m + queries),
        "do": d * (2 * m + queries),
        "k": d * (n + keys),
        "v": d * (n + keys),
        "o": o.numel(),
    }
