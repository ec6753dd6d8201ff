"""FA3's backward for Hopper with 128 keys for 192 dims of q, k and v: two warpgroups do it all.

Also for other dims with at most 384 of q and v together, such as 256 and 128 of v.

Beside 64 keys (`wide.py`) a step adds as much to dQ, and reads as much of Q and dO, as
beside 128: with tiles of 64 keys, 96 KB of dQ for 64 queries and 128 keys, which memory, not an SM,
limits. But dK and dV of 128 keys and 192 dims take three quarters of an SM's registers: 192 of a
thread in each of two consumers, which leaves nothing for a third warpgroup. Here both have all
registers that a thread can have, 255, and do everything. As in `halves.py`, a consumer has 64 keys
with all dims, P and dS are left operands in registers, and scores are computed for 32 queries at a
time. Each adds half of the dims of dQ, 32 at a time, and the second one also loads.

One step, for block j:

    products    [S_j.0] .. [dP dV dK S of half 0 -> 1] .. [dP dV dK, S of j+1, half 0] .. [dQ] x3
    compute              P                         dS   P                         dS       add dQ

    waits           for                                             at
    both            the copy has landed                             k.full v.full q.full do.full
    both            both have multiplied by dS_j-1                  ds.empty
    both            both have written their part of dS_j            ds.full
    the second      both have read the slot of Q, of dO             q.empty do.empty
    both            their own products                              warpgroup_mma_wait
    both            what their tile of dQ had before has left       tma.store_wait
    both            both have read what dK and dV leave by          q.empty
    both            with turns: tiles behind have added to block j  turns.advance

Why none waits for ever: a consumer writes its dS_j and gives the slots of block j back before it
waits for the other one's dS_j, and loads for later blocks come behind that.

Cost. Per block of 64 queries and 128 keys with 192 dims, 3840 cycles of the tensor cores and 5504
of shared memory, where two tiles of `wide.py`, padded, take 5120 and 8960; 96 KB pass through L2,
where tiles of 64 keys would move 192.
Products with 32 columns take shared memory 1.5 times as long as the tensor cores.
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
from flash_versions.versions.tiles.pipeline import Stage
from flash_versions.versions.tiles.triton_compat import aggregate, replaced
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, unknown_zero


@aggregate
class PairState:
    """What a consumer takes from step to step, beside its sums."""

    q_stage: Stage
    do_stage: Stage
    ds_stage: Stage
    counter: gl.tensor  # of the block before, if tiles have turns
    additions: gl.tensor


@gluon.jit
def load_step(problem, buffers, inputs, stage, place, step, begin, end, OF_Q: gl.constexpr):
    """Load Q or dO of a step when its slot is empty: the next stage."""
    sequence, kv_head, _ = place
    where = problem.block_at(sequence, kv_head, step, begin, end)
    if OF_Q:
        buffers.q.wait_empty(stage)
        load_q(buffers, inputs.q, inputs.values, stage, where)
    else:
        buffers.do.wait_empty(stage)
        load_do(buffers, inputs.do, inputs.values, stage, where)
    return stage.next()


@gluon.jit
def anew(stage):
    """A stage whose tile is addressed anew, see `unknown_zero`."""
    return Stage(stage.slot + unknown_zero(), stage.phase, stage.STAGES)


@gluon.jit
def add_own_dq(
    state, problem, buffers, inputs, loads, dq_out, place, head, block, step, CONSUMER: gl.constexpr
):
    """Add a consumer's parts of the dims of a block's dQ = dS K, every second one, and load for
    steps to come.
    """
    dq_tiles, dq_sum = dq_out
    WIDTH: gl.constexpr = dq_sum.first.block_type.shape[3]
    ds_stage, counter, additions = state.ds_stage, state.counter, state.additions
    next_q, next_do, begin, end, steps = loads
    sequence, _, key = place
    buffers.ds.wait(ds_stage)
    k_tile = buffers.k.tile(buffers.k.at(unknown_zero(), 0))
    DIM_PARTS: gl.constexpr = k_tile.width() // WIDTH
    MINE: gl.constexpr = (DIM_PARTS + 1 - CONSUMER) // 2
    for i in gl.static_range(MINE):
        ds_tile = buffers.ds.tile(anew(ds_stage))
        dq_token = multiply_dq(ds_tile, part_of_dims(k_tile, 2 * i + CONSUMER, WIDTH))
        if i == 0:
            counter, additions = problem.take_turn(counter, additions, sequence, head, key, block)
        if CONSUMER == 1 and i == 0:
            coming = step + buffers.do.STAGES
            if coming < steps:
                next_do = load_step(
                    problem, buffers, inputs, next_do, place, coming, begin, end, False
                )
        dq = warpgroup_mma_wait(0, deps=[dq_token])
        if i == MINE - 1:
            buffers.ds.release(ds_stage)
        row = problem.padded_first + block * problem.BLOCK_Q
        corner = [sequence, head, row, (2 * i + CONSUMER) * WIDTH]
        slot = 2 * CONSUMER + i % 2
        if MINE % 2 == 1:  # the tiles change their parts from block to block
            slot = 2 * CONSUMER + (ds_stage.phase ^ (i % 2))
        add_dq(dq, dq_tiles.first.index(slot), dq_sum.first, corner)
    if CONSUMER == 1:
        coming = step + buffers.q.STAGES
        if coming < steps:
            next_q = load_step(problem, buffers, inputs, next_q, place, coming, begin, end, True)
    state = replaced(state, ds_stage=ds_stage.next(), counter=counter, additions=additions)
    return state, next_q, next_do


@gluon.jit
def consume_pair(problem, buffers, inputs, dq_out, dk_out, dv_out, parts, CONSUMER: gl.constexpr):
    """A consumer: dK and dV of 64 keys, and half of the dims of dQ of all 128."""
    tile = problem.own(problem.turns.number())
    problem, first, kv_head, sequence, begin, end, heads, divided = tile
    place = sequence, kv_head, first
    steps = heads * (end - begin)
    next_q, next_do = buffers.q.at(0, 0), buffers.do.at(0, 0)
    if CONSUMER == 1:
        if begin < end:
            corner = problem.kv_box(sequence, kv_head, first)
            buffers.k.fill(buffers.k.at(0, 0), inputs.k, corner)
            buffers.v.fill(buffers.v.at(0, 0), inputs.v, corner)
        for step in range(gl.minimum(buffers.q.STAGES, steps)):
            next_q = load_step(problem, buffers, inputs, next_q, place, step, begin, end, True)
        for step in range(gl.minimum(buffers.do.STAGES, steps)):
            next_do = load_step(problem, buffers, inputs, next_do, place, step, begin, end, False)
    key = first + CONSUMER * WARPGROUP_ROWS
    _, full_begin, full_end, _ = problem.blocks(key, WARPGROUP_ROWS)
    sums = first_sums(problem, buffers, begin < end, CONSUMER)
    state = PairState(
        buffers.q.at(0, 0), buffers.do.at(0, 0), buffers.ds.at(0, 0), problem.turns.counters,
        gl.to_tensor(0)
    )  # fmt: skip
    head = kv_head * problem.GROUP
    block = begin
    for step in range(steps):
        masked = (block < full_begin) | (block >= full_end)
        mine = problem.of_head(head)
        query = block * problem.BLOCK_Q
        more = step + 1 < steps
        q_stage, do_stage, ds_stage = state.q_stage, state.do_stage, state.ds_stage
        q_tile = buffers.q.tile(q_stage)
        tiles = q_tile, buffers.do.tile(anew(do_stage)), buffers.ds.tile(anew(ds_stage))
        sums = fold_by_halves(
            sums, mine, buffers, (q_stage, do_stage, ds_stage), tiles, query, key, masked,
            more, True, CONSUMER
        )  # fmt: skip
        state = replaced(state, q_stage=q_stage.next(), do_stage=do_stage.next())
        loads = next_q, next_do, begin, end, steps
        state, next_q, next_do = add_own_dq(
            state, problem, buffers, inputs, loads, dq_out, place, head, block, step, CONSUMER
        )
        head, block = problem.after(head, block, begin, end)
    problem.turns.finish(state.counter, state.additions)
    free = state.q_stage
    # Empty slots of Q mean that both consumers finished dK, so also dP, the last reader of V.
    for _ in gl.static_range(buffers.q.STAGES):
        buffers.q.wait_empty(free)
        free = free.next()
    dk, dv, _ = sums
    dk, dv, stores = parts.combine(problem, dk, dv, first, kv_head, divided, CONSUMER)
    if stores:
        corner = problem.kv_box(sequence, kv_head, key)
        store_panels(dv, buffers.v, CONSUMER, dv_out, corner)
        box = CONSUMER * (problem.BLOCK_Q // WARPGROUP_ROWS)
        store_panels(dk.scaled(problem.scale), buffers.q, box, dk_out, corner)
    tma.store_wait(0)
