"""A ring of two slots: one warp copies tiles, four others add them up, and neither waits in vain.

On Hopper a unit of its own, TMA, copies tiles to shared memory. It says when a tile has landed by a
barrier, `full`; the reader says by another, `empty`, that the slot may be written again.

    producer   wait empty[0]  load -> slot 0     wait empty[1]  load -> slot 1    wait empty[0] ...
    consumer          wait full[0]  read, fence, arrive at empty[0]   wait full[1]  read, ...

An mbarrier counts arrivals and bytes. When all have come, its phase ends: 0, then 1, then 0 again.
mbarrier.wait(b, phase) waits for the end of that phase. Of a new barrier phase 1 counts as ended,
so a producer that begins with phase 1 finds its slots empty.

A load to registers may still be on its way when the next line runs, and TMA reaches shared memory
another way, a proxy of its own. With fence_async_shared(), loads come before what TMA does next.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.versions.tiles.triton_compat import load_tile


def spec(x):
    """What is wanted, in PyTorch: the sum of the tiles of x (tiles * 64, 64)."""
    return x.unflatten(0, (-1, 64)).to(torch.promote_types(x.dtype, torch.float32)).sum(0)


@gluon.jit
def produce(x, slots, full, empty, tiles):
    """One warp: load tile after tile; x is a descriptor of boxes of 64 x 64."""
    for i in range(tiles):
        slot = i % 2
        # write: wait for `empty`, mbarrier.expect the bytes at `full`, start the load
        mbarrier.wait(empty.index(slot), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(slot), x.block_type.nbytes)
        load_tile(x, [i * 64, 0], full.index(slot), slots.index(slot))
        # end


@gluon.jit
def consume(y, slots, full, empty, tiles):
    """Four warps: add up the tiles, and store the sum to y (64, 64)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([64, 64], gl.float32, layout)
    for i in range(tiles):
        slot = i % 2
        # write: wait for `full`, add slots.index(slot).load(layout), fence, arrive at `empty`
        mbarrier.wait(full.index(slot), i // 2 & 1)
        total += slots.index(slot).load(layout).to(gl.float32)
        fence_async_shared()
        mbarrier.arrive(empty.index(slot), count=1)
        # end
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(y + row[:, None] * 64 + column[None, :], total)


@gluon.jit
def ring_kernel(x, y, tiles):
    """Make the ring, and start both."""
    slots = gl.allocate_shared_memory(x.dtype, [2] + x.block_type.shape, x.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(consume, (y, slots, full, empty, tiles)), (produce, (x, slots, full, empty, tiles))],
        [1],
        [24],
    )


def ring(x):
    """The sum of the tiles of x (tiles * 64, 64), fp16, in fp32."""
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    boxes = TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout)
    y = torch.empty(64, 64)
    ring_kernel[(1,)](boxes, y, x.shape[0] // 64, num_warps=4)
    return y


# ---- check ----
HINTS = (
    "Slot i % 2 is used for the (i // 2)th time, so the phases of its barriers are i // 2 & 1: the "
    "consumer waits for that phase of `full`, the producer for the other one of `empty`.",
    "mbarrier.expect(full.index(slot), x.block_type.nbytes) counts as the one arrival; the phase "
    "ends when the bytes have landed, too. Then load_tile(x, [i * 64, 0], full.index(slot), "
    "slots.index(slot)).",
    "The consumer reads first and arrives after that: mbarrier.wait(full.index(slot), i // 2 & 1), "
    "the load, fence_async_shared(), mbarrier.arrive(empty.index(slot), count=1).",
)
RESULTS = ("y",)


def cases():
    """Inputs by what is special about them."""
    return {f"{n} tiles": (torch.randn(n * 64, 64).half(),) for n in (1, 2, 5)}
