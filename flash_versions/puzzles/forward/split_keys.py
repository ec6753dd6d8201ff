"""Split the keys: many programs for few queries.

A model that generates has one query and thousands of keys. With a program for each query tile one
program would read them all, while the rest of the GPU idles. So a program takes a part of the keys:

    keys        block 0   block 1 | block 2   block 3 | block 4 . . .
    program           0           |         1         |       2           -> o and lse of each part

Each stores the attention over its own keys, and their LSE. A program whose part is empty stores
o = 0 and lse = -inf. The next puzzle puts the parts together.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def spec(q, k, v, splits):
    """What is wanted, in PyTorch. All parts have the same number of blocks of 16 keys, as long as
    there are keys: 5 blocks in 4 parts are 2, 2, 1 and 0.
    """
    size = triton.cdiv(triton.cdiv(k.shape[0], 16), splits) * 16
    parts = []
    for first in range(0, splits * size, size):
        s = q @ k[first : first + size].T * q.shape[1] ** -0.5
        parts.append((torch.softmax(s, 1) @ v[first : first + size], torch.logsumexp(s, 1)))
    return tuple(torch.stack(x) for x in zip(*parts))


@triton.jit
def split_keys_kernel(
    q, k, v, o, lse, queries, keys, size, scale_log2, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Attention of at most BLOCK queries over `size` keys from split * size on."""
    split = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    q_tile = tl.load(q + row[:, None] * D + dim[None, :], mask=(row < queries)[:, None], other=0.0)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    # write: `first` and `end` of this program's keys
    first = split * size
    end = tl.minimum(keys, first + size)
    # end
    for start in range(first, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = (key < keys)[:, None]
        k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        s = tl.dot(q_tile, k_tile.T) * scale_log2
        s = tl.where((key < keys)[None, :], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        l = alpha * l + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        m = new_m
    # write: store o and the LSE of this part: o is (splits, queries, D), lse (splits, queries)
    part = split * queries + row
    result = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(o + part[:, None] * D + dim[None, :], result, mask=(row < queries)[:, None])
    tl.store(lse + part, (m + tl.log2(l)) / 1.4426950408889634, mask=row < queries)
    # end


def split_keys(q, k, v, splits):
    """The attention of q (at most 16, D) over each part of k and v (keys, D), and its LSE."""
    o = torch.empty(splits, *q.shape)
    lse = torch.empty(splits, q.shape[0])
    size = triton.cdiv(triton.cdiv(k.shape[0], 16), splits) * 16
    scale_log2 = LOG2_E * q.shape[1] ** -0.5
    split_keys_kernel[(splits,)](
        q, k, v, o, lse, q.shape[0], k.shape[0], size, scale_log2, D=q.shape[1], BLOCK=16
    )
    return o, lse


# ---- check ----
HINTS = (
    "A part begins with key split * size and ends before key split * size + size, or with the "
    "keys.",
    "Row `row` of part `split` is row split * queries + row of a matrix with all parts.",
    "Where l is 0, divide by 1; log2(0) is -inf, and so is m, which gives lse = -inf.",
)
RESULTS = ("o", "lse")
TILE = 256


def cases():
    """Inputs by what is special about them."""
    return {
        f"{m} queries, {n} keys, {splits} parts": (
            torch.randn(m, 16),
            torch.randn(n, 16),
            torch.randn(n, 16),
            splits,
        )
        for m, n, splits in ((16, 64, 2), (1, 70, 3), (5, 40, 4))
    }


def reads(q, k, v, splits):
    """Elements that may be loaded: all keys once."""
    return {"q": q.numel() * splits, "k": k.numel(), "v": v.numel()}
