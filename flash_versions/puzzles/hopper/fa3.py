"""A small FlashAttention 3: causal attention with a producer, two consumers and rings of K and V.

A program has 128 queries, 64 for each consumer. The producer loads Q once and then the blocks of K
and V that the program's last query sees; both consumers read every block.

    producer      Q  K0 V0  K1 V1  K2 V2 ...           waits only for slots
    consumer 0       S0 softmax P0V0   S1 softmax ...
    consumer 1       S0 softmax P0V0   S1 softmax ...

Write the two loops. Query i sees key j if j <= i; there are as many keys as queries, and no block
divides their number. TMA fills what is outside of a tensor with zeros, so a key that does not exist
has the score 0: the mask hides it. scale_log2 is scale * log2(e).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.versions.fa3.hopper.operands import multiply_pv, multiply_qk, rounded
from flash_versions.versions.tiles.pipeline import make_pipeline
from flash_versions.versions.tiles.wgmma import accumulator_layout

LOG2_E = 1.4426950408889634


def spec(q, k, v):
    """What is wanted, in PyTorch."""
    kind = torch.promote_types(q.dtype, torch.float32)
    hidden = torch.ones(len(q), len(k)).triu(1).bool()
    s = (q.to(kind) @ k.to(kind).T / 8).masked_fill(hidden, float("-inf"))
    return torch.softmax(s, 1) @ v.to(kind)


@gluon.jit
def blocks_of(length):
    """Blocks of 64 keys that the program's queries see."""
    end = gl.minimum(length, (gl.program_id(0) + 1) * 128)
    return (end + 63) // 64


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, length):
    """Load Q for both consumers, and the blocks of K and V."""
    query = gl.program_id(0) * 128
    q_ring.fill(q_ring.at(0, 0), q, [query, 0])
    q_ring.fill(q_ring.at(1, 0), q, [query + 64, 0])
    stage = k_ring.at(0, 0)
    # write: for each block, fill a stage of k_ring and of v_ring with the boxes at [row, 0]
    for i in range(blocks_of(length)):
        k_ring.fill(stage, k, [i * 64, 0])
        v_ring.fill(stage, v, [i * 64, 0])
        stage = stage.next()
    # end


@gluon.jit
def consume(o, q_ring, k_ring, v_ring, length, scale_log2, CONSUMER: gl.constexpr):
    """64 rows of o (length, 64)."""
    layout: gl.constexpr = accumulator_layout(64)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.program_id(0) * 128 + CONSUMER * 64 + gl.arange(0, 64, layout=rows)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    acc = gl.zeros([64, 64], gl.float32, layout)
    m = gl.full([64], float("-inf"), gl.float32, rows)
    l = gl.zeros([64], gl.float32, rows)
    q_stage = q_ring.at(CONSUMER, 0)
    q_ring.wait(q_stage)
    q_tile = q_ring.tile(q_stage)
    stage = k_ring.at(0, 0)
    for i in range(blocks_of(length)):
        # write: S of the block, scaled and masked; m, l and acc; both slots released when read
        k_ring.wait(stage)
        s = warpgroup_mma_wait(0, deps=[multiply_qk(q_tile, k_ring.tile(stage))])
        k_ring.release(stage)
        key = i * 64 + column
        s = gl.where(key[None, :] <= row[:, None], s * scale_log2, float("-inf"))
        new_m = gl.maximum(m, gl.max(s, 1))
        p = gl.exp2(s - new_m[:, None])
        alpha = gl.exp2(m - new_m)
        l = l * alpha + gl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_ring.wait(stage)
        v_tile = v_ring.tile(stage)
        acc = warpgroup_mma_wait(0, deps=[multiply_pv(rounded(p, v_tile, acc), v_tile, acc)])
        v_ring.release(stage)
        m = new_m
        # end
        stage = stage.next()
    gl.store(
        o + row[:, None] * 64 + column[None, :], acc / l[:, None], mask=(row < length)[:, None]
    )


@gluon.jit
def fa3_kernel(q, k, v, o, length, scale_log2):
    """Make the rings, and start all three."""
    q_ring = make_pipeline(q, 2, 1)
    k_ring = make_pipeline(k, 2, 2)
    v_ring = make_pipeline(v, 2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o, q_ring, k_ring, v_ring, length, scale_log2, 0)),
            (consume, (o, q_ring, k_ring, v_ring, length, scale_log2, 1)),
            (produce, (q, k, v, q_ring, k_ring, v_ring, length)),
        ],
        [4, 1],
        [240, 24],
    )


def fa3(q, k, v):
    """Causal attention of q, k and v (length, 64), fp16; the result is fp32."""
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    boxes = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout) for x in (q, k, v)
    ]
    o = torch.empty(q.shape)
    grid = ((q.shape[0] + 127) // 128,)
    fa3_kernel[grid](*boxes, o, q.shape[0], LOG2_E / 8, num_warps=4)
    return o


# ---- check ----
HINTS = (
    "The producer: for i in range(blocks_of(length)): k_ring.fill(stage, k, [i * 64, 0]), the same "
    "for v, stage = stage.next(). A consumer's products are those of the puzzle `rescale`.",
    "key = i * 64 + column, and s = gl.where(key[None, :] <= row[:, None], s * scale_log2, "
    'float("-inf")). Every query sees key 0, so m is finite from the first block on.',
    "Wait, multiply, warpgroup_mma_wait, release for K; then new_m, p, alpha, l, acc * alpha; then "
    "wait, multiply_pv(rounded(p, v_tile, acc), v_tile, acc), warpgroup_mma_wait, release for V.",
)
RESULTS = ("o",)


def cases():
    """Inputs by what is special about them."""
    q, k, v = (torch.randn(128, 64).half() for _ in range(3))
    q[:, 0], k[:, 0] = 100 * (-1.0) ** torch.arange(128), 10
    given = {
        f"{n} queries": tuple(torch.randn(n, 64).half() for _ in range(3)) for n in (128, 300, 70)
    }
    return given | {"scores near 125, and near -125 of every second query": (q, k, v)}


def review(events, q, k, v):
    """Blocks that no query of a program sees are not loaded."""
    needed = sum(2 + 2 * -(-min(len(k), i + 128) // 64) for i in range(0, len(q), 128))
    copies = sum(what == "copy" for _, what in events)
    assert copies <= needed, (
        f"the result is right, but {copies} tiles are copied; {needed} are enough."
    )
