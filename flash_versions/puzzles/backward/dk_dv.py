"""dK and dV: a program has a tile of keys and goes along the queries.

P was never stored. It comes back from the scores and the LSE, without a maximum and without a sum:

    P = exp(S - LSE)          S = scale * Q K^T
    dV = P^T dO
    dS = P * (dO V^T - delta)
    dK = scale * dS^T Q

The forward has query tiles and a loop over keys. Here it is the other way round, so that each
program adds up its own dK and dV, and two never add to the same memory.
"""

import torch
import triton
import triton.language as tl


def spec(q, k, v, do, lse, delta):
    """What is wanted, in PyTorch."""
    scale = q.shape[1] ** -0.5
    p = torch.exp(q @ k.T * scale - lse[:, None])
    ds = p * (do @ v.T - delta[:, None])
    return scale * ds.T @ q, p.T @ do


@triton.jit
def dk_dv_kernel(
    q, k, v, do, lse, delta, dk, dv, queries, keys, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    """dK and dV of BLOCK keys; lse and delta are (queries,), the tensors of keys (keys, D)."""
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    there = (key < keys)[:, None]
    k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)
    v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)
    dk_tile = tl.zeros((BLOCK, D), tl.float32)
    dv_tile = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, queries, BLOCK):
        row = start + tl.arange(0, BLOCK)
        here = row < queries
        # write: load the queries' q, do, lse and delta; add to dk_tile and dv_tile
        q_tile = tl.load(q + row[:, None] * D + dim[None, :], mask=here[:, None], other=0.0)
        do_tile = tl.load(do + row[:, None] * D + dim[None, :], mask=here[:, None], other=0.0)
        row_lse = tl.load(lse + row, mask=here, other=float("inf"))
        row_delta = tl.load(delta + row, mask=here, other=0.0)
        p = tl.exp(tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None])
        dv_tile += tl.dot(p.T, do_tile)
        ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None])
        dk_tile += tl.dot(ds.T, q_tile)
        # end
    tl.store(dk + key[:, None] * D + dim[None, :], dk_tile * scale, mask=there)
    tl.store(dv + key[:, None] * D + dim[None, :], dv_tile, mask=there)


def dk_dv(q, k, v, do, lse, delta):
    """dK and dV (keys, D) from q and do (queries, D), lse and delta (queries,)."""
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    scale = q.shape[1] ** -0.5
    grid = (triton.cdiv(k.shape[0], 16),)
    dk_dv_kernel[grid](
        q, k, v, do, lse, delta, dk, dv, q.shape[0], k.shape[0], scale, D=q.shape[1], BLOCK=16
    )
    return dk, dv


# ---- check ----
HINTS = (
    "p = tl.exp(tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None]) is (queries, keys). dV sums "
    "over queries, so it needs p.T.",
    "For a query that does not exist p has to be harmless: with q, do and delta loaded as 0, "
    "any finite lse will do, and NaN will not.",
    "dv_tile += tl.dot(p.T, do_tile); ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None]); "
    "dk_tile += tl.dot(ds.T, q_tile). The store multiplies dk by scale.",
)
RESULTS = ("dk", "dv")
TILE = 512


def gradients_given(m, n, d, scale=1.0):
    """Inputs of a backward: q, k, v, do, lse and delta."""
    q, k, v, do = scale * torch.randn(m, d), torch.randn(n, d), torch.randn(n, d), torch.randn(m, d)
    s = (q.double() @ k.double().T) * d**-0.5
    o = torch.softmax(s, 1) @ v.double()
    return q, k, v, do, torch.logsumexp(s, 1).float(), (o * do).sum(1).float()


def cases():
    """Inputs by what is special about them."""
    return {
        "32 queries, 32 keys": gradients_given(32, 32, 16),
        "37 queries, 19 keys": gradients_given(37, 19, 16),
        "5 queries, 40 keys, head_dim 32": gradients_given(5, 40, 32),
        "large scores": gradients_given(20, 20, 16, 20.0),
    }


def reads(q, k, v, do, lse, delta):
    """Elements that may be loaded: each program needs all queries, and its keys once."""
    programs = triton.cdiv(k.shape[0], 16)
    given = {"k": k.numel(), "v": v.numel()}
    return given | {"q": programs * q.numel(), "do": programs * do.numel()}
