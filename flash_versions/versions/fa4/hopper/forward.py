"""FlashAttention 4, forward, on Hopper: roles with states, and less work for the consumers.

What FA3 wasted. Its consumers do everything but the loads. They multiply the accumulator by 1 in
most blocks, leave the multiply-add units idle while the special function unit computes
exponentials, and at the end of a tile wait for their own stores.

What changes.
* Roles. Loader, consumers (products and softmax) and storer are separate programs of the kernel.
  `roles.py` has their states and transitions as a table, and this text enters them by name. An
  instrumented launch notes when (`trace.py`), and a test compares that with the table.
* Conditional rescaling (`softmax.py`, `correction.py`): a warp multiplies its part of the
  accumulator only if one of its rows was raised. The correction is a state of the consumers and not
  a role, because Hopper's accumulator is in the consumers' registers, which no other warp can read.
  (On Blackwell it is in tensor memory, and separate warps correct it.) It comes behind the issue of
  the next block's S, so that the tensor cores work meanwhile; rescaling in every block comes before
  it, as in FA3.
* A polynomial for some of the exponentials (`exp2.py`).
* One multiply-add for an exponent in FP8 with scales of heads or tensors (`starts.py`).
* The storer copies O, or its last part, while the consumers begin the next tile.

Where products are so short that FA3's three consumers in order are faster, version "fa4" launches
FA3's kernel (`prefers_order` and `prefers_order_in_fp8` in fa3/hopper/config.py). In FP8 that is so
for the caller's 8-bit tensors only.

By default conditional rescaling is off from 33 to 128 dims in 16 bits and on elsewhere, and the
polynomial is off. Starts are on in FP8 above 64 dims, unless scales are of blocks, as by default,
or the caller's. Each is off where it costs speed (docs/understand/log.md).

    loader      claim load load load ...      claim load ...
    consumer    await score softmax correct score softmax correct ... drain hand over  await ...
    storer      idle                                                            store  idle ...

    waits          for                                        at
    loader         consumers have read a slot of K or V, of Q  k.empty v.empty q.empty
    loader         the others know the tile before the last    scheduler.empty
    consumer       the loader's copy has landed                q.full k.full v.full
    consumer       the other consumer has issued its products  its named barrier
    consumer       the storer has copied its last O            o_empty
    storer         a consumer's O is in its buffer             o_full
    the others     the tile that the loader has claimed        scheduler.full

Interval masks have slots of their own, which the loader fills with K's (`bounds`).

Imported from FA3 unchanged: panels with their pipelines and products, masks, P in registers, FP8
scales, scores of 16 bits. Schedulers, named barriers and row sums come from `tiles`.

Source. Zadouri et al. 2026, "FlashAttention-4", arXiv:2603.05451; this kernel takes from it what
Hopper can use.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flash_versions.versions.fa3.fp8.pairs import largest, powers, sums
from flash_versions.versions.fa3.fp8.scales import make_scales
from flash_versions.versions.fa3.hopper.forward import first_state
from flash_versions.versions.fa3.hopper.intervals import fill_keys, mask_listed
from flash_versions.versions.fa3.hopper.panels import (
    PanelPipeline,
    make_boxes,
    make_panel_pipeline,
    moved,
    multiply_pv,
    multiply_qk,
    number_of_parts,
    rounded,
)
from flash_versions.versions.fa3.hopper.problem import COUNTS, MORE_COUNTS, make_query_problem
from flash_versions.versions.fa3.hopper.slots import fill_values, pass_over
from flash_versions.versions.fa4.exp2 import mixed_exp2
from flash_versions.versions.fa4.hopper.correction import corrected
from flash_versions.versions.fa4.hopper.roles import (
    AWAIT,
    CLAIM,
    CORRECT,
    DRAIN,
    HAND_OVER,
    IDLE,
    LOAD,
    SCORE,
    SOFTMAX,
    STORE,
)
from flash_versions.versions.fa4.hopper.starts import LIMIT, raise_start, reference_of
from flash_versions.versions.fa4.hopper.trace import FIXED_ROLES, LOADER, STORER, Trace
from flash_versions.versions.fa4.softmax import raise_reference
from flash_versions.versions.tiles.pipeline import (
    Pipeline,
    as_matrix,
    make_barriers,
    make_companion,
    make_slots,
    named_barrier_arrive,
    named_barrier_sync,
)
from flash_versions.versions.tiles.tile_scheduler import make_scheduler
from flash_versions.versions.tiles.triton_compat import aggregate, store_tile
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS


@aggregate
class Schedule:
    """How it is computed: `RolesConfig` for the kernel."""

    CONSUMERS: gl.constexpr
    Q_STAGES: gl.constexpr
    O_PARTS: gl.constexpr  # in which a consumer hands O over
    PING_PONG: gl.constexpr
    THRESHOLD: gl.constexpr
    EIGHTHS: gl.constexpr
    DEGREE: gl.constexpr
    STARTS: gl.constexpr  # in tiles of small scores


@aggregate
class Buffers:
    """What the roles share."""

    q: PanelPipeline  # Q_STAGES slots for each consumer
    k: PanelPipeline
    v: PanelPipeline
    bounds: Pipeline  # intervals of the keys in k's slots, if they have any
    o: gl.shared_memory_descriptor  # a slot for each consumer
    o_full: gl.shared_memory_descriptor  # barriers, one for each consumer
    o_empty: gl.shared_memory_descriptor

    @gluon.jit
    def q_stage(self, schedule, round, CONSUMER: gl.constexpr):
        """Where a consumer's Q of this round is."""
        slot = round % schedule.Q_STAGES * schedule.CONSUMERS + CONSUMER
        return self.q.at(slot, (round // schedule.Q_STAGES) & 1)


@gluon.jit
def load(problem, schedule, buffers, scheduler, trace, q, k, v, bounds):
    """The loader: for each tile, ask for Q and the blocks of K and V that it sees, last first."""
    tile = gl.program_id(0)
    round = 0
    stage = buffers.k.at(0, 0)
    trace.enter(LOADER, round, 0, CLAIM)
    while tile < scheduler.number:
        mine, query, head, sequence = problem.locate(tile)
        begin, end = mine.visited(query)
        tile = scheduler.claim(round)
        kv_head = head // problem.GROUP
        entry = mine.entry(end - 1)
        for place in range(end - 1, begin - 1, -1):
            trace.enter(LOADER, round, end - 1 - place, LOAD)
            block = mine.block_of(entry)
            entry = mine.entry(place - 1)
            fill_keys(mine, buffers, stage, k, bounds, sequence, kv_head, block)
            if place == end - 1:
                for c in gl.static_range(schedule.CONSUMERS):
                    q_stage = buffers.q_stage(schedule, round, c)
                    first = query + c * problem.queries(WARPGROUP_ROWS)
                    buffers.q.fill(q_stage, q, mine.q_box(sequence, head, first))
            fill_values(mine, buffers, stage, v, sequence, kv_head, block)
            stage = stage.next()
        round += 1
        trace.enter(LOADER, round, 0, CLAIM)
    scheduler.retire()


@gluon.jit
def fold_scores(s, row_max, row_sum, problem, schedule, scales, block, STARTS: gl.constexpr):
    """A step of the online softmax: (p, row_max, row_sum, alpha); row_max is the reference, or with
    STARTS the start.
    """
    scale_log2, shift, weight = scales.of_block(problem, block)
    if STARTS:
        return raise_start(s, row_max, row_sum, scale_log2, shift, schedule.THRESHOLD)
    else:
        block_max = largest(s, row_max)[:, None]
        row_max, pivot, alpha = raise_reference(block_max, row_max, scale_log2, schedule.THRESHOLD)
        if schedule.EIGHTHS == 0:
            p = powers(s, scale_log2, pivot, shift, scales.PER_BLOCK)
        else:
            x = s * scale_log2 - (pivot - shift)[:, None]
            p = mixed_exp2(x, schedule.EIGHTHS, schedule.DEGREE)
            p = gl.convert_layout(p, s.type.layout, assert_trivial=True)
        return p, row_max, row_sum.grown(alpha, sums(p), weight), alpha


@gluon.jit
def attend(
    problem, schedule, scales, buffers, trace, q, q_stage, stage, query, begin, end, last, round,
    CONSUMER: gl.constexpr, STARTS: gl.constexpr
):  # fmt: skip
    """Fold the KV blocks at places end - 1 .. begin into the state of a consumer's rows, with S of
    one block in flight together with P V of the block before: (acc, row_max, row_sum, next stage of
    K and V). The tile's first block is at the place before `last`.
    """
    ME: gl.constexpr = FIXED_ROLES + CONSUMER
    _, full_begin, full_end, _ = problem.blocks(query, WARPGROUP_ROWS)
    acc, row_max, row_sum = first_state(problem, buffers)
    if STARTS:
        row_max = -row_max
    entry = problem.entry(end - 1)
    block = problem.block_of(entry)
    buffers.k.wait(stage)
    trace.enter(ME, round, last - end, SCORE)
    s = warpgroup_mma_wait(0, deps=[multiply_qk(q, buffers.k.tile(stage), scales.SCORES)])
    buffers.k.release(stage)
    trace.enter(ME, round, last - end, SOFTMAX)
    s = problem.scored(s, query, block)
    if problem.LEFT or problem.RIGHT or problem.EDGE:
        s = problem.masked(s, query, block)
    if problem.lists.ON:
        s = mask_listed(s, problem, query, entry, buffers.bounds, stage, CONSUMER)
    p, row_max, row_sum, alpha = fold_scores(
        s, row_max, row_sum, problem, schedule, scales, block, STARTS
    )
    trace.enter(ME, round, last - end, CORRECT)
    p = rounded(p, buffers.v.tile(stage), acc)
    for place in range(end - 2, begin - 1, -1):
        entry = problem.entry(place)
        block = problem.block_of(entry)
        before = stage
        stage = stage.next()
        buffers.k.wait(stage)
        if schedule.PING_PONG:
            named_barrier_sync(CONSUMER)
        trace.enter(ME, round, last - 1 - place, SCORE)
        s_token = multiply_qk(q, buffers.k.tile(stage), scales.SCORES)
        if schedule.THRESHOLD > 0:
            acc = corrected(acc, alpha)
        buffers.v.wait(before)
        acc_token = multiply_pv(p, buffers.v.tile(before), acc)
        if schedule.PING_PONG:
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)
        s = warpgroup_mma_wait(acc.PANELS, deps=[s_token])
        buffers.k.release(stage)
        trace.enter(ME, round, last - 1 - place, SOFTMAX)
        s = problem.scored(s, query, block)
        if problem.CUT:
            if (block >= full_end) | (block < full_begin):
                s = problem.masked(s, query, block)
        if problem.lists.ON:
            s = mask_listed(s, problem, query, entry, buffers.bounds, stage, CONSUMER)
        p, row_max, row_sum, alpha = fold_scores(
            s, row_max, row_sum, problem, schedule, scales, block, STARTS
        )
        trace.enter(ME, round, last - 1 - place, CORRECT)
        acc = acc.wait(acc_token)
        buffers.v.release(before)
        p = rounded(p, buffers.v.tile(stage), acc)
        if schedule.THRESHOLD == 0:
            acc = acc.rescaled(alpha)
    if schedule.THRESHOLD > 0:
        acc = corrected(acc, alpha)
    buffers.q.release(q_stage)
    buffers.v.wait(stage)
    trace.enter(ME, round, 0, DRAIN)
    acc_token = multiply_pv(p, buffers.v.tile(stage), acc)
    acc = acc.wait(acc_token)
    buffers.v.release(stage)
    if STARTS:
        row_max = reference_of(row_max, scales.SHIFT)
    return acc, row_max, row_sum, stage.next()


@gluon.jit
def compute(
    problem, schedule, scales, buffers, trace, o, lse_out, stage, query, head, sequence, round,
    CONSUMER: gl.constexpr, STARTS: gl.constexpr
):  # fmt: skip
    """A consumer's 64 rows of a tile whose queries begin at `query`: the next stage of K and V."""
    ME: gl.constexpr = FIXED_ROLES + CONSUMER
    first, last = problem.visited(query)
    query += CONSUMER * problem.queries(WARPGROUP_ROWS)
    begin, end = problem.seen(query, first, last)
    q_stage = buffers.q_stage(schedule, round, CONSUMER)
    buffers.q.wait(q_stage)
    q = buffers.q.tile(q_stage).pair()
    if problem.UNEVEN:
        stage = pass_over(buffers, schedule, stage, last - end, CONSUMER)
    acc, row_max, row_sum, stage = attend(
        problem, schedule, scales, buffers, trace, q, q_stage, stage, query, begin, end, last,
        round, CONSUMER, STARTS
    )  # fmt: skip
    if problem.LEFT:
        stage = pass_over(buffers, schedule, stage, begin - first, CONSUMER)
    out, lse = acc.finalized(row_max - scales.SHIFT, row_sum.total())
    if scales.FP8:
        out = out.scaled(scales.value)
    trace.enter(ME, round, 0, HAND_OVER)
    problem.store_lse(lse_out, lse, sequence, head, query)
    parts = out.parts(o.block_type.shape[-1])
    o_tile = as_matrix(buffers.o.index(CONSUMER))
    for i in gl.static_range(schedule.O_PARTS):
        turn = round * schedule.O_PARTS + i
        mbarrier.wait(buffers.o_empty.index(CONSUMER), (turn & 1) ^ 1)
        o_tile.store(parts[i].to(o.dtype))
        fence_async_shared()
        mbarrier.arrive(buffers.o_full.index(CONSUMER), count=1)
    return stage


@gluon.jit
def consume(
    problem, schedule, scales, buffers, scheduler, trace, o, lse_out, CONSUMER: gl.constexpr
):
    """A consumer: 64 rows of each tile."""
    ME: gl.constexpr = FIXED_ROLES + CONSUMER
    tile = gl.program_id(0)
    round = 0
    stage = buffers.k.at(0, 0)
    if schedule.PING_PONG:
        if CONSUMER == schedule.CONSUMERS - 1:
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)  # consumer 0 begins
    trace.enter(ME, round, 0, AWAIT)
    while tile < scheduler.number:
        mine, query, head, sequence = problem.locate(tile)
        own_query = query + CONSUMER * problem.queries(WARPGROUP_ROWS)
        tile_scales = scales.of_tile(mine, own_query, head, sequence)
        if schedule.STARTS and tile_scales.largest_score() <= LIMIT:
            stage = compute(
                mine, schedule, tile_scales, buffers, trace, o, lse_out, stage, query, head,
                sequence, round, CONSUMER, True
            )  # fmt: skip
        else:
            stage = compute(
                mine, schedule, tile_scales, buffers, trace, o, lse_out, stage, query, head,
                sequence, round, CONSUMER, False
            )  # fmt: skip
        tile = scheduler.receive(round)
        round += 1
        trace.enter(ME, round, 0, AWAIT)


@gluon.jit
def store(problem, schedule, buffers, scheduler, trace, o):
    """The storer: copy each tile's O to memory as the consumers hand it over."""
    tile = gl.program_id(0)
    round = 0
    trace.enter(STORER, round, 0, IDLE)
    while tile < scheduler.number:
        mine, query, head, sequence = problem.locate(tile)
        for i in gl.static_range(schedule.O_PARTS):
            turn = round * schedule.O_PARTS + i
            for c in gl.static_range(schedule.CONSUMERS):
                mbarrier.wait(buffers.o_full.index(c), turn & 1)
                trace.enter(STORER, round, i * schedule.CONSUMERS + c, STORE)
                box = mine.q_box(sequence, head, query + c * problem.queries(WARPGROUP_ROWS))
                store_tile(o, moved(box, i * o.block_type.shape[-1]), buffers.o.index(c))
                tma.store_wait(0)
                mbarrier.arrive(buffers.o_empty.index(c), count=1)
                trace.enter(STORER, round, i * schedule.CONSUMERS + c + 1, IDLE)
        tile = scheduler.receive(round)
        round += 1


@gluon.jit(do_not_specialize=COUNTS + MORE_COUNTS)
def forward_kernel(
    q, k, v, o, q_second, k_second, v_second,
    lse_out, counters, plan, slopes, sinks, bounds, lists, q_scale, k_scale, v_scale, v_reference,
    stamps,
    q_length, kv_length, heads, batch, section, window_left, window_right, scale_log2, cap_scale,
    kv_apart, slopes_batch_stride, slopes_head_stride,
    batch_lines, head_lines, listed_blocks, listed_tiles,
    HEADS: gl.constexpr, GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    EDGE: gl.constexpr, CUT: gl.constexpr, UNEVEN: gl.constexpr, CAP: gl.constexpr,
    RAGGED: gl.constexpr, PACKED: gl.constexpr, ALIBI: gl.constexpr, SINK: gl.constexpr,
    LISTED: gl.constexpr, PANELS: gl.constexpr, PANELS_V: gl.constexpr,
    FP8: gl.constexpr, FP16_SCORES: gl.constexpr, PER_BLOCK: gl.constexpr, SHIFT: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    PING_PONG: gl.constexpr, SCHEDULER: gl.constexpr,
    THRESHOLD: gl.constexpr, EIGHTHS: gl.constexpr, DEGREE: gl.constexpr, STARTS: gl.constexpr,
    TRACED_ROUNDS: gl.constexpr, TRACED_BLOCKS: gl.constexpr
):  # fmt: skip
    """Divide the warps of a program into consumers, four each, one loader and one storer."""
    problem = make_query_problem(
        plan, slopes, sinks, lists, q_length, kv_length, heads, batch, section, window_left,
        window_right, scale_log2, cap_scale, kv_apart, slopes_batch_stride, slopes_head_stride,
        batch_lines, head_lines, listed_blocks, listed_tiles, HEADS, GROUP, LEFT, RIGHT, EDGE, CUT,
        UNEVEN, CAP, RAGGED, PACKED, ALIBI, SINK, LISTED, CONSUMERS, k.block_type.shape[-2]
    )  # fmt: skip
    scales = make_scales(
        q_scale, k_scale, v_scale, v_reference, FP8, FP16_SCORES, PER_BLOCK, SHIFT
    )  # fmt: skip
    q, k = make_boxes(q, q_second, PANELS), make_boxes(k, k_second, PANELS)
    v = make_boxes(v, v_second, PANELS_V)
    O_PARTS: gl.constexpr = number_of_parts(v, o.block_type.shape[-1], FP8)
    schedule = Schedule(
        CONSUMERS, Q_STAGES, O_PARTS, PING_PONG, THRESHOLD, EIGHTHS, DEGREE, STARTS
    )  # fmt: skip
    trace = Trace(stamps, CONSUMERS, TRACED_ROUNDS, TRACED_BLOCKS, TRACED_ROUNDS > 0)
    q_pipeline = make_panel_pipeline(q, CONSUMERS * Q_STAGES, 1)
    k_pipeline = make_panel_pipeline(k, STAGES, CONSUMERS)
    v_pipeline = make_panel_pipeline(v, STAGES, CONSUMERS)
    bounds_pipeline = k_pipeline.first
    if LISTED:
        bounds_pipeline = make_companion(bounds, k_pipeline.first, STAGES, CONSUMERS)
    o_full, o_empty = make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1)
    o_tiles = make_slots(o, CONSUMERS)
    buffers = Buffers(q_pipeline, k_pipeline, v_pipeline, bounds_pipeline, o_tiles, o_full, o_empty)
    scheduler = make_scheduler(problem.num_tiles(), counters, SCHEDULER, CONSUMERS + 1)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, scales, buffers, scheduler, trace, o, lse_out, 0)),
                (consume, (problem, schedule, scales, buffers, scheduler, trace, o, lse_out, 1)),
                (load, (problem, schedule, buffers, scheduler, trace, q, k, v, bounds)),
                (store, (problem, schedule, buffers, scheduler, trace, o)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, scales, buffers, scheduler, trace, o, lse_out, 0)),
                (consume, (problem, schedule, scales, buffers, scheduler, trace, o, lse_out, 1)),
                (consume, (problem, schedule, scales, buffers, scheduler, trace, o, lse_out, 2)),
                (load, (problem, schedule, buffers, scheduler, trace, q, k, v, bounds)),
                (store, (problem, schedule, buffers, scheduler, trace, o)),
            ],
            [4, 4, 1, 1],
            [160, 160, 24, 24],
        )
