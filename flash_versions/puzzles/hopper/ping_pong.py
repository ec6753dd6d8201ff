"""Ping-pong: two warpgroups take turns at the tensor cores.

Each consumer multiplies, and then works on the result with other units. If both multiply at the
same time, both work on results at the same time, and the tensor cores wait. In turns, one
multiplies while the other works:

    consumer 0    [S0] work      [S1] work      [S2] work           [..] the tensor cores
    consumer 1         [S0] work      [S1] work      [S2] work

A named barrier orders them. named_barrier_sync(c) waits at the barrier of consumer c until the
other one calls named_barrier_arrive(1 - c, 2), which arrives at the barrier of the next consumer,
c. So a consumer waits for its turn, issues its product, and gives the turn away. Who gives consumer
0 its first turn?
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.versions.fa3.hopper.operands import multiply_qk
from flash_versions.versions.tiles.pipeline import (
    make_pipeline,
    named_barrier_arrive,
    named_barrier_sync,
)
from flash_versions.versions.tiles.wgmma import accumulator_layout


def spec(q, k):
    """What is wanted, in PyTorch: the sum of (Q K_i^T / 8)^2 over the blocks of 64 keys."""
    kind = torch.promote_types(q.dtype, torch.float32)
    s = q.to(kind) @ k.to(kind).T / 8
    return (s * s).unflatten(1, (-1, 64)).sum(1)


@gluon.jit
def produce(q, k, q_ring, k_ring, blocks):
    """Load the rows of Q of both consumers, and the blocks of K in turn."""
    q_ring.fill(q_ring.at(0, 0), q, [0, 0])
    q_ring.fill(q_ring.at(1, 0), q, [64, 0])
    stage = k_ring.at(0, 0)
    for i in range(blocks):
        k_ring.fill(stage, k, [i * 64, 0])
        stage = stage.next()


@gluon.jit
def consume(o, q_ring, k_ring, blocks, CONSUMER: gl.constexpr):
    """64 rows of o (128, 64)."""
    layout: gl.constexpr = accumulator_layout(64)
    total = gl.zeros([64, 64], gl.float32, layout)
    q_stage = q_ring.at(CONSUMER, 0)
    q_ring.wait(q_stage)
    q_tile = q_ring.tile(q_stage)
    stage = k_ring.at(0, 0)
    # write: the first turn
    if CONSUMER == 1:
        named_barrier_arrive(CONSUMER, 2)
    # end
    for _ in range(blocks):
        k_ring.wait(stage)
        # write: wait for your turn, issue the product, give the turn away
        named_barrier_sync(CONSUMER)
        s_token = multiply_qk(q_tile, k_ring.tile(stage))
        named_barrier_arrive(CONSUMER, 2)
        # end
        s = warpgroup_mma_wait(0, deps=[s_token])
        k_ring.release(stage)
        total += s * s * (1 / 64)
        stage = stage.next()
    row = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(o + row[:, None] * 64 + column[None, :], total)


@gluon.jit
def ping_pong_kernel(q, k, o, blocks):
    """Make the rings, and start all three."""
    q_ring = make_pipeline(q, 2, 1)
    k_ring = make_pipeline(k, 2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o, q_ring, k_ring, blocks, 0)),
            (consume, (o, q_ring, k_ring, blocks, 1)),
            (produce, (q, k, q_ring, k_ring, blocks)),
        ],
        [4, 1],
        [240, 24],
    )


def ping_pong(q, k):
    """The sum of squared scores for q (128, 64) and k (blocks * 64, 64), fp16, in fp32."""
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    boxes = [TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout) for x in (q, k)]
    o = torch.empty(128, 64)
    ping_pong_kernel[(1,)](*boxes, o, k.shape[0] // 64, num_warps=4)
    return o


# ---- check ----
HINTS = (
    "named_barrier_sync(CONSUMER) before the product, named_barrier_arrive(CONSUMER, 2) after it: "
    "s_token = multiply_qk(q_tile, k_ring.tile(stage)).",
    "Give the turn away as soon as the product is issued, before it is waited for.",
    "Consumer 1 arrives once before its loop, as if it had just had a turn: if CONSUMER == 1: "
    "named_barrier_arrive(CONSUMER, 2).",
)
RESULTS = ("o",)


def cases():
    """Inputs by what is special about them."""
    return {
        f"{n} blocks": (torch.randn(128, 64).half(), torch.randn(n * 64, 64).half()) for n in (1, 4)
    }


def review(events, q, k):
    """The consumers issue in turns, and give the turn away before their product is waited for."""
    turns = [who.rpartition(" ")[2] for who, what in events if what == "product"]
    order = " ".join(turns)
    assert turns == ["0", "1"] * (len(turns) // 2), (
        f"the result is right, but the products come from consumers {order}, not in turns."
    )
    for consumer in "01":
        own = [what for who, what in events if who.endswith(f"consume {consumer}")]
        first, rest = own.index("product"), turns[turns.index(consumer) + 1 :]
        releases = own.count("product")  # of blocks of K, which are arrivals, too
        late = own[first:].count("arrive") > releases
        given = "only when its product is done" if late else "never"
        assert not rest or "arrive" in own[first : own.index("done")], (
            f"consumer {consumer} gives its turn away {given}; after it has issued its product, it "
            "should arrive at the barrier of the other consumer, and then wait for the product."
        )
