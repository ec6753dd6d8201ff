"""FlashAttention 4's first idea: rescale only when the maximum has grown much.

When a row's maximum grows, all of acc is multiplied by alpha = 2^(m - new m). But any number may
take the maximum's place, as long as 2^(s - m) does not overflow and acc and l use the same one. So
keep the old m while the scores exceed it by at most 8, where p is at most 2^8, and leave the
rescale out:

    new maximum - m       0.3    0      1.9    9.1      0.4         the largest of 64 rows
                          keep   keep   keep   rescale  keep

Decide once for a tile: if one of its rows needs it, all are rescaled. Count the rescales, the first
block's included. Scores are in powers of two.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.versions.fa3.hopper.operands import multiply_pv, multiply_qk, rounded
from flash_versions.versions.tiles.pipeline import make_pipeline
from flash_versions.versions.tiles.wgmma import accumulator_layout


def spec(q, k, v):
    """What is wanted, in PyTorch: o, and how often the tile is rescaled."""
    kind = torch.promote_types(q.dtype, torch.float32)
    s = q.to(kind) @ k.to(kind).T / 8
    m, rescales = torch.full((64,), float("-inf"), dtype=kind), 0
    for block in s.split(64, 1):
        new_m = torch.maximum(m, block.amax(1))
        if ((new_m - m) > 8).any():
            m, rescales = new_m, rescales + 1
    weights = torch.exp2(s - s.amax(1, keepdim=True))
    return weights @ v.to(kind) / weights.sum(1)[:, None], torch.tensor([rescales], dtype=kind)


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, blocks):
    """Load Q, and the blocks of K and V in turn."""
    q_ring.fill(q_ring.at(0, 0), q, [0, 0])
    stage = k_ring.at(0, 0)
    for i in range(blocks):
        k_ring.fill(stage, k, [i * 64, 0])
        v_ring.fill(stage, v, [i * 64, 0])
        stage = stage.next()


@gluon.jit
def consume(o, count, q_ring, k_ring, v_ring, blocks):
    """64 rows of o (64, 64), and the number of rescales."""
    layout: gl.constexpr = accumulator_layout(64)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    acc = gl.zeros([64, 64], gl.float32, layout)
    m = gl.full([64], float("-inf"), gl.float32, rows)
    l = gl.zeros([64], gl.float32, rows)
    rescales = 0.0
    stage = k_ring.at(0, 0)
    q_ring.wait(stage)
    q_tile = q_ring.tile(stage)
    for _ in range(blocks):
        k_ring.wait(stage)
        s = warpgroup_mma_wait(0, deps=[multiply_qk(q_tile, k_ring.tile(stage))]) * 0.125
        k_ring.release(stage)
        new_m = gl.maximum(m, gl.max(s, 1))
        # write: if a row's maximum has grown by more than 8, rescale acc and l, take new_m, count
        if gl.max(new_m - m, 0) > 8.0:
            alpha = gl.exp2(m - new_m)
            acc = acc * alpha[:, None]
            l = l * alpha
            m = new_m
            rescales += 1.0
        # end
        p = gl.exp2(s - m[:, None])
        l += gl.sum(p, 1)
        v_ring.wait(stage)
        v_tile = v_ring.tile(stage)
        acc = warpgroup_mma_wait(0, deps=[multiply_pv(rounded(p, v_tile, acc), v_tile, acc)])
        v_ring.release(stage)
        stage = stage.next()
    row = gl.arange(0, 64, layout=rows)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(o + row[:, None] * 64 + column[None, :], acc / l[:, None])
    gl.store(count, rescales)


@gluon.jit
def rescale_kernel(q, k, v, o, count, blocks):
    """Make the rings, and start both."""
    q_ring = make_pipeline(q, 1, 1)
    k_ring = make_pipeline(k, 2, 1)
    v_ring = make_pipeline(v, 2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o, count, q_ring, k_ring, v_ring, blocks)),
            (produce, (q, k, v, q_ring, k_ring, v_ring, blocks)),
        ],
        [1],
        [24],
    )


def rescale(q, k, v):
    """Attention with scores q k^T / 8 in powers of two, and the number of rescales.

    q is (64, 64), k and v are (blocks * 64, 64), fp16; the results are fp32.
    """
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    boxes = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout) for x in (q, k, v)
    ]
    o = torch.empty(64, 64)
    count = torch.empty(1)
    rescale_kernel[(1,)](*boxes, o, count, k.shape[0] // 64, num_warps=4)
    return o, count


# ---- check ----
HINTS = (
    "gl.max(new_m - m, 0) is one number for the tile, so a plain `if` can look at it. While m is "
    "-inf the difference is inf, so the first block always rescales.",
    "alpha = gl.exp2(m - new_m); acc and l are both sums under the old m, so both are multiplied.",
    "if gl.max(new_m - m, 0) > 8.0: alpha = gl.exp2(m - new_m), acc = acc * alpha[:, None], "
    "l = l * alpha, m = new_m, rescales += 1.0. Outside of the `if`, m stays.",
)
RESULTS = ("o", "rescales")


def cases():
    """Inputs by what is special about them."""

    def qkv(blocks, growth=1.0):
        k = torch.randn(blocks, 64, 64) * growth ** torch.arange(blocks)[:, None, None]
        return (
            torch.randn(64, 64).half(),
            k.half().view(-1, 64),
            torch.randn(blocks * 64, 64).half(),
        )

    return {"1 block": qkv(1), "5 blocks": qkv(5), "4 blocks, scores that grow": qkv(4, 2.5)}
