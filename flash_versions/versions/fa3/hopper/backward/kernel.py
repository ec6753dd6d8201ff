"""FlashAttention 3, backward, on Hopper: one kernel, five products, all of them asynchronous.

What the portable kernels waste. Two kernels compute S and dP twice, seven products in the place of
five, because no other program may add to what a program owns. And as in the forward, warps that do
all in turn leave the tensor cores idle while they compute exponentials.

What changes.
* One kernel. A program owns 128 keys and adds its share of dQ to memory: TMA adds a tile to a box
  (reduce-add, fp32). The order of the additions is the order in which programs come by, so dQ may
  differ in its last bits from run to run. With `deterministic` programs wait for their turns, see
  `turns.py`.
* Warp specialisation. A producer warp streams Q and dO of the queries that see these keys, with a
  row of LSE and one of delta; two consumers have 64 keys each, and dK and dV in registers.
* Transposed scores. With S^T = K Q^T, a consumer's rows are keys: P^T and dS^T are, rounded, the
  left operands of dV += P^T dO and dK += dS^T Q, straight from registers.
* A warpgroup for dQ, `accumulate`. dQ sums over keys, and a consumer has half of them. Both leave
  their dS, in two slots, for a third warpgroup, which does one product, dQ = dS K, and has it added
  to memory: nothing of that is in the consumers' way. In the sum, columns are exchanged, so that
  stores meet each bank of shared memory once.

One step, for block j; [..] what the tensor cores do, a column is a stretch of time:

    consumers   [S^T = K Q^T]          [dP^T = V dO^T] [dV += P^T dO]  [dK += dS^T Q]
      compute                  P = 2^(S-LSE)           dS = P (dP - delta), stored
    accumulate  [dQ_j-1 = dS K, a half of the dims] stored [the other half] stored
    TMA          Q, dO to come         [dQ_j-1 += in memory ...

    waits           for                                             at
    consumer        the other one has done its exponentials         named_barrier_sync
    producer        both consumers have read a slot of Q and of dO  Q_EMPTY, named
    consumer        the producer's copy has landed                  k.full v.full q.full do.full
    accumulate      the producer's copy of K has landed             k.full
    consumer        `accumulate` has read the slot of dS_j-2        ds.empty
    accumulate      both have written their part of dS_j            DS_FULL, named
    all others      their own products                              warpgroup_mma_wait
    accumulate      what its tile of dQ had before has left         tma.store_wait
    consumer        both have read the slot that dK, dV leave by    ALL_READ, named
    accumulate      with turns: tiles behind have added to block j  turns.advance

Barriers. When a partition arrives at an mbarrier, Gluon makes its warps wait for each other, before
and behind. At head_dim 64, where a step is short, that is a good part of it. So what consumers tell
others they announce at named barriers (`tiles.DS_FULL`, `tiles.Q_EMPTY`), each warp for itself.
And dK, and with `early` S of the next step, are issued before dS is stored: the store, its fence
and the announcement pass while tensor cores compute.

Turns. One consumer computes exponentials and issues dV, then the other one: so they do not compute
exponentials at the same time, and the tensor cores have products of one while the other computes.
A consumer has given its turn away before it waits for the warpgroup of dQ, which may wait for other
programs (`turns.py`), so the turns close no circle of waits.

Why no warp overwrites what another still reads: before it writes a tile, it waits until the readers
have said that they are done, for dS and dQ as for all others. Slots of Q and of dO are given back
together, behind dK, the last product that reads one. With `early`, S is issued once more after the
last block, perhaps from a slot that the other consumer stores dK through. This S is never used.

`early`, where there are registers for it (up to head_dim 80): dP is issued before the exponentials,
and S of the next step behind dK. Elsewhere registers do not hold fp32 P beside dP, so P is rounded
to 16 bits before dP is computed.

`held`, at head_dim 64: a consumer has its rows of V and of K in registers, as left operands, and dQ
is one product, so dS is read once. Otherwise a step would take 1664 cycles of shared memory, and
1280 of the tensor cores: V, K and dQ save 128 of the former each. Not with softcap: it would spill.

Cost. Per block of 64 queries and 128 keys at head_dim 128, 2560 cycles of the tensor cores and 2944
of shared memory: of the five products only dV and dK have an operand in registers. dQ passes
through L2 in fp32, once for every 128 keys: tiles of one head are neighbours, so that it stays
there. Registers are short: dK and dV take 128 of a consumer's, and dQ is computed by halves.

Head dims up to 96 may be two panels, 64 + 32 or 64 + 16 (`panels.py`): then dK, dV and a product
with Q or dO are two. dQ is computed a panel at a time, or with 16 columns both at once.

Above head_dim 128, too, consumers divide the keys, and compute the scores of half of a block's
queries at a time: with a warpgroup for dQ up to 160 dims, and for 192 with 128 of v
(`wider/halves.py`); for 192, where registers are left for two warpgroups only, without one
(`wider/pair.py`). At 256 a program has 64 keys, and consumers divide the dims (`wider/wide.py`).

Before it, a kernel computes delta and clears the sum of dQ; one behind it scales and rounds dQ.

Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, section 3 and appendix B.1,
whose backward has a warp for the addition of dQ; transposed scores as in its code. A warpgroup for
one product is FlashAttention-4's way of dividing roles (Zadouri et al. 2026, arXiv:2603.05451).
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from flash_versions.dispatch.launch import Launcher, Plan
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.backward import exp2
from flash_versions.versions.fa3.hopper import forward as forward_hopper
from flash_versions.versions.fa3.hopper.backward.accumulate import accumulate
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig
from flash_versions.versions.fa3.hopper.backward.host import COUNTS, make_plan, tensors
from flash_versions.versions.fa3.hopper.backward.loads import Inputs, load_do, load_q
from flash_versions.versions.fa3.hopper.backward.parts import Parts
from flash_versions.versions.fa3.hopper.backward.problem import make_problem
from flash_versions.versions.fa3.hopper.backward.rows import finish, prepare
from flash_versions.versions.fa3.hopper.backward.tiles import (
    ALL_READ,
    CONSUMER_THREADS,
    DS_FULL,
    DS_THREADS,
    Q_EMPTY,
    Q_THREADS,
    Buffers,
    consumer_half,
    hold,
    multiply_into,
    multiply_rows,
    narrowed,
    row_values,
    store_both,
    widened,
)
from flash_versions.versions.fa3.hopper.backward.wider.halves import launch_halves
from flash_versions.versions.fa3.hopper.backward.wider.pair import launch_pair
from flash_versions.versions.fa3.hopper.backward.wider.wide import launch_wide
from flash_versions.versions.fa3.hopper.panels import (
    Output,
    make_boxes,
    make_panel_pipeline,
    make_panel_pipeline_beside,
    make_tiles,
    multiply_qk,
    zero_output,
)
from flash_versions.versions.tiles.pipeline import (
    Stage,
    announce,
    hear_rest,
    make_handover,
    make_slots,
    meet,
    named_barrier_arrive,
    named_barrier_sync,
)
from flash_versions.versions.tiles.triton_compat import aggregate
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout


@gluon.jit
def produce(problem, buffers, inputs):
    """The producer: load K and V, and for each head of the group Q and dO of all that see them."""
    problem, key, kv_head, sequence = problem.locate(problem.turns.number())
    begin, _, _, end = problem.blocks(key, problem.BLOCK_KV)
    heads = problem.GROUP
    if problem.PARTS > 1:
        heads, end, _ = problem.share(kv_head, begin, end)
    stage = buffers.q.at(0, 0)
    if begin < end:
        corner = problem.kv_box(sequence, kv_head, key)
        buffers.k.fill(buffers.k.at(0, 0), inputs.k, corner)
        for step in range(heads * (end - begin)):
            if step >= buffers.q.first.STAGES:
                meet(Q_EMPTY + stage.slot, Q_THREADS)  # and so is the slot of dO
            where = problem.block_at(sequence, kv_head, step, begin, end)
            load_q(buffers, inputs.q, inputs.values, stage, where)
            if step == 0:
                buffers.v.fill(buffers.v.at(0, 0), inputs.v, corner)
            load_do(buffers, inputs.do, inputs.values, stage, where)
            stage = stage.next()
        hear_rest(stage, heads * (end - begin), Q_EMPTY, Q_THREADS)


@aggregate
class State:
    """What a consumer takes from step to step."""

    dk: Output
    dv: Output
    s: gl.tensor  # scores of the next step; a 0 if they are computed in it
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
    buffers.ds.wait_empty(ds_stage)  # a branch: ptxas does not widen slope in front of it
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
    """dK and dV of keys that no query has been folded into, when K and V are there."""
    stage = buffers.q.at(0, 0)
    buffers.k.wait(buffers.k.at(0, 0), begin < end)
    if EARLY:
        s = gl.zeros(
            [WARPGROUP_ROWS, problem.BLOCK_Q], gl.float32, accumulator_layout(problem.BLOCK_Q)
        )
        if begin < end:
            buffers.q.wait(stage)
            k_rows = consumer_half(buffers.k, CONSUMER)
            q_tile = buffers.q.tile(stage)
            s = warpgroup_mma_wait(0, deps=[multiply_qk(k_rows.pair(), q_tile)])
    else:
        s = gl.to_tensor(0)
    buffers.v.wait(buffers.v.at(0, 0), begin < end)
    return State(
        zero_output(buffers.k.tile(stage), False),
        zero_output(buffers.v.tile(stage), False),
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
    problem, key, kv_head, sequence = problem.locate(problem.turns.number())
    begin, _, _, end = problem.blocks(key, problem.BLOCK_KV)
    heads = problem.GROUP
    if problem.PARTS > 1:
        heads, end, divided = problem.share(kv_head, begin, end)
    first_key = key
    key += CONSUMER * WARPGROUP_ROWS
    # Among begin .. end, as a later key's first and last query are no earlier, and the window's
    # bounds are not negative: even of keys past the last one, begin is no later than that end.
    _, full_begin, full_end, _ = problem.blocks(key, WARPGROUP_ROWS)
    if problem.RAGGED or problem.PARTS > 1:  # but of a sequence, or a part, without queries
        full_begin, full_end = gl.minimum(full_begin, end), gl.minimum(full_end, end)
    if problem.spans.ON:  # and of keys that no query sees
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
        named_barrier_sync(CONSUMER)  # what was announced has to be heard
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


@gluon.jit(do_not_specialize=COUNTS)
def backward_kernel(
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
    PANELS: gl.constexpr,
    PANELS_V: gl.constexpr,
    EARLY: gl.constexpr,
    HELD: gl.constexpr,
    PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    ACCUMULATOR_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Divide the warps of a program: four for each consumer, four for dQ, and the producer."""
    BLOCK_Q: gl.constexpr = q.block_type.shape[-2]
    KEYS: gl.constexpr = k.block_type.shape[-2]
    problem = make_problem(
        plan, slopes, bounds, spans, turns, q_length, kv_length, kv_heads, batch, section,
        window_left, window_right, scale, scale_log2, cap_scale, kv_apart, slopes_batch_stride,
        slopes_head_stride, batch_lines, head_lines, spanned_blocks, GROUP, LEFT, RIGHT, EDGE, CAP,
        RAGGED, PACKED, ALIBI, SPANS, ORDERED, EXP2, SHARE, BLOCK_Q, KEYS, ADDERS=1, PARTS=PARTS
    )  # fmt: skip
    parts = Parts(sums, arrivals)
    q, k = make_boxes(q, q_second, PANELS), make_boxes(k, k_second, PANELS)
    v, do = make_boxes(v, v_second, PANELS_V), make_boxes(do, do_second, PANELS_V)
    dq_sum = make_boxes(dq_sum, dq_second, PANELS)
    dk_out = make_boxes(dk_out, dk_second, PANELS)
    dv_out = make_boxes(dv_out, dv_second, PANELS_V)
    k_pipeline = make_panel_pipeline(k, 1, 2)
    buffers = Buffers(
        k_pipeline,
        make_panel_pipeline(v, 1, 2),
        make_panel_pipeline_beside(q, STAGES, k_pipeline),  # slots are given back at Q_EMPTY
        make_panel_pipeline_beside(do, STAGES, k_pipeline),
        make_slots(values, STAGES),
        make_slots(values, STAGES),
        make_handover(q.first.dtype, KEYS, BLOCK_Q, 2, ANNOUNCED=True),
        make_tiles(dq_sum, 2 // PANELS),
    )
    inputs = Inputs(q, k, v, do, values)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (problem, buffers, dk_out, dv_out, parts, EARLY, HELD, 0)),
            (consume, (problem, buffers, dk_out, dv_out, parts, EARLY, HELD, 1)),
            (accumulate, (problem, buffers, dq_sum)),
            (produce, (problem, buffers, inputs)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, ACCUMULATOR_REGISTERS, PRODUCER_REGISTERS],
    )


launch_backward = Launcher(backward_kernel)


def left_to_portable(request: Request) -> str | None:
    """Why a request that descriptors can address is left to the portable kernels, as a sentence,
    or None.
    """
    if request.is_deterministic and request.has_intervals:
        return (
            "deterministic gradients with intervals are left to the portable kernels: which tiles "
            "of keys add to a block of dQ, and so their order, is not known beforehand."
        )
    head_dim, head_dim_v = request.q.shape[3], request.v.shape[3]
    if max(head_dim, head_dim_v) > 128 and min(head_dim, head_dim_v) <= 64:
        return (
            f"head_dim {head_dim} and {head_dim_v} of v are left to the portable kernels: above "
            f"128, both must be above 64."
        )
    return forward_hopper.left_to_portable(request)


def backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    config: BackwardConfig | None = None,
    function: Any = exp2,
    share: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of attention on a Hopper GPU.

    Args:
        request: as in the forward; one that is not `left_to_portable`, on the current GPU.
        o: its result (batch, M, heads, head_dim_v).
        lse: its LSE (batch, heads, M).
        statistics: None.
        do: gradient of o; of any strides but the last dimension's, which is 1.
        dlse: gradient of the LSE (batch, heads, M), or None.
        config: the schedule; None chooses by shape.
        function: 2^x, a Triton function of a tile (keys, queries) and of share.
        share: what the function has to know beside the tile: a constant.

    Raises:
        ValueError: the configuration does not fit the request.

    Returns:
        dq, dk, dv like q, k, v, contiguous; dsink like the sink, or None without one.
    """
    plan = make_plan(request, config, function, share)
    return launch(plan, request, o, lse, statistics, do, dlse)


def launch(
    plan: Plan,
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launch the kernels; arguments and results as those of `backward`."""
    config = plan.config
    space = prepare(request, o, lse, do, dlse, config, plan.constants["ORDERED"])
    launcher = launch_wide if config.block_kv == 64 else launch_backward
    if config.by_halves:
        launcher = launch_halves if config.halves else launch_pair
    launcher.launch(plan, tensors(request, space, plan))
    finish(request, space.dq_sum, space.dq, space.tiles, config)
    return space.dq, space.dk, space.dv, space.dsink
