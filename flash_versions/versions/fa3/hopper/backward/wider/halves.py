"""FA3's backward for Hopper above head_dim 128, with 128 keys for 160 dims: blocks by halves.

Also for 192 dims of q and k with 128 of v, and whatever else has 320 dims of both or fewer.

Beside 64 keys a step reads as much of Q and dO, and adds as much to dQ, as beside 128, and P and dS
pass through shared memory: for 192 dims and 128 of v, two tiles of 64 keys would move 176 KB for a
block of 64 queries through L2. Here, as in `kernel.py`, each of two consumers has 64 keys with all
dims of dK and dV, P and dS are left operands in registers, and a third warpgroup computes dQ. dK
and dV then take 160 registers of a thread. What makes room for the rest:

* Halves. S, dP and what comes of them are computed for 32 queries of a block at a time.
* No producer. Registers are given to whole warpgroups: a producer's 24 are the consumers' if the
  warpgroup of dQ, `accumulate_and_load`, also loads Q and dO. It loads a block when its slot is
  free, which is soon after the dS that it waits for anyway, so no load is late.
* dQ in boxes of 32 dims: that warpgroup has 56 registers.

One step, for block j:

    consumers   [S_j.0] .. [dP dV dK S of half 0 -> 1] .. [dP dV dK of half 1, S of j+1, half 0]
      compute          P                              dS                                      P
    accumulate  dQ_j-1 = dS K, 32 dims at a time, each added to memory; between, Q and dO to come

    waits           for                                             at
    consumer        the copy has landed                             k.full v.full q.full do.full
    accumulate      its copy of K has landed                        k.full
    consumer        `accumulate_and_load` has read dS_j-2           ds.empty
    accumulate      both have written their part of dS_j            ds.full
    accumulate      both have read the slot of Q and dO of block j  q.empty
    all             their own products                              warpgroup_mma_wait
    accumulate      what its tile of dQ had before has left         tma.store_wait
    consumer        both have read the slot that dK, dV leave by    q.empty
    accumulate      with turns: tiles behind have added to block j  turns.advance

Why none waits for ever: between its dS_j and giving back the slot of block j, a consumer waits for
its own products and for Q of j+1, requested before dQ_j, as Q has at least two slots.

Cost. Per block of 64 queries and 128 keys, with 192 dims and 128 of v, 3328 cycles of the tensor
cores and 4928 of shared memory, where two tiles of `wide.py`, padded, take 4096 and 7680; 88 KB
pass through L2. Products with 32 columns take shared memory 1.5 times as long as the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from flash_versions.versions.fa3.hopper.backward.tiles import (
    add_dq,
    load_do,
    load_q,
    multiply_dq,
    part_of_dims,
    store_panels,
)
from flash_versions.versions.fa3.hopper.backward.wider.fold import first_sums, fold_by_halves
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, unknown_zero


@gluon.jit
def consume_halves(problem, buffers, dk_out, dv_out, parts, CONSUMER: gl.constexpr):
    """A consumer: dK and dV of 64 keys."""
    tile = problem.own(problem.turns.number())
    problem, first, kv_head, sequence, begin, end, heads, divided = tile
    key = first + CONSUMER * WARPGROUP_ROWS
    _, full_begin, full_end, _ = problem.blocks(key, WARPGROUP_ROWS)
    steps = heads * (end - begin)
    sums = first_sums(problem, buffers, begin < end, CONSUMER)
    stage, ds_stage = buffers.q.at(0, 0), buffers.ds.at(0, 0)
    head = kv_head * problem.GROUP
    block = begin
    for step in range(steps):
        masked = (block < full_begin) | (block >= full_end)
        mine = problem.of_head(head)
        query = block * problem.BLOCK_Q
        more = step + 1 < steps
        tiles = buffers.q.tile(stage), buffers.do.tile(stage), buffers.ds.tile(ds_stage)
        sums = fold_by_halves(
            sums, mine, buffers, (stage, stage, ds_stage), tiles, query, key, masked, more, False,
            CONSUMER
        )  # fmt: skip
        stage, ds_stage = stage.next(), ds_stage.next()
        head, block = problem.after(head, block, begin, end)
    free = stage
    if CONSUMER == 1:
        free = free.next()
    dk, dv, _ = sums
    dk, dv, stores = parts.combine(problem, dk, dv, first, kv_head, divided, CONSUMER)
    buffers.q.wait_empty(free)  # and so is the slot of dO
    if stores:
        corner = problem.kv_box(sequence, kv_head, key)
        box = free.slot * (problem.BLOCK_Q // WARPGROUP_ROWS)
        store_panels(dv, buffers.do, box, dv_out, corner)
        store_panels(dk.scaled(problem.scale), buffers.q, box, dk_out, corner)
    tma.store_wait(0)


@gluon.jit
def load(problem, buffers, inputs, stage, place, step, begin, end):
    """Load Q and dO of a step into an empty slot, and K and V with the first."""
    sequence, kv_head, key = place
    where = problem.block_at(sequence, kv_head, step, begin, end)
    if step == 0:
        buffers.k.fill(buffers.k.at(0, 0), inputs.k, problem.kv_box(sequence, kv_head, key))
    load_q(buffers, inputs.q, inputs.values, stage, where)
    if step == 0:
        buffers.v.fill(buffers.v.at(0, 0), inputs.v, problem.kv_box(sequence, kv_head, key))
    load_do(buffers, inputs.do, inputs.values, stage, where)


@gluon.jit
def accumulate_and_load(problem, buffers, inputs, dq_tiles, dq_sum):
    """The warpgroup of dQ, and the producer: of each block, dQ = dS K, some dims at a time."""
    WIDTH: gl.constexpr = dq_sum.first.block_type.shape[3]
    problem, key, kv_head, sequence, begin, end, heads, _ = problem.own(problem.turns.number())
    place = sequence, kv_head, key
    steps = heads * (end - begin)
    stage = buffers.q.at(0, 0)
    for step in range(gl.minimum(buffers.q.STAGES, steps)):
        load(problem, buffers, inputs, stage, place, step, begin, end)
        stage = stage.next()
    ds_stage = buffers.ds.at(0, 0)
    counter, additions = problem.turns.counters, gl.to_tensor(0)  # of the block before
    head = kv_head * problem.GROUP
    block = begin
    buffers.k.wait(buffers.k.at(0, 0), begin < end)
    for step in range(steps):
        buffers.ds.wait(ds_stage)
        ds_tile = buffers.ds.tile(ds_stage)
        k_tile = buffers.k.tile(buffers.k.at(unknown_zero(), 0))
        DIM_PARTS: gl.constexpr = k_tile.width() // WIDTH
        for part in gl.static_range(DIM_PARTS):
            dq_token = multiply_dq(ds_tile, part_of_dims(k_tile, part, WIDTH))
            if part == 0:
                counter, additions = problem.take_turn(
                    counter, additions, sequence, head, key, block
                )
            if part == 2:
                coming = step + buffers.q.STAGES
                if coming < steps:
                    buffers.q.wait_empty(stage)  # and so is the slot of dO
                    load(problem, buffers, inputs, stage, place, coming, begin, end)
                    stage = stage.next()
            dq = warpgroup_mma_wait(0, deps=[dq_token])
            if part == DIM_PARTS - 1:
                buffers.ds.release(ds_stage)
            row = problem.padded_first + block * problem.BLOCK_Q
            corner = [sequence, head, row, part * WIDTH]
            slot = part % 2
            if DIM_PARTS % 2 == 1:  # the slots change their parts from block to block
                slot = ds_stage.slot ^ (part % 2)
            add_dq(dq, dq_tiles.first.index(slot), dq_sum.first, corner)
        ds_stage = ds_stage.next()
        head, block = problem.after(head, block, begin, end)
    problem.turns.finish(counter, additions)
    tma.store_wait(0)
