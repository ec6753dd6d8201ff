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
    producer        both consumers have read a slot of Q, of dO     q.empty do.empty
    consumer        the producer's copy has landed                  k.full v.full q.full do.full
    consumer        both have written their part of P, of dS        p.full ds.full
    consumer        its own products                                warpgroup_mma_wait
    consumer        what its tile of dQ had before has left         tma.store_wait
    consumer        both have read the slots that dK, dV leave by   q.empty do.empty
    consumer        with turns: tiles behind have added to block j  turns.advance

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.fa3.hopper.backward.host import COUNTS
from flash_versions.versions.fa3.hopper.backward.loads import load_do, load_q
from flash_versions.versions.fa3.hopper.backward.parts import Parts
from flash_versions.versions.fa3.hopper.backward.problem import make_problem
from flash_versions.versions.fa3.hopper.backward.tiles import (
    add_dq,
    half_of_values,
    multiply_dq,
    store_gradient,
)
from flash_versions.versions.fa3.hopper.operands import multiply_qk
from flash_versions.versions.fa3.hopper.panels import Output, zeros
from flash_versions.versions.tiles.pipeline import (
    Exchange,
    Pipeline,
    Stage,
    make_exchange,
    make_pipeline,
    make_slots,
)
from flash_versions.versions.tiles.triton_compat import aggregate
from flash_versions.versions.tiles.wgmma import unknown_zero


@aggregate
class WideBuffers:
    """What the partitions share."""

    k: Pipeline  # one slot
    v: Pipeline
    q: Pipeline
    do: Pipeline
    lse: gl.shared_memory_descriptor  # a row for each slot of q
    delta: gl.shared_memory_descriptor  # of do
    p: Exchange  # (keys, queries)
    ds: Exchange
    dq: gl.shared_memory_descriptor  # a tile for each consumer


@aggregate
class WideState:
    """What a consumer takes from step to step."""

    dk: gl.tensor
    dv: gl.tensor
    q_stage: Stage
    do_stage: Stage
    stage: Stage  # of P and dS
    counter: gl.tensor  # of the block before, if tiles have turns
    additions: gl.tensor


@gluon.jit
def produce_wide(problem, buffers, q, k, v, do, values):
    """The producer: as that of `kernel.py`, with pipelines of different lengths."""
    problem, key, kv_head, sequence = problem.locate(problem.turns.number())
    begin, _, _, end = problem.blocks(key, problem.BLOCK_KV)
    heads = problem.GROUP
    if problem.PARTS > 1:
        heads, end, _ = problem.share(kv_head, begin, end)
    q_stage = buffers.q.at(0, 0)
    do_stage = buffers.do.at(0, 0)
    if begin < end:
        corner = problem.kv_box(sequence, kv_head, key)
        buffers.k.fill(buffers.k.at(0, 0), k, corner)
        for step in range(heads * (end - begin)):
            head, query = problem.step_at(kv_head, step, begin, end)
            buffers.q.wait_empty(q_stage)
            where = problem.block_at(sequence, head, query)
            load_q(buffers, q, values, q_stage, where)
            if step == 0:
                buffers.v.fill(buffers.v.at(0, 0), v, corner)
            buffers.do.wait_empty(do_stage)
            load_do(buffers, do, values, do_stage, where)
            q_stage = q_stage.next()
            do_stage = do_stage.next()


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
def add_part(dq, tiles, dq_sum, row, PART: gl.constexpr, CONSUMER: gl.constexpr):
    """Add the dQ of `part_of_dq` to what other tiles of keys have added."""
    sequence, head, query = row
    corner = [sequence, head, query, (2 * CONSUMER + PART) * dq.shape[1]]
    add_dq(dq, tiles.index(CONSUMER), dq_sum, corner, 0)


@gluon.jit
def fold_queries_wide(
    state,
    problem,
    buffers,
    dq_sum,
    sequence,
    head,
    query,
    key,
    masked,
    CONSUMER: gl.constexpr,
):
    """Fold a block of queries into half of the dims of dK, dV and dQ.

    All that a step does, in the order in which it does it.
    """
    HALF_Q: gl.constexpr = problem.BLOCK_Q // 2
    q_stage, do_stage, stage = state.q_stage, state.do_stage, state.stage
    k_stage = buffers.k.at(unknown_zero(), 0)
    k_tile = buffers.k.tile(k_stage)
    v_tile = buffers.v.tile(k_stage)
    q_tile = buffers.q.tile(q_stage)
    do_tile = buffers.do.tile(do_stage)
    p_tile = buffers.p.tiles.index(stage.slot)
    ds_tile = buffers.ds.tiles.index(stage.slot)

    buffers.q.wait(q_stage)
    s_token = multiply_qk(k_tile, q_tile.slice(CONSUMER * HALF_Q, HALF_Q, dim=0))
    buffers.do.wait(do_stage)
    dp_token = multiply_qk(v_tile, do_tile.slice(CONSUMER * HALF_Q, HALF_Q, dim=0))
    s = warpgroup_mma_wait(1, deps=[s_token])
    lse = half_of_values(buffers.lse, q_stage.slot, s, CONSUMER)
    mine = problem.of_head(head)
    p, slope = mine.probabilities(s, lse, key, query + CONSUMER * HALF_Q, masked)
    half_of_dims(p_tile, CONSUMER).store(p.to(do_tile.dtype))
    buffers.p.publish(stage)
    p_tile = buffers.p.receive(stage)
    dv_token = warpgroup_mma(p_tile, half_of_dims(do_tile, CONSUMER), state.dv, is_async=True)
    delta = half_of_values(buffers.delta, do_stage.slot, s, CONSUMER)
    dp = warpgroup_mma_wait(1, deps=[dp_token])
    ds = slope * (dp - delta[None, :])
    half_of_dims(ds_tile, CONSUMER).store(ds.to(q_tile.dtype))
    buffers.ds.publish(stage)
    ds_tile = buffers.ds.receive(stage)
    dk_token = warpgroup_mma(ds_tile, half_of_dims(q_tile, CONSUMER), state.dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    buffers.do.release(do_stage)
    dq_token = multiply_dq(ds_tile, part_of_dq(k_tile, 0, CONSUMER))
    counter, additions = problem.take_turn(
        state.counter, state.additions, sequence, head, key, query // problem.BLOCK_Q
    )
    dk = warpgroup_mma_wait(1, deps=[dk_token])
    buffers.q.release(q_stage)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    row = sequence, head, problem.padded_first + query
    add_part(dq, buffers.dq, dq_sum, row, 0, CONSUMER)
    dq_token = multiply_dq(ds_tile, part_of_dq(k_tile, 1, CONSUMER))
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    add_part(dq, buffers.dq, dq_sum, row, 1, CONSUMER)
    return WideState(
        dk, dv, q_stage.next(), do_stage.next(), stage.next(), counter, additions
    )  # fmt: skip


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
def consume_wide(problem, buffers, dq_sum, dk_out, dv_out, parts, CONSUMER: gl.constexpr):
    """A consumer: 64 keys, and half of the dims."""
    problem, key, kv_head, sequence = problem.locate(problem.turns.number())
    begin, full_begin, full_end, end = problem.blocks(key, problem.BLOCK_KV)
    heads = problem.GROUP
    if problem.PARTS > 1:
        heads, end, divided = problem.share(kv_head, begin, end)
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
        buffers.p.at(0, 0),
        problem.turns.counters,
        gl.to_tensor(0),
    )
    head = kv_head * problem.GROUP
    block = begin
    for _ in range(heads * (end - begin)):
        masked = (block < full_begin) | (block >= full_end)
        state = fold_queries_wide(
            state, problem, buffers, dq_sum, sequence, head, block * problem.BLOCK_Q, key, masked,
            CONSUMER
        )  # fmt: skip
        head, block = problem.after(head, block, begin, end)
    problem.turns.finish(state.counter, state.additions)
    buffers.q.wait_empty(state.q_stage)
    buffers.do.wait_empty(state.do_stage)
    place = sequence, kv_head, key
    if problem.PARTS > 1:
        dk, dv = Output(state.dk, state.dk, 1), Output(state.dv, state.dv, 1)
        stores = kv_head % problem.PARTS == 0
        if divided:
            dk, dv, stores = parts.add_up(problem, dk, dv, key, kv_head, CONSUMER)
        if stores:
            store_halves(
                problem, buffers, dk.first, dv.first, state, dk_out, dv_out, place, CONSUMER
            )  # fmt: skip
    else:
        store_halves(
            problem, buffers, state.dk, state.dv, state, dk_out, dv_out, place, CONSUMER
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS)
def backward_wide_kernel(
    values,
    q,
    k,
    v,
    do,
    dq_sum,
    dk_out,
    dv_out,
    plan,
    slopes,
    bounds,
    spans,
    turns,
    sums,
    arrivals,
    q_length,
    kv_length,
    kv_heads,
    batch,
    section,
    window_left,
    window_right,
    scale,
    scale_log2,
    cap_scale,
    kv_apart,
    slopes_batch_stride,
    slopes_head_stride,
    batch_lines,
    head_lines,
    spanned_blocks,
    GROUP: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    EDGE: gl.constexpr,
    CAP: gl.constexpr,
    RAGGED: gl.constexpr,
    PACKED: gl.constexpr,
    ALIBI: gl.constexpr,
    SPANS: gl.constexpr,
    ORDERED: gl.constexpr,
    EXP2: gl.constexpr,
    SHARE: gl.constexpr,
    STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Divide the warps of a program into two consumers, four each, and one producer."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[-2]
    KEYS: gl.constexpr = k.block_type.shape[-2]
    problem = make_problem(
        plan, slopes, bounds, spans, turns, q_length, kv_length, kv_heads, batch, section,
        window_left, window_right, scale, scale_log2, cap_scale, kv_apart, slopes_batch_stride,
        slopes_head_stride, batch_lines, head_lines, spanned_blocks, GROUP, LEFT, RIGHT, EDGE, CAP,
        RAGGED, PACKED, ALIBI, SPANS, ORDERED, EXP2, SHARE, BLOCK_Q, KEYS, ADDERS=2, PARTS=PARTS
    )  # fmt: skip
    parts = Parts(sums, arrivals)
    buffers = WideBuffers(
        make_pipeline(k, 1, 2),
        make_pipeline(v, 1, 2),
        make_pipeline(q, STAGES, 2),
        make_pipeline(do, DO_STAGES, 2),
        make_slots(values, STAGES),
        make_slots(values, DO_STAGES),
        make_exchange(q.dtype, KEYS, BLOCK_Q, 2),
        make_exchange(q.dtype, KEYS, BLOCK_Q, 2),
        make_slots(dq_sum, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume_wide, (problem, buffers, dq_sum, dk_out, dv_out, parts, 0)),
            (consume_wide, (problem, buffers, dq_sum, dk_out, dv_out, parts, 1)),
            (produce_wide, (problem, buffers, q, k, v, do, values)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


launch_wide = Launcher(backward_wide_kernel)
