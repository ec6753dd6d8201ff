"""FA3's backward for Hopper above head_dim 128: consumers that divide the products.

The consumers of `wide.py` compute a half of S and of dP each, exchange P and dS, and wait for each
other twice in a step; all their operands are in shared memory. Here each warpgroup has products of
its own, of all 64 keys, as FlashAttention-4 divides roles on Blackwell:

    scores      S^T = K Q^T     P = 2^(S-LSE)                       dV += P^T dO
    gradients   dP^T = V dO^T   dS = P (dP - delta)                 dK += dS^T Q
    accumulate                                       dQ = dS K, added to memory

P goes from the first to the second in 16 bits, and dS from the second to the third: each through
two slots, so a warpgroup is up to two blocks ahead of the next, and none waits for what depends on
it. P^T and dS^T are left operands in registers. S and dP of all queries are one product each, which
reads K or V once.

    waits           for                                             at
    producer        both have read a slot of Q, of dO               q.empty do.empty
    all others      the producer's copy has landed                  k.full v.full q.full do.full
    scores          `gradients` has loaded P_j-2                    p.empty
    gradients       P_j is written                                  p.full
    gradients       `accumulate` has read dS_j-2                    ds.empty
    accumulate      dS_j is written                                 ds.full
    all others      their own products                              warpgroup_mma_wait
    accumulate      what its tile of dQ had before has left         tma.store_wait
    both            both have read the slot that dK or dV leaves by q.empty do.empty
    accumulate      with turns: tiles behind have added to block j  turns.advance

Cost. Per block of 64 queries and 64 keys at head_dim 192, 1920 cycles of the tensor cores and 2816
of shared memory, which are 3520 with halves of the dims; at 256, 2560 and 3648 in the place of
4480. What passes through L2 is the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.fa3.hopper.backward.accumulate import accumulate
from flash_versions.versions.fa3.hopper.backward.host import COUNTS
from flash_versions.versions.fa3.hopper.backward.problem import KeyProblem
from flash_versions.versions.fa3.hopper.backward.tiles import (
    multiply_into,
    row_values,
    store_panels,
)
from flash_versions.versions.fa3.hopper.backward.turns import take_turns
from flash_versions.versions.fa3.hopper.backward.wide import produce_wide
from flash_versions.versions.fa3.hopper.head_mods import make_head_mods
from flash_versions.versions.fa3.hopper.intervals import make_key_spans
from flash_versions.versions.fa3.hopper.panels import (
    Output,
    PanelPipeline,
    Tiles,
    make_boxes,
    make_panel_pipeline,
    make_tiles,
    multiply_qk,
    zero_output,
)
from flash_versions.versions.tiles.pipeline import Pipeline, Stage, make_handover
from flash_versions.versions.tiles.triton_compat import aggregate
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, unknown_zero


@aggregate
class RoleBuffers:
    """What the partitions share."""

    k: PanelPipeline  # one slot
    v: PanelPipeline
    q: PanelPipeline
    do: PanelPipeline
    lse: gl.shared_memory_descriptor  # a row for each slot of q
    delta: gl.shared_memory_descriptor  # of do
    p: Pipeline  # (keys, queries), dS / (dP - delta): P, but for softcap
    ds: Pipeline
    dq: Tiles  # one for each panel, or two for parts of the only one


@aggregate
class RoleState:
    """What `fold_scores` and `fold_gradients` take from step to step."""

    sum: Output  # dV, or dK
    product: gl.tensor  # S, or dP, of the next block
    q_stage: Stage
    do_stage: Stage
    p_stage: Stage
    ds_stage: Stage


@gluon.jit
def multiply_block(pipeline, streamed, stage):
    """Issue the product of K and a block of Q, or of V and one of dO: a token to wait for."""
    rows = pipeline.tile(pipeline.at(unknown_zero(), 0))
    return multiply_qk(rows, streamed.tile(stage))


@gluon.jit
def fold_scores(state, problem, buffers, query, key, masked, more):
    """Compute P of a block of queries, hand it over, and fold it into dV; `more`: it is not the
    last block.
    """
    q_stage, do_stage, p_stage, s = state.q_stage, state.do_stage, state.p_stage, state.product
    do_tile = buffers.do.tile(do_stage)
    lse = row_values(buffers.lse, q_stage, s)
    buffers.q.release(q_stage)  # dK, the other reader, waits for P, which has a fence behind LSE
    p, slope = problem.probabilities(s, lse, key, query, masked)
    p = p.to(do_tile.first.dtype)
    buffers.p.wait_empty(p_stage)
    buffers.p.tile(p_stage).store(slope.to(do_tile.first.dtype) if problem.CAP else p)
    buffers.p.publish(p_stage)
    buffers.do.wait(do_stage)
    dv_tokens = multiply_into(state.sum, p, do_tile)
    buffers.q.wait(q_stage.next(), more)  # without more, scores of no matter what
    s_token = multiply_block(buffers.k, buffers.q, q_stage.next())
    dv = state.sum.wait(dv_tokens, buffers.k.PANELS)  # S is in flight
    buffers.do.release(do_stage)
    s = warpgroup_mma_wait(0, deps=[s_token])
    return RoleState(dv, s, q_stage.next(), do_stage.next(), p_stage.next(), state.ds_stage)


@gluon.jit
def fold_gradients(state, problem, buffers, more):
    """Compute dS of a block of queries, hand it over, and fold it into dK."""
    q_stage, do_stage, p_stage = state.q_stage, state.do_stage, state.p_stage
    ds_stage, dp = state.ds_stage, state.product
    q_tile = buffers.q.tile(q_stage)
    delta = row_values(buffers.delta, do_stage, dp)
    buffers.do.release_loaded(do_stage)  # often the last release of the slot
    buffers.p.wait(p_stage)
    slope = buffers.p.tile(p_stage).load(dp.type.layout).to(gl.float32)
    buffers.p.release(p_stage)
    ds = (slope * (dp - delta[None, :])).to(q_tile.first.dtype)
    buffers.ds.wait_empty(ds_stage)
    buffers.ds.tile(ds_stage).store(ds)
    buffers.ds.publish(ds_stage)
    buffers.q.wait(q_stage)
    dk_tokens = multiply_into(state.sum, ds, q_tile)
    buffers.do.wait(do_stage.next(), more)
    dp_token = multiply_block(buffers.v, buffers.do, do_stage.next())
    dk = state.sum.wait(dk_tokens, buffers.v.PANELS)  # dP is in flight
    buffers.q.release(q_stage)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    return RoleState(
        dk, dp, q_stage.next(), do_stage.next(), p_stage.next(), ds_stage.next()
    )  # fmt: skip


@gluon.jit
def first_role_state(problem, buffers, sum, pipeline, streamed, more):
    """A sum of no block, and the first S or dP, if there is one."""
    stage = streamed.at(0, 0)
    BLOCK_Q: gl.constexpr = problem.BLOCK_Q
    product = gl.zeros([WARPGROUP_ROWS, BLOCK_Q], gl.float32, accumulator_layout(BLOCK_Q))
    if more:
        pipeline.wait(pipeline.at(0, 0))
        streamed.wait(stage)
        product = warpgroup_mma_wait(0, deps=[multiply_block(pipeline, streamed, stage)])
    return RoleState(
        sum, product, buffers.q.at(0, 0), buffers.do.at(0, 0), buffers.p.at(0, 0),
        buffers.ds.at(0, 0)
    )  # fmt: skip


@gluon.jit
def compute_scores(problem, buffers, dv_out):
    """The warpgroup of S, P and dV."""
    problem, key, kv_head, sequence = problem.locate(problem.turns.number())
    begin, full_begin, full_end, end = problem.blocks(key, problem.BLOCK_KV)
    steps = problem.GROUP * (end - begin)
    dv = zero_output(buffers.v.tile(buffers.v.at(0, 0)), False)
    state = first_role_state(problem, buffers, dv, buffers.k, buffers.q, begin < end)
    head = kv_head * problem.GROUP
    block = begin
    for step in range(steps):
        masked = (block < full_begin) | (block >= full_end)
        mine = problem.of_head(head)
        query = block * problem.BLOCK_Q
        state = fold_scores(state, mine, buffers, query, key, masked, step + 1 < steps)
        block += 1
        last = block == end
        head = gl.where(last, head + 1, head)
        block = gl.where(last, begin, block)
    buffers.do.wait_empty(state.do_stage)
    corner = problem.kv_box(sequence, kv_head, key)
    store_panels(state.sum, buffers.do, state.do_stage.slot, dv_out, corner)
    tma.store_wait(0)


@gluon.jit
def compute_gradients(problem, buffers, dk_out):
    """The warpgroup of dP, dS and dK."""
    problem, key, kv_head, sequence = problem.locate(problem.turns.number())
    begin, _, _, end = problem.blocks(key, problem.BLOCK_KV)
    steps = problem.GROUP * (end - begin)
    dk = zero_output(buffers.k.tile(buffers.k.at(0, 0)), False)
    state = first_role_state(problem, buffers, dk, buffers.v, buffers.do, begin < end)
    for step in range(steps):
        state = fold_gradients(state, problem, buffers, step + 1 < steps)
    buffers.q.wait_empty(state.q_stage)
    corner = problem.kv_box(sequence, kv_head, key)
    dk = state.sum.scaled(problem.scale)
    store_panels(dk, buffers.q, state.q_stage.slot, dk_out, corner)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS)
def backward_roles_kernel(
    values,
    q,
    k,
    v,
    do,
    dq_sum,
    dk_out,
    dv_out,
    q_second,
    k_second,
    v_second,
    do_second,
    dq_second,
    dk_second,
    dv_second,
    plan,
    slopes,
    bounds,
    spans,
    turns,
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
    PANELS: gl.constexpr,
    PANELS_V: gl.constexpr,
    DO_STAGES: gl.constexpr,
    GRADIENT_REGISTERS: gl.constexpr,
    ACCUMULATOR_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Divide the warps of a program: four for each role, and the producer."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[-2]
    KEYS: gl.constexpr = k.block_type.shape[-2]
    mods = make_head_mods(slopes, slopes, slopes_batch_stride, slopes_head_stride, ALIBI, False)
    key_spans = make_key_spans(
        bounds, spans, batch_lines, head_lines, spanned_blocks, WARPGROUP_ROWS, SPANS
    )
    problem = KeyProblem(
        plan, mods, key_spans, take_turns(turns, 1, ORDERED), gl.to_tensor(0),
        gl.to_tensor(kv_apart), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0),
        gl.to_tensor(q_length), gl.to_tensor(kv_length), gl.to_tensor(kv_heads),
        gl.to_tensor(batch), gl.to_tensor(section), gl.to_tensor(window_left),
        gl.to_tensor(window_right), gl.to_tensor(scale), gl.to_tensor(scale_log2),
        gl.to_tensor(cap_scale), GROUP, 1, LEFT, RIGHT, EDGE, CAP, RAGGED, PACKED, EXP2,
        SHARE, BLOCK_Q, KEYS
    )  # fmt: skip
    lse: gl.constexpr = [STAGES] + values.block_type.shape
    delta: gl.constexpr = [DO_STAGES] + values.block_type.shape
    q, k = make_boxes(q, q_second, PANELS), make_boxes(k, k_second, PANELS)
    v, do = make_boxes(v, v_second, PANELS_V), make_boxes(do, do_second, PANELS_V)
    WHOLE: gl.constexpr = dq_sum.block_type.shape[-1] == q.first.block_type.shape[-1]
    dq_sum = make_boxes(dq_sum, dq_second, PANELS if WHOLE else 1)
    dk_out = make_boxes(dk_out, dk_second, PANELS)
    dv_out = make_boxes(dv_out, dv_second, PANELS_V)
    buffers = RoleBuffers(
        make_panel_pipeline(k, 1, 2),
        make_panel_pipeline(v, 1, 2),
        make_panel_pipeline(q, STAGES, 2),
        make_panel_pipeline(do, DO_STAGES, 2),
        gl.allocate_shared_memory(values.dtype, lse, values.layout),
        gl.allocate_shared_memory(values.dtype, delta, values.layout),
        make_handover(q.first.dtype, KEYS, BLOCK_Q, 1),
        make_handover(q.first.dtype, KEYS, BLOCK_Q, 1),
        make_tiles(dq_sum, 2 // dq_sum.PANELS),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_scores, (problem, buffers, dv_out)),
            (compute_gradients, (problem, buffers, dk_out)),
            (accumulate, (problem, buffers, dq_sum)),
            (produce_wide, (problem, buffers, q, k, v, do, values)),
        ],
        [4, 4, 1],
        [GRADIENT_REGISTERS, ACCUMULATOR_REGISTERS, PRODUCER_REGISTERS],
    )


launch_roles = Launcher(backward_roles_kernel)
