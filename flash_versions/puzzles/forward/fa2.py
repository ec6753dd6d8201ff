"""FlashAttention 2: divide once, after the loop.

The tensor cores do products much faster than the other units divide and take exponentials. So:

* acc is the sum of p @ v, not the average; one division by l after the loop makes it one.
* 2^x is an instruction, e^x is two. With scores times scale * log2(e), exp2 gives the same p.

The backward needs m and l again. It gets one number for each query, LSE = log(sum of e^score): with
m in powers of two, LSE = (m + log2(l)) / log2(e). Return o and LSE. Neither a division nor tl.exp
is left in the loop.

q, k and v are fp32 or fp16; m, l and acc are fp32. tl.dot takes two tiles of one type.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def spec(q, k, v):
    """What is wanted, in PyTorch."""
    s = q @ k.T * q.shape[1] ** -0.5
    return torch.softmax(s, 1) @ v, torch.logsumexp(s, 1)


@triton.jit
def fa2_kernel(q, k, v, o, lse, queries, keys, scale_log2, D: tl.constexpr, BLOCK: tl.constexpr):
    """Attention of BLOCK queries; scale_log2 is scale * log2(e)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    q_tile = tl.load(q + row[:, None] * D + dim[None, :], mask=(row < queries)[:, None], other=0.0)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        there = (key < keys)[:, None]
        k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        # write: scores in powers of two; update m, l and acc, which stays a sum
        s = tl.dot(q_tile, k_tile.T) * scale_log2
        s = tl.where((key < keys)[None, :], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        l = alpha * l + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        m = new_m
        # end
    # write: divide acc by l; store o, and the LSE to lse + row
    result = acc / l[:, None]
    tl.store(o + row[:, None] * D + dim[None, :], result, mask=(row < queries)[:, None])
    tl.store(lse + row, (m + tl.log2(l)) / 1.4426950408889634, mask=row < queries)
    # end


def fa2(q, k, v):
    """Attention of q (queries, D) over k and v (keys, D), and the LSE of each query in fp32."""
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[0])
    scale_log2 = LOG2_E * q.shape[1] ** -0.5
    grid = (triton.cdiv(q.shape[0], 16),)
    fa2_kernel[grid](q, k, v, o, lse, q.shape[0], k.shape[0], scale_log2, D=q.shape[1], BLOCK=16)
    return o, lse


# ---- check ----
HINTS = (
    "e^x = 2^(x log2(e)): multiply the scores by scale_log2, and take tl.exp2 of both differences.",
    "acc = acc * alpha[:, None] + tl.dot(p, v_tile), and l as before. p has to have v's type, "
    "p.to(v_tile.dtype): the tensor cores multiply two tiles of one type.",
    "After the loop: acc / l[:, None] is o, and (m + tl.log2(l)) / 1.4426950408889634 the LSE.",
)
RESULTS = ("o", "lse")
TILE = 512
LOOPS = ("a division", "tl.exp")


def cases():
    """Inputs by what is special about them."""

    def qkv(m, n, d, scale=1.0, dtype=torch.float32):
        return (
            (scale * torch.randn(m, d)).to(dtype),
            torch.randn(n, d).to(dtype),
            torch.randn(n, d).to(dtype),
        )

    q, k, _ = qkv(16, 48, 16)
    q[:, 0], k[:, 0] = 100 * (-1.0) ** torch.arange(16), 10
    k[16:32, 0] = 5
    return {
        "32 queries, 32 keys": qkv(32, 32, 16),
        "19 queries, 37 keys": qkv(19, 37, 16),
        "large scores": qkv(16, 48, 16, 30.0),
        "scores of 250 and 125, of other queries -250 and -125": (q, k, torch.randn(48, 16)),
        "fp16": qkv(20, 50, 32, dtype=torch.float16),
    }


def reads(q, k, v):
    """Elements that may be loaded: each program needs all of k and v, and its queries once."""
    programs = triton.cdiv(q.shape[0], 16)
    return {"q": q.numel(), "k": k.numel() * programs, "v": v.numel() * programs}
