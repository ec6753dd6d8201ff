"""FA3's backward for Hopper above head_dim 128: consumers that divide the dims.

dK and dV of 128 keys and 256 dims would take all registers of an SM. So a program owns
64 keys, and its two consumers have half of the dims of dK, dV and dQ each. What they share instead
are the scores: each computes S^T and dP^T of all keys with half of the queries of a block, and both
P and dS pass through shared memory.

Head dims between are padded. Calls for which 128 keys fit use `halves.py` or `pair.py`.

One step of a consumer, for block j:

    issue     [S^T = K Q_half^T][dP^T = V dO_half^T][dV += P^T dO][dK += dS^T Q][dQ = dS K] x2
    compute                      P = 2^(S-LSE)       dS = P (dP - delta)         add dQ     x2

    waits           for                                             at
    producer        both consumers have read a slot of Q, of dO     Q_READ DO_READ, named
    consumer        the producer's copy has landed                  k.full v.full q.full do.full
    consumer        both have written their part of P, of dS        P_DONE DS_DONE, named
    consumer        its own products                                warpgroup_mma_wait
    consumer        what its tile of dQ had before has left         dq_empty
    adder           a consumer has written a part of dQ             DQ_FULL, named
    adder           with turns: tiles behind have added to block j  turns.advance
    consumer        both have read the slots that dK, dV leave by   ALL_DONE, named

An adder, a warp beside the producer's, has TMA add parts of dQ to memory. It spares consumers two
barriers of their warps for a part, and with turns the wait for the counters of other programs, in
which the tensor cores would have nothing to do. It counts a block as soon as its additions are in
memory.

P and dS have two buffers: a consumer that writes those of block j + 2 has waited for P of block
j + 1, which the other wrote when all its products of block j were done.

Cost. Per block of 64 queries and 64 keys at head_dim 256, 2560 cycles of the tensor cores, all
operands in shared memory. Half as many keys as at head_dim 128 read the same Q and dO, and add to
dQ, 128 KB for a block: twice the traffic with L2 for a product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_versions.versions.fa3.hopper.backward.tiles import (
    CONSUMER_THREADS,
    Q_THREADS,
    exchanged,
    half_of_values,
    load_do,
    load_q,
    multiply_dq,
    store_gradient,
)
from flash_versions.versions.fa3.hopper.operands import multiply_qk
from flash_versions.versions.fa3.hopper.panels import Output, zeros
from flash_versions.versions.tiles.pipeline import (
    FIRST_FREE_BARRIER,
    Pipeline,
    Stage,
    announce,
    as_matrix,
    hear_rest,
    make_barriers,
    make_pipeline,
    make_pipeline_beside,
    make_shared_tiles,
    make_slots,
    meet,
)
from flash_versions.versions.tiles.triton_compat import add_tile, aggregate
from flash_versions.versions.tiles.wgmma import unknown_zero

# Named barriers, and the threads that meet there.
P_DONE = gl.constexpr(FIRST_FREE_BARRIER)
DS_DONE = gl.constexpr(FIRST_FREE_BARRIER + 1)
ALL_DONE = gl.constexpr(FIRST_FREE_BARRIER + 2)
DQ_FULL = gl.constexpr(FIRST_FREE_BARRIER + 3)  # of each consumer
ADD_THREADS = gl.constexpr(160)  # a consumer and the adder
DO_READ = gl.constexpr(FIRST_FREE_BARRIER + 5)  # one slot
Q_READ = gl.constexpr(FIRST_FREE_BARRIER + 6)  # two slots, and no barrier is left


@aggregate
class WideBuffers:
    """What the partitions share."""

    k: Pipeline  # one slot
    v: Pipeline
    q: Pipeline
    do: Pipeline
    lse: gl.shared_memory_descriptor  # a row for each slot of q
    delta: gl.shared_memory_descriptor  # of do
    p: gl.shared_memory_descriptor  # (keys, queries), two tiles
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor  # a tile for each consumer
    dq_empty: gl.shared_memory_descriptor  # its barrier


@aggregate
class WideState:
    """What a consumer takes from step to step."""

    dk: gl.tensor
    dv: gl.tensor
    q_stage: Stage
    do_stage: Stage
    slot: gl.tensor  # of P and dS


@gluon.jit
def produce_wide(problem, buffers, q, k, v, do, values):
    """The producer: as that of `kernel.py`, with pipelines of different lengths."""
    problem, key, kv_head, sequence, begin, end, heads, _ = problem.own(problem.turns.number())
    q_stage = buffers.q.at(0, 0)
    do_stage = buffers.do.at(0, 0)
    if begin < end:
        corner = problem.kv_box(sequence, kv_head, key)
        buffers.k.fill(buffers.k.at(0, 0), k, corner)
        for step in range(heads * (end - begin)):
            where = problem.block_at(sequence, kv_head, step, begin, end)
            if step >= buffers.q.STAGES:
                meet(Q_READ + q_stage.slot, Q_THREADS)
            load_q(buffers, q, values, q_stage, where)
            if step == 0:
                buffers.v.fill(buffers.v.at(0, 0), v, corner)
            if step >= buffers.do.STAGES:
                meet(DO_READ + do_stage.slot, Q_THREADS)
            load_do(buffers, do, values, do_stage, where)
            q_stage = q_stage.next()
            do_stage = do_stage.next()
        steps = heads * (end - begin)
        hear_rest(q_stage, steps, Q_READ, Q_THREADS)
        hear_rest(do_stage, steps, DO_READ, Q_THREADS)


@gluon.jit
def add_wide(problem, buffers, dq_sum):
    """The adder: TMA adds the parts of dQ that consumers leave to what other tiles have added."""
    problem, key, kv_head, sequence, begin, end, heads, _ = problem.own(problem.turns.number())
    WIDTH: gl.constexpr = dq_sum.block_type.shape[3]
    counter, additions = problem.turns.counters, gl.to_tensor(0)  # of the block before
    for member in range(heads):
        head = kv_head * problem.GROUP + member
        for block in range(begin, end):
            counter, additions = problem.take_turn(counter, additions, sequence, head, key, block)
            row = problem.padded_first + block * problem.BLOCK_Q
            for part in gl.static_range(2):
                for consumer in gl.static_range(2):
                    meet(DQ_FULL + consumer, ADD_THREADS)
                    corner = [sequence, head, row, (2 * consumer + part) * WIDTH]
                    add_tile(dq_sum, corner, buffers.dq.index(consumer))
                for consumer in gl.static_range(2):
                    tma.store_wait(1 - consumer)
                    mbarrier.arrive(buffers.dq_empty.index(consumer), count=1)
    problem.turns.finish(counter, additions)
    tma.store_wait(0)


@gluon.jit
def half_of_dims(tile, CONSUMER: gl.constexpr):
    """A consumer's half of the columns of a tile."""
    HALF: gl.constexpr = tile.shape[1] // 2
    return tile.slice(CONSUMER * HALF, HALF, dim=1)


@gluon.jit
def part_of_dq(k_tile, PART: gl.constexpr, CONSUMER: gl.constexpr):
    """The columns of K for the dims of dQ that a consumer computes first or second, a quarter."""
    return half_of_dims(half_of_dims(k_tile, CONSUMER), PART)


@gluon.jit
def leave_part(dq, buffers, PART: gl.constexpr, CONSUMER: gl.constexpr):
    """Leave the dQ of `part_of_dq` for the adder, in a tile that is free when the part before is
    added; of every block there are two parts, so the first waits for phase 1.
    """
    dq = exchanged(dq)
    mbarrier.wait(buffers.dq_empty.index(CONSUMER), 1 - PART)
    as_matrix(buffers.dq.index(CONSUMER)).store(dq)
    fence_async_shared()
    announce(DQ_FULL + CONSUMER, ADD_THREADS)


@gluon.jit
def fold_queries_wide(state, problem, buffers, query, key, masked, CONSUMER: gl.constexpr):
    """Fold a block of queries into half of the dims of dK, dV and dQ.

    All that a step does, in the order in which it does it.
    """
    HALF_Q: gl.constexpr = problem.BLOCK_Q // 2
    q_stage, do_stage, slot = state.q_stage, state.do_stage, state.slot
    k_stage = buffers.k.at(unknown_zero(), 0)
    k_tile = buffers.k.tile(k_stage)
    v_tile = buffers.v.tile(k_stage)
    q_tile = buffers.q.tile(q_stage)
    do_tile = buffers.do.tile(do_stage)
    p_tile = buffers.p.index(slot)
    ds_tile = buffers.ds.index(slot)

    buffers.q.wait(q_stage)
    s_token = multiply_qk(k_tile, q_tile.slice(CONSUMER * HALF_Q, HALF_Q, dim=0))
    buffers.do.wait(do_stage)
    dp_token = multiply_qk(v_tile, do_tile.slice(CONSUMER * HALF_Q, HALF_Q, dim=0))
    s = warpgroup_mma_wait(1, deps=[s_token])
    lse = half_of_values(buffers.lse, q_stage.slot, s, CONSUMER)
    p, slope = problem.probabilities(s, lse, key, query + CONSUMER * HALF_Q, masked)
    half_of_dims(p_tile, CONSUMER).store(p.to(do_tile.dtype))
    fence_async_shared()
    meet(P_DONE, CONSUMER_THREADS)  # both have written their part
    dv_token = warpgroup_mma(p_tile, half_of_dims(do_tile, CONSUMER), state.dv, is_async=True)
    delta = half_of_values(buffers.delta, do_stage.slot, s, CONSUMER)
    dp = warpgroup_mma_wait(1, deps=[dp_token])
    ds = slope * (dp - delta[None, :])
    half_of_dims(ds_tile, CONSUMER).store(ds.to(q_tile.dtype))
    fence_async_shared()
    meet(DS_DONE, CONSUMER_THREADS)
    dk_token = warpgroup_mma(ds_tile, half_of_dims(q_tile, CONSUMER), state.dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    announce(DO_READ + do_stage.slot, Q_THREADS)
    dq_token = multiply_dq(ds_tile, part_of_dq(k_tile, 0, CONSUMER))
    dk = warpgroup_mma_wait(1, deps=[dk_token])
    announce(Q_READ + q_stage.slot, Q_THREADS)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    leave_part(dq, buffers, 0, CONSUMER)
    dq_token = multiply_dq(ds_tile, part_of_dq(k_tile, 1, CONSUMER))
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    leave_part(dq, buffers, 1, CONSUMER)
    return WideState(dk, dv, q_stage.next(), do_stage.next(), slot ^ 1)


@gluon.jit
def store_halves(problem, buffers, dk, dv, state, dk_out, dv_out, place, CONSUMER: gl.constexpr):
    """Store a consumer's half of dK and dV through slots of Q and dO, which are read."""
    sequence, kv_head, key = place
    dk *= problem.scale
    dv_corner = problem.kv_box(sequence, kv_head, key, CONSUMER * dv.shape[1])
    dk_corner = problem.kv_box(sequence, kv_head, key, CONSUMER * dk.shape[1])
    dv_slot, dk_slot = 2 * state.do_stage.slot + CONSUMER, 2 * state.q_stage.slot + CONSUMER
    store_gradient(dv, buffers.do.tiles, dv_slot, dv_out, dv_corner)
    store_gradient(dk, buffers.q.tiles, dk_slot, dk_out, dk_corner)


@gluon.jit
def consume_wide(problem, buffers, dk_out, dv_out, parts, CONSUMER: gl.constexpr):
    """A consumer: 64 keys, and half of the dims."""
    problem, key, kv_head, sequence, begin, end, heads, divided = problem.own(
        problem.turns.number()
    )
    _, full_begin, full_end, _ = problem.blocks(key, problem.BLOCK_KV)
    k_stage = buffers.k.at(0, 0)
    DIMS: gl.constexpr = buffers.k.tile(k_stage).shape[1] // 2
    DIMS_V: gl.constexpr = buffers.v.tile(k_stage).shape[1] // 2
    buffers.k.wait(k_stage, begin < end)
    buffers.v.wait(k_stage, begin < end)
    state = WideState(
        zeros(DIMS, False),
        zeros(DIMS_V, False),
        buffers.q.at(0, 0),
        buffers.do.at(0, 0),
        gl.to_tensor(0),
    )
    head = kv_head * problem.GROUP
    block = begin
    for _ in range(heads * (end - begin)):
        masked = (block < full_begin) | (block >= full_end)
        mine = problem.of_head(head)
        query = block * problem.BLOCK_Q
        state = fold_queries_wide(state, mine, buffers, query, key, masked, CONSUMER)
        head, block = problem.after(head, block, begin, end)
    meet(ALL_DONE, CONSUMER_THREADS)
    place = sequence, kv_head, key
    dk, dv = Output(state.dk, state.dk, 1), Output(state.dv, state.dv, 1)
    dk, dv, stores = parts.combine(problem, dk, dv, key, kv_head, divided, CONSUMER)
    if stores:
        store_halves(problem, buffers, dk.first, dv.first, state, dk_out, dv_out, place, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def make_wide_buffers(values, q, k, v, do, dq_sum, STAGES: gl.constexpr):
    """Allocate what the partitions share; slots of Q and dO are given back at Q_READ and DO_READ,
    and have no `empty` barriers.
    """
    BLOCK_Q: gl.constexpr = q.block_type.shape[-2]
    KEYS: gl.constexpr = k.block_type.shape[-2]
    k_pipeline = make_pipeline(k, 1, 2)
    dq_empty = make_barriers(2, 1)
    return WideBuffers(
        k_pipeline,
        make_pipeline(v, 1, 2),
        make_pipeline_beside(q, STAGES, k_pipeline.empty),
        make_pipeline_beside(do, 1, k_pipeline.empty),
        make_slots(values, STAGES),
        make_slots(values, 1),
        make_shared_tiles(q.dtype, KEYS, BLOCK_Q),
        make_shared_tiles(q.dtype, KEYS, BLOCK_Q),
        make_slots(dq_sum, 2),
        dq_empty,
    )
