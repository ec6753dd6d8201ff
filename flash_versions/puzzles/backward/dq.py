"""dQ: a program has a tile of queries and goes along the keys, as in the forward.

    P = exp(S - LSE)          S = scale * Q K^T
    dS = P * (dO V^T - delta)
    dQ = scale * dS K

P and dS are computed a second time. That costs two products more than one kernel for everything,
and saves the additions of many programs to one dQ, whose order changes from run to run.
"""

import torch
import triton
import triton.language as tl


def spec(q, k, v, do, lse, delta):
    """What is wanted, in PyTorch."""
    scale = q.shape[1] ** -0.5
    p = torch.exp(q @ k.T * scale - lse[:, None])
    return scale * (p * (do @ v.T - delta[:, None])) @ k


@triton.jit
def dq_kernel(
    q, k, v, do, lse, delta, dq, queries, keys, scale, D: tl.constexpr, BLOCK: tl.constexpr
):
    """dQ of BLOCK queries; lse and delta are (queries,), the tensors of keys (keys, D)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    here = (row < queries)[:, None]
    # write: load the tiles that stay; go along the keys and add up dQ; store it
    q_tile = tl.load(q + row[:, None] * D + dim[None, :], mask=here, other=0.0)
    do_tile = tl.load(do + row[:, None] * D + dim[None, :], mask=here, other=0.0)
    row_lse = tl.load(lse + row, mask=row < queries, other=0.0)
    row_delta = tl.load(delta + row, mask=row < queries, other=0.0)
    dq_tile = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = (key < keys)[:, None]
        k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        p = tl.exp(tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None])
        ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None])
        dq_tile += tl.dot(ds, k_tile)
    tl.store(dq + row[:, None] * D + dim[None, :], dq_tile * scale, mask=here)
    # end


def dq(q, k, v, do, lse, delta):
    """dQ (queries, D) from q and do (queries, D), lse and delta (queries,)."""
    result = torch.empty_like(q)
    scale = q.shape[1] ** -0.5
    grid = (triton.cdiv(q.shape[0], 16),)
    dq_kernel[grid](
        q, k, v, do, lse, delta, result, q.shape[0], k.shape[0], scale, D=q.shape[1], BLOCK=16
    )
    return result


# ---- check ----
from flash_versions.puzzles.backward.dk_dv import TILE, gradients_given  # noqa: E402, F401

HINTS = (
    "It is the kernel of dK and dV with the roles of queries and keys swapped: q, do, lse and "
    "delta stay, k and v change.",
    "A key that does not exist has k = 0, so its dS adds nothing to dQ. A query that does not "
    "exist is not stored.",
    "In the loop: p = tl.exp(tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None]); ds = p * "
    "(tl.dot(do_tile, v_tile.T) - row_delta[:, None]); dq_tile += tl.dot(ds, k_tile).",
)
RESULTS = ("dq",)


def cases():
    """Inputs by what is special about them."""
    return {
        "32 queries, 32 keys": gradients_given(32, 32, 16),
        "19 queries, 37 keys": gradients_given(19, 37, 16),
        "40 queries, 5 keys, head_dim 32": gradients_given(40, 5, 32),
        "large scores": gradients_given(20, 20, 16, 20.0),
    }


def reads(q, k, v, do, lse, delta):
    """Elements that may be loaded: each program needs all keys, and its queries once."""
    programs = triton.cdiv(q.shape[0], 16)
    given = {"q": q.numel(), "do": do.numel(), "lse": len(lse), "delta": len(delta)}
    return given | {"k": programs * k.numel(), "v": programs * v.numel()}
