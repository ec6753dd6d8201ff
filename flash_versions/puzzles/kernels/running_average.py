"""The running average: softmax(s) @ v, with scores and values read once.

o is an average of the rows of v, weighted by the softmax of the scores. After each block, o is the
average over the keys so far, so it has to change when a block arrives:

    m, l, o  --- scores s (queries, keys) and values v (keys, D) of a block --->  m, l, o

    o was a sum divided by the old l. Multiply by l and by the factor that corrects the maximum,
    add p @ v, divide by the new l.
"""

import torch
import triton
import triton.language as tl


def spec(s, v):
    """What is wanted, in PyTorch."""
    return torch.softmax(s, 1).nan_to_num(0.0) @ v


@triton.jit
def running_average_kernel(s, v, o, queries, keys, D: tl.constexpr, BLOCK: tl.constexpr):
    """softmax(s) @ v for BLOCK queries; s is (queries, keys), v (keys, D), o (queries, D)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    average = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        inside = (row < queries)[:, None] & (key < keys)[None, :]
        scores = tl.load(s + row[:, None] * keys + key[None, :], mask=inside, other=float("-inf"))
        values = tl.load(v + key[:, None] * D + dim[None, :], mask=(key < keys)[:, None], other=0.0)
        new_m = tl.maximum(m, tl.max(scores, 1))
        pivot = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp(scores - pivot[:, None])
        alpha = tl.exp(m - pivot)
        # write: the new sum, and the average over all keys so far
        new_l = alpha * l + tl.sum(p, 1)
        norm = tl.where(new_l == 0.0, 1.0, new_l)
        average = (average * (alpha * l)[:, None] + tl.dot(p, values)) / norm[:, None]
        l = new_l
        # end
        m = new_m
    tl.store(o + row[:, None] * D + dim[None, :], average, mask=(row < queries)[:, None])


def running_average(s, v):
    """softmax(s) @ v for s (queries, keys) and v (keys, D)."""
    o = torch.empty(s.shape[0], v.shape[1])
    grid = (triton.cdiv(s.shape[0], 16),)
    running_average_kernel[grid](s, v, o, *s.shape, D=v.shape[1], BLOCK=16)
    return o


# ---- check ----
HINTS = (
    "new_l = alpha * l + tl.sum(p, 1), as in the online softmax. tl.dot(p, values) is this block's "
    "part of the sum.",
    "average * l is the sum so far, under the old maximum; times alpha, under the new one.",
    "average = (average * (alpha * l)[:, None] + tl.dot(p, values)) / new_l[:, None], and where "
    "new_l is 0 divide by 1.",
)
RESULTS = ("o",)
TILE = 256


def cases():
    """Inputs by what is special about them."""
    growing = torch.randn(16, 48) + 5 * torch.arange(3).repeat_interleave(16)
    hidden = torch.randn(16, 40)
    hidden[2, :20] = hidden[3] = float("-inf")
    return {
        "one block": (torch.randn(16, 16), torch.randn(16, 16)),
        "19 queries, 40 keys": (torch.randn(19, 40), torch.randn(40, 16)),
        "scores that grow": (growing, torch.randn(48, 16)),
        "rows near 200 and -200, that fall": (
            growing.flip(1) * 20 + 200 * (-1.0) ** torch.arange(16)[:, None],
            torch.randn(48, 16),
        ),
        "a query that sees no key of block 0, and one that sees none": (
            hidden,
            torch.randn(40, 16),
        ),
    }
