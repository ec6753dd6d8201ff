"""Two products in flight: S of the next block is issued before P V of this one is done.

Attention has two products for each block of keys, and between them something that the tensor cores
cannot do. Here that is a square in the place of the softmax: o = sum over blocks of (S * S) @ V,
where S = Q K^T / 64. In order, the tensor cores wait while squares are computed:

    tensor cores    S0 .... P0V0  S1 .... P1V1  S2 ....          in order
    other units        sq0           sq1           sq2

    tensor cores    S0      S1 P0V0      S2 P1V1      P2V2       S one block ahead
    other units        sq0      ...  sq1      ...  sq2

warpgroup_mma_wait(1, deps=[x]) waits until at most 1 product is in flight, the one issued last.
The check counts how often two are.
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


def spec(q, k, v):
    """What is wanted, in PyTorch."""
    s = q @ k.T / 64
    return (s * s) @ v


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
def consume(o, q_ring, k_ring, v_ring, blocks):
    """64 rows of o (64, 64). ring.wait(stage) waits until the stage's slot is full,
    ring.release(stage) says that it has been read, ring.tile(stage) is its tile.
    """
    layout: gl.constexpr = accumulator_layout(64)
    acc = gl.zeros([64, 64], gl.float32, layout)
    stage = k_ring.at(0, 0)
    q_ring.wait(stage)
    q_tile = q_ring.tile(stage)
    k_ring.wait(stage)
    s = warpgroup_mma_wait(0, deps=[multiply_qk(q_tile, k_ring.tile(stage))])
    k_ring.release(stage)
    p = rounded(s * s * (1 / 4096), v_ring.tile(stage), acc)
    for _ in range(1, blocks):
        before = stage
        stage = stage.next()
        # write: issue S of this stage, then P V of `before`; take S, square it; take acc; round P
        k_ring.wait(stage)
        s_token = multiply_qk(q_tile, k_ring.tile(stage))
        v_ring.wait(before)
        acc_token = multiply_pv(p, v_ring.tile(before), acc)
        s = warpgroup_mma_wait(1, deps=[s_token])
        k_ring.release(stage)
        squares = s * s * (1 / 4096)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        v_ring.release(before)
        p = rounded(squares, v_ring.tile(stage), acc)
        # end
    v_ring.wait(stage)
    acc = warpgroup_mma_wait(0, deps=[multiply_pv(p, v_ring.tile(stage), acc)])
    v_ring.release(stage)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(o + row[:, None] * 64 + column[None, :], acc)


@gluon.jit
def overlap_kernel(q, k, v, o, blocks):
    """Make the rings, and start both."""
    q_ring = make_pipeline(q, 1, 1)
    k_ring = make_pipeline(k, 2, 1)
    v_ring = make_pipeline(v, 2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o, q_ring, k_ring, v_ring, blocks)),
            (produce, (q, k, v, q_ring, k_ring, v_ring, blocks)),
        ],
        [1],
        [24],
    )


def overlap(q, k, v):
    """The sum of (S * S) @ V for q (64, 64), k and v (blocks * 64, 64), fp16, in fp32."""
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    boxes = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout) for x in (q, k, v)
    ]
    o = torch.empty(64, 64)
    overlap_kernel[(1,)](*boxes, o, k.shape[0] // 64, num_warps=4)
    return o


# ---- check ----
HINTS = (
    "s_token = multiply_qk(q_tile, k_ring.tile(stage)) and acc_token = multiply_pv(p, "
    "v_ring.tile(before), acc) issue a product each, once the slots are full.",
    "s = warpgroup_mma_wait(1, deps=[s_token]): products end in the order in which they were "
    "issued, so with one left in flight S is there and P V may still run.",
    "A slot can be released when the product that reads it is done: K's after the first wait, the "
    "V of `before` after acc = warpgroup_mma_wait(0, deps=[acc_token]). P is an operand of P V, so "
    "p = rounded(squares, v_ring.tile(stage), acc) comes last.",
)
RESULTS = ("o",)


def cases():
    """Inputs by what is special about them."""
    return {
        f"{n} blocks": (
            torch.randn(64, 64).half(),
            torch.randn(n * 64, 64).half(),
            torch.randn(n * 64, 64).half(),
        )
        for n in (1, 2, 5)
    }


def review(events, q, k, v):
    """Two products have to be in flight once in each round of the loop."""
    blocks, flying, both = k.shape[0] // 64, 0, 0
    for _, what in events:
        flying += {"product": 1, "done": -1}.get(what, 0)
        both += what == "product" and flying == 2
    assert both >= blocks - 1, (
        f"the result is right, but two products are in flight {both} times in {blocks - 1} rounds "
        "of the loop."
    )
