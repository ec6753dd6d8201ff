"""Heads, of which several share keys: grouped-query attention.

A model has H query heads and fewer heads of keys and values, HK: query heads h * g to h * g + g - 1
use key head h, where g = H / HK. Tensors are (length, heads, D). Nothing is copied: each program
has a query tile of one head and finds the keys of its head by addresses.

    query heads   0 1 2 | 3 4 5      H = 6, HK = 2, g = 3
    key heads       0   |   1

The strides tell how far apart two rows are, and two heads. The loop is FlashAttention 2's.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def spec(q, k, v):
    """What is wanted, in PyTorch."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[2] ** -0.5
    return torch.einsum("hmn,nhd->mhd", torch.softmax(s, 2), v)


@triton.jit
def heads_kernel(
    q, k, v, o, queries, keys, scale_log2, group,
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK queries of one head; x_row and x_head are strides in elements."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    dim = tl.arange(0, D)
    # write: let q and o point to this head, k and v to the head of keys that it uses
    q += head * q_head
    o += head * o_head
    k += head // group * k_head
    v += head // group * v_head
    # end
    here = (row < queries)[:, None]
    q_tile = tl.load(q + row[:, None] * q_row + dim[None, :], mask=here, other=0.0)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = (key < keys)[:, None]
        # write: the tiles of k and v
        k_tile = tl.load(k + key[:, None] * k_row + dim[None, :], mask=there, other=0.0)
        v_tile = tl.load(v + key[:, None] * v_row + dim[None, :], mask=there, other=0.0)
        # end
        s = tl.dot(q_tile, k_tile.T) * scale_log2
        s = tl.where((key < keys)[None, :], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        l = alpha * l + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        m = new_m
    tl.store(o + row[:, None] * o_row + dim[None, :], acc / l[:, None], mask=here)


def heads(q, k, v):
    """Attention of q (M, H, D) over k and v (N, HK, D); the last dimension is contiguous."""
    o = torch.empty(q.shape)
    strides = [x.stride(axis) for x in (q, k, v, o) for axis in (0, 1)]
    group = q.shape[1] // k.shape[1]
    scale_log2 = LOG2_E * q.shape[2] ** -0.5
    # write: the grid: a program for each tile of 16 queries and each query head
    grid = (triton.cdiv(q.shape[0], 16), q.shape[1])
    # end
    heads_kernel[grid](
        q, k, v, o, q.shape[0], k.shape[0], scale_log2, group, *strides, D=q.shape[2], BLOCK=16
    )
    return o


# ---- check ----
HINTS = (
    "Query head h uses key head h // group.",
    "Element (i, head, d) of q is at q + i * q_row + head * q_head + d. v need not have the "
    "strides of k.",
    "q += head * q_head; k += head // group * k_head; the address of a tile of k is "
    "k + key[:, None] * k_row + dim[None, :].",
)
RESULTS = ("o",)
TILE = 256


def cases():
    """Inputs by what is special about them."""
    swapped = torch.randn(2, 37, 16).transpose(0, 1)
    return {
        "2 heads each": tuple(torch.randn(16, 2, 16) for _ in range(3)),
        "6 heads of queries, 2 of keys": (
            torch.randn(19, 6, 16),
            torch.randn(37, 2, 16),
            torch.randn(37, 2, 16),
        ),
        "strides of their own": (
            torch.randn(4, 5, 16).transpose(0, 1),
            torch.randn(37, 3, 24)[:, :2, :16],
            swapped,
        ),
    }


def reads(q, k, v):
    """Elements that may be loaded: each tile of each query head needs its keys once."""
    programs = triton.cdiv(q.shape[0], 16) * q.shape[1]
    each = programs * k.shape[0] * k.shape[2]
    return {"q": q.numel(), "k": each, "v": each}
