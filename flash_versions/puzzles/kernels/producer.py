"""A producer warp for two consumers: o = a @ b on the tensor cores of Hopper.

A warpgroup, four warps, multiplies 64 rows at a time (WGMMA), with both tiles in shared memory. Two
consumers have 64 rows each of a tile of 128, and share what the producer loads:

    producer      a0 b0   a1 b1   ...       one slot has a tile of a (128, 64) and of b (64, 64)
    consumer 0    acc += a[:64] @ b         both read b: a slot is empty
    consumer 1    acc += a[64:] @ b         when BOTH have arrived

The products run on their own. warpgroup_mma(..., is_async=True) starts one, and only after
warpgroup_mma_wait(0, deps=[acc]) is acc there and are the tiles free.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.versions.tiles.triton_compat import load_tile
from flash_versions.versions.tiles.wgmma import accumulator_layout


def spec(a, b):
    """What is wanted, in PyTorch."""
    kind = torch.promote_types(a.dtype, torch.float32)
    return a.to(kind) @ b.to(kind)


@gluon.jit
def produce(a, b, a_slots, b_slots, full, empty, steps):
    """Load a tile of a and one of b for each step."""
    for i in range(steps):
        slot = i % 2
        # write: as in the ring; one `full` for both tiles
        mbarrier.wait(empty.index(slot), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(slot), a.block_type.nbytes + b.block_type.nbytes)
        load_tile(a, [0, i * 64], full.index(slot), a_slots.index(slot))
        load_tile(b, [i * 64, 0], full.index(slot), b_slots.index(slot))
        # end


@gluon.jit
def consume(o, a_slots, b_slots, full, empty, steps, CONSUMER: gl.constexpr):
    """Multiply 64 rows, and store them to o (128, 64)."""
    layout: gl.constexpr = accumulator_layout(64)
    acc = gl.zeros([64, 64], gl.float32, layout)
    for i in range(steps):
        slot = i % 2
        a_tile = a_slots.index(slot).slice(CONSUMER * 64, 64)
        # write: wait for `full`, multiply a_tile and the slot of b into acc, wait, arrive
        mbarrier.wait(full.index(slot), i // 2 & 1)
        acc = warpgroup_mma(a_tile, b_slots.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
        # end
    row = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(o + row[:, None] * 64 + column[None, :], acc)


@gluon.jit
def producer_kernel(a, b, o, steps):
    """Make the ring, and start all three."""
    a_slots = gl.allocate_shared_memory(a.dtype, [2] + a.block_type.shape, a.layout)
    b_slots = gl.allocate_shared_memory(b.dtype, [2] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        # write: mbarrier.init both barriers of the slot with the arrivals that they count
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
        # end
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o, a_slots, b_slots, full, empty, steps, 0)),
            (consume, (o, a_slots, b_slots, full, empty, steps, 1)),
            (produce, (a, b, a_slots, b_slots, full, empty, steps)),
        ],
        [4, 1],
        [240, 24],
    )


def producer(a, b):
    """a (128, K) @ b (K, 64), fp16, in fp32; K is a multiple of 64."""
    boxes = []
    for x, rows in ((a, 128), (b, 64)):
        layout = gl.NVMMASharedLayout.get_default_for([rows, 64], gl.float16)
        boxes.append(TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 64], layout))
    o = torch.empty(128, 64)
    producer_kernel[(1,)](*boxes, o, a.shape[1] // 64, num_warps=4)
    return o


# ---- check ----
HINTS = (
    "mbarrier.expect takes the bytes of both tiles, a.block_type.nbytes + b.block_type.nbytes. "
    "`full` still counts one arrival, that of `expect`; `empty` counts the two consumers.",
    "The boxes begin at [0, i * 64] in a and at [i * 64, 0] in b.",
    "acc = warpgroup_mma(a_tile, b_slots.index(slot), acc, is_async=True); acc = "
    "warpgroup_mma_wait(0, deps=[acc]); and only then mbarrier.arrive(empty.index(slot), count=1).",
)
RESULTS = ("o",)


def cases():
    """Inputs by what is special about them."""
    return {
        f"{n} steps": (torch.randn(128, n * 64).half(), torch.randn(n * 64, 64).half())
        for n in (1, 2, 5)
    }
