"""dQ in FA3's backward for Hopper: a warpgroup that computes it, and warps that have it added.

    accumulate    computes dQ = dS K of each block, as many dims at a time as a box of dQ has
    adder         has TMA add these parts to what other tiles of keys have added

Between them are two slots, each for a whole block. So the warpgroup goes on to the next block while
an adder waits for its turn (`deterministic.py`).

In turns there are two adders, each for every second block. An adder counts a block when all of it
is in memory, which at head_dim 64 takes longer than a step. Meanwhile the other one adds the next
block. In any order one adder is enough.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flash_versions.versions.fa3.hopper.backward.tiles import (
    DS_FULL,
    DS_THREADS,
    exchanged,
    multiply_dq,
    part_of_dims,
)
from flash_versions.versions.fa3.hopper.panels import Tiles, make_tiles
from flash_versions.versions.tiles.pipeline import Stage, as_matrix, make_barriers, meet
from flash_versions.versions.tiles.triton_compat import add_tile, aggregate
from flash_versions.versions.tiles.wgmma import unknown_zero

SLOTS = gl.constexpr(2)  # in turns, one for each adder


@aggregate
class Addends:
    """The dQ of blocks on its way to memory: SLOTS slots of PARTS boxes, with barriers of each."""

    tiles: Tiles
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    PARTS: gl.constexpr

    @gluon.jit
    def at(self, slot):
        """The first stage of a slot."""
        return Stage(gl.to_tensor(slot), gl.to_tensor(0), SLOTS)

    @gluon.jit
    def tile(self, stage, PART: gl.constexpr):
        """The box of a part; of two panels, each is a part."""
        OF_PANEL: gl.constexpr = self.PARTS // self.tiles.PANELS
        return self.tiles.panel(PART).index(stage.slot * OF_PANEL + PART % OF_PANEL)

    @gluon.jit
    def leave(self, stage, dq, PART: gl.constexpr):
        """Leave a part for an adder, when TMA has read what was in its place."""
        dq = exchanged(dq)
        number = stage.slot * self.PARTS + PART
        mbarrier.wait(self.empty.index(number), stage.phase ^ 1)
        as_matrix(self.tile(stage, PART)).store(dq)
        fence_async_shared()
        mbarrier.arrive(self.full.index(number), count=1)

    @gluon.jit
    def add(self, stage, desc, corner, PART: gl.constexpr):
        """Adder: when a part is there, have TMA add it to the box at a corner."""
        mbarrier.wait(self.full.index(stage.slot * self.PARTS + PART), stage.phase)
        add_tile(desc, corner, self.tile(stage, PART))

    @gluon.jit
    def release(self, stage):
        """Adder: give the slot's parts back, each when TMA has read it."""
        for part in gl.static_range(self.PARTS):
            tma.store_wait(self.PARTS - 1 - part)
            mbarrier.arrive(self.empty.index(stage.slot * self.PARTS + part), count=1)


@gluon.jit
def make_addends(dq_sum, WIDTH: gl.constexpr):
    """Allocate slots for a dQ of so many dims, in boxes of `dq_sum`."""
    PARTS: gl.constexpr = dq_sum.PANELS * WIDTH // dq_sum.width()
    return Addends(
        make_tiles(dq_sum, SLOTS * PARTS // dq_sum.PANELS),
        make_barriers(SLOTS * PARTS, 1),
        make_barriers(SLOTS * PARTS, 1),
        PARTS,
    )


@gluon.jit
def multiply_part(ds_tile, k_tile, dq_sum, PART: gl.constexpr):
    """Issue a part of dQ = dS K, of the dims that a box of `dq_sum` has: a token to wait for."""
    if dq_sum.PANELS == 2:
        return multiply_dq(ds_tile, k_tile.panel(PART))
    else:
        return multiply_dq(ds_tile, part_of_dims(k_tile, PART, dq_sum.first.block_type.shape[3]))


@gluon.jit
def accumulate(problem, buffers, scheduler, addends, dq_sum):
    """The warpgroup of dQ. If the second panel has 16 dims, registers suffice for both products at
    once: the first one is stored while the second one is computed.
    """
    PARTS: gl.constexpr = addends.PARTS
    AHEAD: gl.constexpr = dq_sum.PANELS == 2 and dq_sum.second.block_type.shape[3] == 16
    tile, round = problem.turns.number(), 0
    ds_stage, kv_stage, stage = buffers.ds.at(0, 0), buffers.k.at(0, 0), addends.at(0)
    while tile < scheduler.number:
        mine, key, kv_head, sequence, begin, end, heads, divided = problem.own(tile)
        # K of a tile without steps may be gone by now: consumers give it back without waiting.
        buffers.k.wait(kv_stage, begin < end)
        for _ in range(heads * (end - begin)):
            meet(DS_FULL + ds_stage.slot, DS_THREADS)
            ds_tile = buffers.ds.tile(ds_stage)
            k_tile = buffers.k.tile(buffers.k.at(kv_stage.slot + unknown_zero(), 0))
            dq_token = multiply_part(ds_tile, k_tile, dq_sum, 0)
            if AHEAD:
                ahead_token = multiply_part(ds_tile, k_tile, dq_sum, 1)
            for part in gl.static_range(PARTS):
                if part > 0:
                    if AHEAD:
                        dq_token = ahead_token
                    else:
                        dq_token = multiply_part(ds_tile, k_tile, dq_sum, part)
                dq = warpgroup_mma_wait(1 if AHEAD and part == 0 else 0, deps=[dq_token])
                if part == PARTS - 1:
                    buffers.ds.release(ds_stage)
                addends.leave(stage, dq, part)
            ds_stage = ds_stage.next()
            stage = stage.next()
        kv_stage = kv_stage.next()
        tile = scheduler.receive(round)
        round += 1


@gluon.jit
def add(problem, scheduler, addends, dq_sum, ADDER: gl.constexpr):
    """An adder: the first one, or the second one, which has work only in turns."""
    ADDERS: gl.constexpr = 2 if problem.turns.ON else 1
    if ADDER < ADDERS:
        WIDTH: gl.constexpr = dq_sum.first.block_type.shape[3]
        tile, round, first = problem.turns.number(), 0, gl.to_tensor(ADDER)
        stage = addends.at(ADDER)
        while tile < scheduler.number:
            mine, key, kv_head, sequence, begin, end, heads, divided = problem.own(tile)
            counter, additions = mine.turns.counters, gl.to_tensor(0)  # of its block before
            steps = heads * (end - begin)
            for step in range(first, steps, ADDERS):
                head, block = mine.at_step(kv_head, step, begin, end)
                counter, additions = mine.take_turn(counter, additions, sequence, head, key, block)
                row = mine.padded_first + block * mine.BLOCK_Q
                for part in gl.static_range(addends.PARTS):
                    corner = [sequence, head, row, part * WIDTH]
                    addends.add(stage, dq_sum.panel(part), corner, part)
                addends.release(stage)
                for _ in gl.static_range(ADDERS):
                    stage = stage.next()
            mine.turns.finish(counter, additions)
            first = (first + steps) % ADDERS  # this adder's first step in the next tile
            tile = scheduler.receive(round)
            round += 1
