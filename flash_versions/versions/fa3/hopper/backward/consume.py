"""A consumer of FA3's backward for Hopper: dK and dV of 64 keys.

`fold_queries` is a step, in the order in which it is issued. `kernel.py` draws it beside the other
warps, and says which warps wait for which.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from flash_versions.versions.fa3.hopper.backward.tiles import (
    ALL_READ,
    CONSUMER_THREADS,
    DS_FULL,
    DS_THREADS,
    Q_EMPTY,
    Q_THREADS,
    consumer_half,
    hold,
    multiply_into,
    multiply_rows,
    narrowed,
    row_values,
    store_panels,
    widened,
)
from flash_versions.versions.fa3.hopper.panels import Output, zero_output
from flash_versions.versions.tiles.pipeline import (
    Stage,
    announce,
    meet,
    named_barrier_arrive,
    named_barrier_sync,
)
from flash_versions.versions.tiles.triton_compat import aggregate
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout


@aggregate
class State:
    """What a consumer takes from step to step."""

    dk: Output
    dv: Output
    s: gl.tensor  # if EARLY, S of the next step; else 0
    stage: Stage  # of the next Q and dO
    ds_stage: Stage


@gluon.jit
def hand_over(buffers, ds, ds_stage, CONSUMER: gl.constexpr):
    """Leave a consumer's dS for the warpgroup of dQ."""
    ds_tile = buffers.ds.tile(ds_stage)
    ds_tile.slice(CONSUMER * WARPGROUP_ROWS, WARPGROUP_ROWS, dim=0).store(ds)
    fence_async_shared()
    announce(DS_FULL + ds_stage.slot, DS_THREADS)


@gluon.jit
def fold_queries(
    state, block, last, held, problem, buffers, key, MASKED: gl.constexpr, EARLY: gl.constexpr,
    CONSUMER: gl.constexpr
):  # fmt: skip
    """Fold a block of queries into dK and dV of a consumer's keys, and hand its dS over.

    All that a step does, in the order in which it does it; blocks below `last` have a successor.
    """
    query, more = block * problem.BLOCK_Q, block < last
    stage, ds_stage, s = state.stage, state.ds_stage, state.s
    # K's rows come first: after V's, FA4's kernel spills.
    k_rows = held.k if held.HELD else consumer_half(buffers.k, held.slot, CONSUMER)
    v_rows = held.v if held.HELD else consumer_half(buffers.v, held.slot, CONSUMER)
    q_tile = buffers.q.tile(stage)
    do_tile = buffers.do.tile(stage)
    if EARLY:
        buffers.do.wait(stage)
        dp_token = multiply_rows(v_rows, do_tile, held.HELD)
    else:
        buffers.q.wait(stage)
        s = warpgroup_mma_wait(0, deps=[multiply_rows(k_rows, q_tile, held.HELD)])
    named_barrier_sync(CONSUMER)  # the other one's exponentials are done
    lse = row_values(buffers.lse, stage, s)
    p, slope = problem.probabilities(s, lse, key, query, MASKED)
    if EARLY:
        p = p.to(do_tile.first.dtype)
    else:  # what is kept until dP is there has 16 bits
        slope = narrowed(slope, do_tile.first)
        p = narrowed(p, do_tile.first) if problem.CAP else slope
        buffers.do.wait(stage)
        dp_token = multiply_rows(v_rows, do_tile, held.HELD)
    dv_tokens = multiply_into(state.dv, p, do_tile)
    named_barrier_arrive(CONSUMER, 2)
    dp = warpgroup_mma_wait(do_tile.PANELS, deps=[dp_token])  # dV is in flight
    buffers.ds.wait_empty(ds_stage)  # its branch keeps ptxas from widening slope earlier
    delta = row_values(buffers.delta, stage, s)
    if not EARLY:
        slope = widened(slope)
    ds = (slope * (dp - delta[None, :])).to(q_tile.first.dtype)
    dk_tokens = multiply_into(state.dk, ds, q_tile)
    if EARLY:
        # After the last block the slot holds old data; this S is never used.
        buffers.q.wait(stage.next(), more)
        s_token = multiply_rows(k_rows, buffers.q.tile(stage.next()), held.HELD)
    hand_over(buffers, ds, ds_stage, CONSUMER)
    BEHIND: gl.constexpr = q_tile.PANELS if EARLY else 0  # products of S
    dv = state.dv.wait(dv_tokens, q_tile.PANELS + BEHIND)
    dk = state.dk.wait(dk_tokens, BEHIND)
    announce(Q_EMPTY + stage.slot, Q_THREADS)  # and with it dO
    s = warpgroup_mma_wait(0, deps=[s_token]) if EARLY else state.s
    return State(dk, dv, s, stage.next(), ds_stage.next())


@gluon.jit
def first_state(
    problem, buffers, stage, ds_stage, kv_stage, any_query, EARLY: gl.constexpr,
    CONSUMER: gl.constexpr
):  # fmt: skip
    """The state before a tile's first step, dK = dV = 0, when its K and V have landed."""
    buffers.k.wait(kv_stage)
    if EARLY:
        s = gl.zeros(
            [WARPGROUP_ROWS, problem.BLOCK_Q], gl.float32, accumulator_layout(problem.BLOCK_Q)
        )
        if any_query:
            buffers.q.wait(stage)
            k_rows = consumer_half(buffers.k, kv_stage.slot, CONSUMER)
            s_token = multiply_rows(k_rows, buffers.q.tile(stage), False)
            s = warpgroup_mma_wait(0, deps=[s_token])
    else:
        s = gl.to_tensor(0)
    buffers.v.wait(kv_stage)
    return State(
        zero_output(buffers.k.tile(kv_stage), False),
        zero_output(buffers.v.tile(kv_stage), False),
        s,
        stage,
        ds_stage,
    )


@gluon.jit
def fold_all(buffers, state, held, tile, EARLY: gl.constexpr, CONSUMER: gl.constexpr):
    """The state after all queries that see a consumer's keys; tile: see `KeyProblem.own`."""
    problem, key, kv_head, sequence, begin, end, heads, divided = tile
    key += CONSUMER * WARPGROUP_ROWS
    # These lie within begin .. end, as a later key's first and last query are no earlier. Past the
    # last key, too, as a window's bounds are not negative.
    _, full_begin, full_end, _ = problem.blocks(key, WARPGROUP_ROWS)
    if problem.RAGGED or problem.PARTS > 1:  # not if a sequence, or a part, has no queries
        full_begin, full_end = gl.minimum(full_begin, end), gl.minimum(full_end, end)
    if problem.spans.ON:  # nor if no query sees the keys
        full_begin = gl.maximum(full_begin, begin)
        full_end = gl.maximum(full_end, full_begin)
    for member in range(heads):
        last = gl.where(member + 1 < heads, end, end - 1)
        given = held, problem.of_head(kv_head * problem.GROUP + member), buffers, key
        if problem.RIGHT or problem.EDGE:
            for block in range(begin, full_begin):
                state = fold_queries(state, block, last, *given, True, EARLY, CONSUMER)
        for block in range(full_begin, full_end):
            state = fold_queries(state, block, last, *given, False, EARLY, CONSUMER)
        if problem.LEFT:
            for block in range(full_end, end):
                state = fold_queries(state, block, last, *given, True, EARLY, CONSUMER)
    return state


@gluon.jit
def store(buffers, state, kv_stage, boxes, parts, tile, CONSUMER: gl.constexpr):
    """Store dK and dV of a consumer's keys through its part of the slots of K and V."""
    problem, key, kv_head, sequence, begin, end, heads, divided = tile
    dk, dv, stores = parts.combine(problem, state.dk, state.dv, key, kv_head, divided, CONSUMER)
    # A box of 64 rows and 128 dims lies where both consumers have rows of 64 dims.
    if buffers.k.tile(kv_stage).first.shape[1] > 64 or buffers.v.tile(kv_stage).first.shape[1] > 64:
        meet(ALL_READ, CONSUMER_THREADS)
    dk_out, dv_out = boxes
    corner = problem.kv_box(sequence, kv_head, key + CONSUMER * WARPGROUP_ROWS)
    box = kv_stage.slot * 2 + CONSUMER
    if stores:
        store_panels(dv, buffers.v, box, dv_out, corner)
    buffers.ds.wait_empty(state.ds_stage.next())  # `accumulate` has read K for the last dQ
    if stores:
        store_panels(dk.scaled(problem.scale), buffers.k, box, dk_out, corner)


@gluon.jit
def give_back(buffers, kv_stage):
    """Release slots of K and V, when TMA has read the gradients that leave by them."""
    tma.store_wait(0)
    buffers.k.release_loaded(kv_stage)
    buffers.v.release(kv_stage)


@gluon.jit
def consume(
    problem, buffers, scheduler, dk_out, dv_out, parts,
    EARLY: gl.constexpr, HELD: gl.constexpr, CONSUMER: gl.constexpr
):  # fmt: skip
    """A consumer: dK and dV of 64 keys of each tile."""
    tile, round = problem.turns.number(), 0
    stage, ds_stage, kv_stage = buffers.q.at(0, 0), buffers.ds.at(0, 0), buffers.k.at(0, 0)
    KV_STAGES: gl.constexpr = buffers.k.STAGES
    if CONSUMER == 1:
        named_barrier_arrive(CONSUMER, 2)  # the first turn is the other one's
    while tile < scheduler.number:
        own = problem.own(tile)
        sees_query = own[4] < own[5]
        state = first_state(
            problem, buffers, stage, ds_stage, kv_stage, sees_query, EARLY, CONSUMER
        )
        held = hold(buffers, kv_stage.slot, problem.BLOCK_Q, HELD, CONSUMER)
        if KV_STAGES == 2:
            if round > 0:  # by now TMA has read them
                give_back(buffers, kv_stage.next())
        state = fold_all(buffers, state, held, own, EARLY, CONSUMER)
        store(buffers, state, kv_stage, (dk_out, dv_out), parts, own, CONSUMER)
        if KV_STAGES == 1:
            give_back(buffers, kv_stage)
        stage, ds_stage, kv_stage = state.stage, state.ds_stage, kv_stage.next()
        tile = scheduler.receive(round)
        round += 1
    if CONSUMER == 0:
        named_barrier_sync(CONSUMER)  # no arrival may be left at a barrier
    tma.store_wait(0)
