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
    store_both,
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
    state,
    held,
    problem,
    buffers,
    query,
    key,
    more,
    MASKED: gl.constexpr,
    EARLY: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Fold a block of queries into dK and dV of a consumer's keys, and hand its dS over.

    All that a step does, in the order in which it does it; `more`: it is not the last one.
    """
    stage, ds_stage, s = state.stage, state.ds_stage, state.s
    # K's rows come first: after V's, FA4's kernel spills.
    k_rows = held.k if held.HELD else consumer_half(buffers.k, CONSUMER)
    v_rows = held.v if held.HELD else consumer_half(buffers.v, CONSUMER)
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
def first_state(problem, buffers, begin, end, EARLY: gl.constexpr, CONSUMER: gl.constexpr):
    """The state before the first step, dK = dV = 0, when K and V have landed."""
    stage, k_stage, v_stage = buffers.q.at(0, 0), buffers.k.at(0, 0), buffers.v.at(0, 0)
    buffers.k.wait(k_stage, begin < end)
    if EARLY:
        s = gl.zeros(
            [WARPGROUP_ROWS, problem.BLOCK_Q], gl.float32, accumulator_layout(problem.BLOCK_Q)
        )
        if begin < end:
            buffers.q.wait(stage)
            k_rows = consumer_half(buffers.k, CONSUMER)
            s_token = multiply_rows(k_rows, buffers.q.tile(stage), False)
            s = warpgroup_mma_wait(0, deps=[s_token])
    else:
        s = gl.to_tensor(0)
    buffers.v.wait(v_stage, begin < end)
    return State(
        zero_output(buffers.k.tile(k_stage), False),
        zero_output(buffers.v.tile(v_stage), False),
        s,
        stage,
        buffers.ds.at(0, 0),
    )


@gluon.jit
def consume(
    problem,
    buffers,
    dk_out,
    dv_out,
    parts,
    EARLY: gl.constexpr,
    HELD: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """A consumer: dK and dV of 64 keys."""
    problem, key, kv_head, sequence, begin, end, heads, divided = problem.own()
    first_key = key
    key += CONSUMER * WARPGROUP_ROWS
    # These lie within begin .. end, as a later key's first and last query are no earlier. Past the
    # last key, too, as a window's bounds are not negative.
    _, full_begin, full_end, _ = problem.blocks(key, WARPGROUP_ROWS)
    if problem.RAGGED or problem.PARTS > 1:  # not if a sequence, or a part, has no queries
        full_begin, full_end = gl.minimum(full_begin, end), gl.minimum(full_end, end)
    if problem.spans.ON:  # nor if no query sees the keys
        full_begin = gl.maximum(full_begin, begin)
        full_end = gl.maximum(full_end, full_begin)
    BLOCK_Q: gl.constexpr = problem.BLOCK_Q
    state = first_state(problem, buffers, begin, end, EARLY, CONSUMER)
    held = hold(buffers, BLOCK_Q, HELD, CONSUMER)
    if CONSUMER == 1:
        named_barrier_arrive(CONSUMER, 2)  # the first turn is the other one's
    for member in range(heads):
        last = gl.where(member + 1 < heads, end, end - 1)  # a block below it has a successor
        mine = problem.of_head(kv_head * problem.GROUP + member)
        if problem.RIGHT or problem.EDGE:
            for block in range(begin, full_begin):
                state = fold_queries(
                    state, held, mine, buffers, block * BLOCK_Q, key, block < last, True, EARLY,
                    CONSUMER
                )  # fmt: skip
        for block in range(full_begin, full_end):
            state = fold_queries(
                state, held, mine, buffers, block * BLOCK_Q, key, block < last, False, EARLY,
                CONSUMER
            )  # fmt: skip
        if problem.LEFT:
            for block in range(full_end, end):
                state = fold_queries(
                    state, held, mine, buffers, block * BLOCK_Q, key, block < last, True, EARLY,
                    CONSUMER
                )  # fmt: skip
    if CONSUMER == 0:
        named_barrier_sync(CONSUMER)  # no arrival may be left at a barrier
    meet(ALL_READ, CONSUMER_THREADS)
    free = state.stage
    if CONSUMER == 1:
        free = free.next()
    corner = problem.kv_box(sequence, kv_head, key)
    if problem.PARTS > 1:
        dk, dv, stores = state.dk, state.dv, kv_head % problem.PARTS == 0
        if divided:
            dk, dv, stores = parts.add_up(problem, dk, dv, first_key, kv_head, CONSUMER)
        if stores:
            store_both(problem, buffers, dk, dv, free, dk_out, dv_out, corner)
    else:
        store_both(problem, buffers, state.dk, state.dv, free, dk_out, dv_out, corner)
    tma.store_wait(0)
