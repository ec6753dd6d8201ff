"""Products in flight on Hopper: slots that are filled while one reads them, and accumulators that
the next one adds to.
"""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.simulator.checking import Watch
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.versions.tiles.pipeline import make_barriers
from flash_versions.versions.tiles.triton_compat import load_tile, store_tile
from flash_versions.versions.tiles.wgmma import accumulator_layout
from tests.simulator.gluon.orders import by_order


@gluon.jit
def produce(a, b, a_tiles, b_tiles, full, empty, steps):
    for i in range(steps):
        mbarrier.wait(empty.index(i % 2), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(i % 2), a.block_type.nbytes + b.block_type.nbytes)
        load_tile(a, [0, i * 64], full.index(i % 2), a_tiles.index(i % 2))
        load_tile(b, [i * 64, 0], full.index(i % 2), b_tiles.index(i % 2))


@gluon.jit
def consume(o, a_tiles, b_tiles, full, empty, steps, RELEASE: gl.constexpr):
    layout: gl.constexpr = accumulator_layout(64)
    acc = gl.zeros([64, 64], gl.float32, layout)
    for i in range(steps):
        mbarrier.wait(full.index(i % 2), i // 2 & 1)
        a_tile, b_tile = a_tiles.index(i % 2), b_tiles.index(i % 2)
        token = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
        if RELEASE == "early":
            mbarrier.arrive(empty.index(i % 2), count=1)
        acc = warpgroup_mma_wait(0, deps=[token])
        if RELEASE == "unused":  # of a product that nobody uses, the tiles may change
            again = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
            mbarrier.arrive(empty.index(i % 2), count=1)
            warpgroup_mma_wait(0, deps=[again])
        if RELEASE == "late":
            mbarrier.arrive(empty.index(i % 2), count=1)
    store(o, acc, layout)


@gluon.jit
def store(o, acc, layout: gl.constexpr):
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(o + row[:, None] * 64 + column[None, :], acc)


@gluon.jit
def kernel(a, b, o, steps, RELEASE: gl.constexpr):
    a_tiles = gl.allocate_shared_memory(a.dtype, [2] + a.block_type.shape, a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [2] + b.block_type.shape, b.layout)
    full, empty = make_barriers(2, 1), make_barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o, a_tiles, b_tiles, full, empty, steps, RELEASE)),
            (produce, (a, b, a_tiles, b_tiles, full, empty, steps)),
        ],
        [1],
        [24],
    )


def boxes(*tensors):
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    return [TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 64], layout) for x in tensors]


def multiply(release):
    """(A B as the kernel computes it, A B)."""
    a, b, o = torch.randn(64, 512).half(), torch.randn(512, 64).half(), torch.empty(64, 64)
    kernel[(1,)](*boxes(a, b), o, 8, release, num_warps=4)
    return o, a.float() @ b.float()


@by_order
@pytest.mark.parametrize("release", ["late", "unused"])
def test_a_ring_that_is_right(release, order):
    torch.testing.assert_close(*multiply(release), rtol=1e-4, atol=1e-3)


@by_order
def test_a_slot_that_is_filled_while_a_product_reads_it(order):
    """Where accesses are watched, who releases it is told."""
    said = (
        r"slot \d of `[ab]_tiles` is filled by produce 1.* while a product of .*consume 0 that no "
        "warpgroup_mma_wait has waited for still reads it"
    )
    with pytest.raises(AccessError, match=said):
        multiply("early")
    with Watch({}).watching(), pytest.raises(AccessError, match="is released before it is read"):
        multiply("early")


@gluon.jit
def alone(a, o, HOW: gl.constexpr):
    """A product of a tile with itself, by one partition."""
    layout: gl.constexpr = accumulator_layout(64)
    full = make_barriers(1, 1)
    tile = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    mbarrier.expect(full.index(0), a.block_type.nbytes)
    load_tile(a, [0, 0], full.index(0), tile)
    mbarrier.wait(full.index(0), 0)
    acc = gl.zeros([64, 64], gl.float32, layout)
    token = warpgroup_mma(tile, tile, acc, is_async=True)
    if HOW == "in flight":
        acc = token + 1.0
    if HOW == "chain":
        token = warpgroup_mma_wait(1, deps=[warpgroup_mma(tile, tile, token, is_async=True)])
    if HOW == "store":
        tile.store(gl.zeros([64, 64], gl.float16, layout))
        fence_async_shared()
    acc = warpgroup_mma_wait(0, deps=[token])
    if HOW == "no fence":
        tile.store(acc.to(gl.float16))
        store_tile(a, [0, 0], tile)
    if HOW == "no fence behind a load":
        acc += tile.load(layout).to(gl.float32)
        mbarrier.expect(full.index(0), a.block_type.nbytes)
        load_tile(a, [0, 0], full.index(0), tile)
        mbarrier.wait(full.index(0), 1)
    if HOW == "no expect":
        load_tile(a, [0, 0], full.index(0), tile)
        tma.store_wait(0)
    if HOW == "another type":
        tile.store(acc)
    if HOW == "two arrivals":
        mbarrier.arrive(full.index(0), count=2)
    if HOW == "no phase":
        mbarrier.wait(full.index(0), 2)
    if HOW == "no slot":
        mbarrier.wait(full.index(1), 0)
    if HOW == "new barrier":
        fresh = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.wait(fresh.index(0), 1)
    if HOW == "outside":
        load_tile(a, [0, -64], full.index(0), tile)
    if HOW == "store in flight":
        store_tile(a, [0, 0], tile)
    if HOW == "product in flight":
        warpgroup_mma(tile, tile, acc, is_async=True)
    store(o, acc, layout)


def run_alone(how):
    a, o = torch.randn(64, 64).half(), torch.empty(64, 64)
    alone[(1,)](*boxes(a), o, how, num_warps=4)
    return o, a.float() @ a.float()


@by_order
def test_a_product_adds_to_one_that_is_in_flight(order):
    found, once = run_alone("chain")
    torch.testing.assert_close(found, 2 * once, rtol=1e-4, atol=1e-3)


FAULTS = {
    "in flight": "a product is read while it is in flight",
    "store": "`tile` is filled by kernel in alone:.* while a product of .*kernel",
    "no fence": "a TMA store reads `tile` without fence_async_shared",
    "no fence behind a load": "TMA fills `tile`, which was read without a fence",
    "no expect": "loads in flight",
    "another type": "a tile <.64, 64., fp32> is stored to a tile of another kind, fp16",
    "two arrivals": "more arrivals .*`full`",
    "no phase": "phases 0 and 1, and 2 is waited for",
    "no slot": "`full`.* 1",
    "new barrier": "`fresh` is used before mbarrier.init",
    "outside": "is asked for at .0, -64.",
    "store in flight": "ends with stores in flight",
    "product in flight": "ends with products in flight",
}


@pytest.mark.parametrize("how", FAULTS)
def test_what_is_refused(how):
    with pytest.raises((AccessError, CompileError), match=FAULTS[how]):
        run_alone(how)
