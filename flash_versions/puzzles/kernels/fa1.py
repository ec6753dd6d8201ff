"""FlashAttention 1: o = softmax(q @ k.T * scale) @ v, and no score is ever written to memory.

A program has a tile of queries. It goes along the keys block by block, computes the scores of its
queries with them, and uses them up before the next block:

                 k, v:   block 0     block 1     block 2
    q tile, program 0       s     ->    s     ->    s      ->  o tile 0
    q tile, program 1       s     ->    s     ->    s      ->  o tile 1

Memory sees q, k, v and o: O(n D) numbers instead of O(n^2) scores. Write the loop's body.
"""

import torch
import triton
import triton.language as tl


def spec(q, k, v):
    """What is wanted, in PyTorch."""
    return torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1) @ v


@triton.jit
def fa1_kernel(q, k, v, o, queries, keys, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Attention of BLOCK queries; q and o are (queries, D), k and v (keys, D), without gaps."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    q_tile = tl.load(q + row[:, None] * D + dim[None, :], mask=(row < queries)[:, None], other=0.0)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    average = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        # write: load k and v; scores, -inf for keys that do not exist; update m, l and the average
        there = (key < keys)[:, None]
        k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)
        s = tl.dot(q_tile, k_tile.T) * scale
        s = tl.where((key < keys)[None, :], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - new_m[:, None])
        alpha = tl.exp(m - new_m)
        new_l = alpha * l + tl.sum(p, 1)
        average = (average * (alpha * l)[:, None] + tl.dot(p, v_tile)) / new_l[:, None]
        m = new_m
        l = new_l
        # end
    tl.store(o + row[:, None] * D + dim[None, :], average, mask=(row < queries)[:, None])


def fa1(q, k, v):
    """Attention of q (queries, D) over k and v (keys, D)."""
    o = torch.empty_like(q)
    scale = q.shape[1] ** -0.5
    grid = (triton.cdiv(q.shape[0], 16),)
    fa1_kernel[grid](q, k, v, o, q.shape[0], k.shape[0], scale, D=q.shape[1], BLOCK=16)
    return o


# ---- check ----
HINTS = (
    "The loop is that of the running average; only the scores come from tl.dot(q_tile, k_tile.T) "
    "* scale instead of from memory.",
    "Where a key does not exist, its k is 0 and its score 0, and exp(0) counts. Set the score to "
    "-inf with tl.where.",
    's = tl.where((key < keys)[None, :], tl.dot(q_tile, k_tile.T) * scale, float("-inf")); load '
    "both tiles with mask=(key < keys)[:, None] and other=0.0.",
)
RESULTS = ("o",)
TILE = 512


def cases():
    """Inputs by what is special about them."""

    def qkv(m, n, d, scale=1.0):
        return scale * torch.randn(m, d), torch.randn(n, d), torch.randn(n, d)

    q, k, _ = qkv(16, 48, 16)
    q[:, 0], k[:, 0] = 100 * (-1.0) ** torch.arange(16), 10
    k[16:32, 0] = 5
    return {
        "32 queries, 32 keys": qkv(32, 32, 16),
        "19 queries, 37 keys": qkv(19, 37, 16),
        "5 queries, 70 keys, head_dim 32": qkv(5, 70, 32),
        "large scores": qkv(16, 48, 16, 30.0),
        "scores of 250 and 125, of other queries -250 and -125": (q, k, torch.randn(48, 16)),
    }
