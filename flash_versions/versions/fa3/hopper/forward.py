"""FlashAttention 3, forward, on Hopper: the asynchrony written out by hand.

`flash_versions/lessons/fa3_hopper.py` explains warps with different jobs, the overlap of S with P V
of the block before, and ping-pong. This kernel has options, and more:

* P stays in registers: the accumulator of S, rounded to 16 bits, is the left operand of P V.
* Persistent programs. One program per SM walks from tile to tile, and the producer loads for the
  next tile while the consumers compute and store this one. For that O has a buffer of its own, and
  Q has two. Above head_dim 128 shared memory is too small for that: Q has one buffer, which is
  empty when a tile's last S is computed; O leaves in parts of 64 or 128 columns, one after the
  other.
* A row's sum is in parts until its tile ends, one for each of the four threads that share the row
  (`wgmma.RowSums`). Its maximum has to be whole in every block.
* No work for nothing. Of the blocks that a tile visits, a causal mask or a window may hide some
  from all rows of one consumer. It gives their slots back unread (`pass_over`) and leaves the
  tensor cores to the others.

A head_dim between the powers of two is two panels, such as 192 = 128 + 64 (`panels.py`): then `acc`
is two accumulators, and a product with it two products. From 65 to 96 dims and in FP8 with scores
of 32 bits, where products are short, three consumers that wait for each product (`attend_in_order`)
may be faster than two that overlap theirs (`config.prefers_order` and `prefers_order_in_fp8`).

One program with two consumers. Time runs from left to right, [..] is work of the tensor cores.
Blocks are counted in the order in which they are visited, from the last block of keys to the first:

    producer     K0 Q V0  K1 V1  K2 V2  waits for `empty` slots, then K0' Q' V0' of the next
                     | full
    consumer 0      [S0] softmax [S1 P0V0] softmax [S2 P1V1] softmax   [P2V2] / l, store O
                                 |arrive           |
    consumer 1           [S0] softmax    [S1 P0V0] softmax   [S2 P1V1] softmax   [P2V2] / l, store O

    waits           for                                             at
    producer        both consumers have read a slot of K or V       k.empty v.empty
    producer        a consumer has read its slot of Q               q.empty
    producer        both have taken the tile of two rounds ago      scheduler.empty
    consumer        the producer's copy has landed                  k.full v.full q.full
    consumer        the other consumer has issued its products      its named barrier
    consumer        its own products                                warpgroup_mma_wait
    consumer        its own part of O before has left               tma.store_wait
    consumer        the tile that the producer claimed              scheduler.full

Cost. A block of 128 keys and 64 rows at head_dim 128 takes 1024 cycles of the tensor cores. Its
exponentials, 66 for every warp with 8 cycles each, take half as long and hide behind the products
of the other consumer. At head_dim 64 the products take half the time, as long as the exponentials.

The last wait of the loop comes after the softmax in this text, and ptxas moves it before the
exponentials. P V is then complete before they begin, and the compiler can mix rescaling acc and
rounding P with them. LATE_WAIT puts a branch in between, so that the wait stays where the paper has
it. On an H200 that is slower (docs/learn/progression.md), because the other consumer keeps the
tensor cores busy anyway.

Source: Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
Low-precision", arXiv:2407.08608, Algorithm 2 and sections 3.1 and 3.2. Its code, too, adds up the
parts of a row's sum at the end, and has the order of causal tiles by weight, in sections of heads
whose keys fit in the L2 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from flash_versions.versions.fa3.fp8.pairs import softmax_step
from flash_versions.versions.fa3.fp8.scales import make_scales
from flash_versions.versions.fa3.hopper.intervals import fill_keys, mask_listed
from flash_versions.versions.fa3.hopper.operands import is_fp8
from flash_versions.versions.fa3.hopper.panels import (
    PanelPipeline,
    make_boxes,
    make_panel_pipeline,
    moved,
    multiply_pv,
    multiply_qk,
    per_row,
    rounded,
    zero_output,
)
from flash_versions.versions.fa3.hopper.problem import COUNTS, MORE_COUNTS, make_query_problem
from flash_versions.versions.fa3.hopper.totals import Totals, merge_rows
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
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, no_sums


@aggregate
class Schedule:
    """How it is computed: `HopperConfig` for the kernel. The methods are what FA4's kernel, which
    runs `produce` and `attend` with a schedule of its own, does otherwise.
    """

    CONSUMERS: gl.constexpr
    Q_STAGES: gl.constexpr
    OVERLAP: gl.constexpr
    PING_PONG: gl.constexpr
    LATE_WAIT: gl.constexpr

    @gluon.jit
    def first_state(self, problem, buffers, SPLIT: gl.constexpr):
        """See `first_state`."""
        return first_state(problem, buffers, SPLIT)

    @gluon.jit
    def fold_scores(self, s, row_max, row_sum, problem, scales, block):
        """A step of the online softmax: (p, row_max, row_sum, alpha)."""
        # In 16 bits, shift is 0 and weight 1.
        scale_log2, shift, weight = scales.of_block(problem, block)
        return softmax_step(s, row_max, row_sum, scale_log2, shift, weight, scales.PER_BLOCK)

    @gluon.jit
    def rescaled_late(self, acc, alpha):
        """acc times the alpha of a block before the block's P V is issued."""
        return acc

    @gluon.jit
    def rescaled(self, acc, alpha):
        """acc times the alpha of a block when the P V before is complete."""
        return acc.rescaled(alpha)

    @gluon.jit
    def reference(self, row_max, scales):
        """What row_sum refers to, when all keys are folded."""
        return row_max

    @gluon.jit
    def enter(self, STATE: gl.constexpr, place, CONSUMER: gl.constexpr):
        """A consumer enters a state of its role, which FA4 can note."""

    @gluon.jit
    def enter_as_loader(self, STATE: gl.constexpr, round, block):
        """The same of the producer."""


@aggregate
class Buffers:
    """What the partitions share."""

    q: PanelPipeline  # Q_STAGES slots for each consumer
    k: PanelPipeline
    v: PanelPipeline
    bounds: Pipeline  # intervals of the keys in k's slots, if they have any
    o: Pipeline  # a slot for each consumer; the barriers are of FA4, where another warp reads it

    @gluon.jit
    def q_stage(self, schedule, round, CONSUMER: gl.constexpr):
        """Where a consumer's Q of this round is."""
        slot = round % schedule.Q_STAGES * schedule.CONSUMERS + CONSUMER
        return self.q.at(slot, (round // schedule.Q_STAGES) & 1)


@gluon.jit
def make_buffers(
    q, k, v, bounds, o, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    LISTED: gl.constexpr, HANDED_OVER: gl.constexpr
):  # fmt: skip
    """Allocate them for boxes; if O is HANDED_OVER, with barriers of its slots."""
    q_pipeline = make_panel_pipeline(q, CONSUMERS * Q_STAGES, 1)
    k_pipeline = make_panel_pipeline(k, STAGES, CONSUMERS)
    v_pipeline = make_panel_pipeline(v, STAGES, CONSUMERS)
    full, empty = k_pipeline.full, k_pipeline.empty
    bounds_pipeline = Pipeline(k_pipeline.tiles, full, empty, STAGES)  # anything
    if LISTED:
        bounds_pipeline = make_companion(bounds, k_pipeline, STAGES, CONSUMERS)
    if HANDED_OVER:
        full, empty = make_barriers(CONSUMERS, 1), make_barriers(CONSUMERS, 1)
    o_pipeline = Pipeline(make_slots(o, CONSUMERS), full, empty, CONSUMERS)
    return Buffers(q_pipeline, k_pipeline, v_pipeline, bounds_pipeline, o_pipeline)


@gluon.jit
def fill_values(problem, buffers, stage, v, sequence, kv_head, block):
    """Producer: load a block of V, which is stored transposed in FP8."""
    key = block * problem.BLOCK_KV
    if is_fp8(v.first.dtype):
        buffers.v.fill(stage, v, [sequence, kv_head, 0, key])
    else:
        buffers.v.fill(stage, v, problem.kv_box(sequence, kv_head, key))


@gluon.jit
def pass_over(buffers, schedule, stage, blocks, CONSUMER: gl.constexpr):
    """Consumer: give back the slots of so many blocks, of which none of its rows sees a key: the
    stage behind them.

    To arrive before a slot is full could count as having read what was there before. K's slot comes
    before the turn, because the consumer that has the turn may be waiting for it.
    """
    for _ in range(blocks):
        buffers.k.wait(stage)
        buffers.k.release(stage)
        if schedule.PING_PONG:
            named_barrier_sync(CONSUMER)
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)
        buffers.v.wait(stage)
        buffers.v.release(stage)
        stage = stage.next()
    return stage


@gluon.jit
def produce(problem, schedule, buffers, scheduler, q, k, v, bounds):
    """The producer: for each tile, load Q and the blocks of K and V that it sees, last first."""
    tile = gl.program_id(0)
    round = 0
    stage = buffers.k.at(0, 0)
    schedule.enter_as_loader("claim", round, 0)
    while tile < scheduler.number:
        mine, query, head, sequence = problem.locate(tile)
        begin, end = mine.visited(query)
        tile = scheduler.claim(round)
        kv_head = head // problem.GROUP
        entry = mine.entry(end - 1)
        for place in range(end - 1, begin - 1, -1):
            schedule.enter_as_loader("load", round, end - 1 - place)
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
        schedule.enter_as_loader("claim", round, 0)
    scheduler.retire()


@gluon.jit
def first_state(problem, buffers, SPLIT: gl.constexpr = False):
    """(acc, row_max, row_sum) of rows that have seen no key, but for a sink (`sink_state`), which
    with splits comes last.
    """
    FP8: gl.constexpr = is_fp8(buffers.v.tiles.dtype)
    scores: gl.constexpr = accumulator_layout(problem.BLOCK_KV, FP8)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    acc = zero_output(buffers.v.slots(buffers.v.PANELS), FP8)
    row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, rows)
    row_sum = no_sums(problem.BLOCK_KV, scores)
    if problem.mods.SINK and not SPLIT:
        sink = problem.sinks(WARPGROUP_ROWS, rows)
        row_max = gl.zeros([WARPGROUP_ROWS], gl.float32, rows) + sink
        row_sum = row_sum.spread(gl.where(row_max == float("-inf"), 0.0, 1.0))
    return acc, row_max, row_sum


@gluon.jit
def attend(
    problem, schedule, scales, buffers, q, q_stage, stage, query, begin, end, is_last,
    CONSUMER: gl.constexpr, SPLIT: gl.constexpr = False
):  # fmt: skip
    """Fold the KV blocks at places end - 1 .. begin into the state of a consumer's rows, with S of
    one block in flight together with P V of the block before: (acc, row_max, row_sum, next stage of
    K and V). Of rows in several splits these are the blocks of one; Q is read until the last.
    """
    _, full_begin, full_end, _ = problem.blocks(query, WARPGROUP_ROWS)
    acc, row_max, row_sum = schedule.first_state(problem, buffers, SPLIT)
    entry = problem.entry(end - 1)
    block = problem.block_of(entry)
    buffers.k.wait(stage)
    schedule.enter("score", end - 1, CONSUMER)
    if SPLIT and schedule.PING_PONG:  # consumers may have unlike numbers of splits: a turn to each
        named_barrier_sync(CONSUMER)  # block keeps their turns alike
    s_token = multiply_qk(q, buffers.k.tile(stage), scales.SCORES)
    if SPLIT and schedule.PING_PONG:
        named_barrier_arrive(CONSUMER, schedule.CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s_token])
    buffers.k.release(stage)
    schedule.enter("softmax", end - 1, CONSUMER)
    s = problem.scored(s, query, block)
    if problem.LEFT or problem.RIGHT or problem.EDGE:
        s = problem.masked(s, query, block)
    if problem.lists.ON:
        s = mask_listed(s, problem, query, entry, buffers.bounds, stage, CONSUMER)
    p, row_max, row_sum, alpha = schedule.fold_scores(s, row_max, row_sum, problem, scales, block)
    schedule.enter("correct", end - 1, CONSUMER)
    p = rounded(p, buffers.v.tile(stage), acc)
    if schedule.LATE_WAIT:
        buffers.k.wait(stage.next(), end - 1 > begin)
    for place in range(end - 2, begin - 1, -1):
        entry = problem.entry(place)
        block = problem.block_of(entry)
        before = stage
        stage = stage.next()
        if not schedule.LATE_WAIT:
            buffers.k.wait(stage)
        if schedule.PING_PONG:
            named_barrier_sync(CONSUMER)
        schedule.enter("score", place, CONSUMER)
        s_token = multiply_qk(q, buffers.k.tile(stage), scales.SCORES)
        acc = schedule.rescaled_late(acc, alpha)
        buffers.v.wait(before)
        acc_token = multiply_pv(p, buffers.v.tile(before), acc)
        if schedule.PING_PONG:
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)
        s = warpgroup_mma_wait(acc.PANELS, deps=[s_token])
        buffers.k.release(stage)
        schedule.enter("softmax", place, CONSUMER)
        s = problem.scored(s, query, block)
        if problem.CUT:
            if (block >= full_end) | (block < full_begin):
                s = problem.masked(s, query, block)
        if problem.lists.ON:
            s = mask_listed(s, problem, query, entry, buffers.bounds, stage, CONSUMER)
        p, row_max, row_sum, alpha = schedule.fold_scores(
            s, row_max, row_sum, problem, scales, block
        )
        if schedule.LATE_WAIT:
            buffers.k.wait(stage.next(), place > begin)
        schedule.enter("correct", place, CONSUMER)
        acc = acc.wait(acc_token)
        buffers.v.release(before)
        p = rounded(p, buffers.v.tile(stage), acc)
        acc = schedule.rescaled(acc, alpha)
    acc = schedule.rescaled_late(acc, alpha)
    if SPLIT:
        if is_last:
            buffers.q.release(q_stage)
    else:
        buffers.q.release(q_stage)
    buffers.v.wait(stage)
    schedule.enter("drain", begin, CONSUMER)
    acc_token = multiply_pv(p, buffers.v.tile(stage), acc)
    acc = acc.wait(acc_token)
    buffers.v.release(stage)
    return acc, schedule.reference(row_max, scales), row_sum, stage.next()


@gluon.jit
def attend_in_order(
    problem, schedule, scales, buffers, q, q_stage, stage, query, begin, end, CONSUMER: gl.constexpr
):
    """`attend` without the overlap: each product is waited for before the next step."""
    _, full_begin, full_end, _ = problem.blocks(query, WARPGROUP_ROWS)
    acc, row_max, row_sum = first_state(problem, buffers)
    for place in range(end - 1, begin - 1, -1):
        entry = problem.entry(place)
        block = problem.block_of(entry)
        buffers.k.wait(stage)
        if schedule.PING_PONG:
            named_barrier_sync(CONSUMER)
        s_token = multiply_qk(q, buffers.k.tile(stage), scales.SCORES)
        if schedule.PING_PONG:
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)
        s = warpgroup_mma_wait(0, deps=[s_token])
        buffers.k.release(stage)
        s = problem.scored(s, query, block)
        if problem.LEFT or problem.RIGHT or problem.EDGE:
            if (block >= full_end) | (block < full_begin):
                s = problem.masked(s, query, block)
        if problem.lists.ON:
            s = mask_listed(s, problem, query, entry, buffers.bounds, stage, CONSUMER)
        p, row_max, row_sum, alpha = schedule.fold_scores(
            s, row_max, row_sum, problem, scales, block
        )
        acc = schedule.rescaled(acc, alpha)
        p = rounded(p, buffers.v.tile(stage), acc)
        buffers.v.wait(stage)
        acc_token = multiply_pv(p, buffers.v.tile(stage), acc)
        acc = acc.wait(acc_token)
        buffers.v.release(stage)
        stage = stage.next()
    buffers.q.release(q_stage)
    return acc, row_max, row_sum, stage


@gluon.jit
def attend_in_splits(
    problem, schedule, scales, buffers, q, q_stage, stage, query, begin, end, totals,
    CONSUMER: gl.constexpr
):  # fmt: skip
    """`attend` split by split (`totals.py`), the last one first, and to the sink behind them:
    (acc, row_max, row_sum, next stage), whose row_sum is that of whole rows.
    """
    acc, row_max, sums = first_state(problem, buffers, True)
    row_max, row_sum = per_row(row_max, acc.first), per_row(sums.total(), acc.first)
    high = end
    while high > begin:
        low = totals.first_place(problem, begin, high)
        acc, of_max, of_sum, stage = attend(
            problem, schedule, scales, buffers, q, q_stage, stage, query, low, high, low == begin,
            CONSUMER, True
        )  # fmt: skip
        row_max, row_sum = per_row(of_max, acc.first), per_row(of_sum.total(), acc.first)
        if low > begin:
            totals.close(acc, row_max, row_sum, high < end, CONSUMER)
        elif high < end:
            acc, row_max, row_sum = totals.merged(acc, row_max, row_sum, CONSUMER)
        high = low
    if problem.mods.SINK:
        layout: gl.constexpr = row_max.type.layout
        sink = gl.zeros([WARPGROUP_ROWS], gl.float32, layout)
        sink += problem.sinks(WARPGROUP_ROWS, layout)
        row_max, row_sum, alpha, _ = merge_rows(row_max, row_sum, sink, 1.0)
        acc = acc.rescaled(alpha)
    return acc, row_max, row_sum, stage


@gluon.jit
def consume(
    problem, schedule, scales, buffers, totals, scheduler, o, lse_out, CONSUMER: gl.constexpr
):
    """A consumer: 64 rows of each tile."""
    tile = gl.program_id(0)
    round = 0
    stage = buffers.k.at(0, 0)
    if schedule.PING_PONG:
        if CONSUMER == schedule.CONSUMERS - 1:
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)  # consumer 0 begins
    while tile < scheduler.number:
        mine, query, head, sequence = problem.locate(tile)
        first, last = mine.visited(query)
        query += CONSUMER * problem.queries(WARPGROUP_ROWS)
        begin, end = mine.seen(query, first, last)
        tile_scales = scales.of_tile(mine, query, head, sequence)
        q_stage = buffers.q_stage(schedule, round, CONSUMER)
        buffers.q.wait(q_stage)
        q = buffers.q.tile(q_stage).pair()
        if problem.UNEVEN:
            stage = pass_over(buffers, schedule, stage, last - end, CONSUMER)
        given = mine, schedule, tile_scales, buffers, q, q_stage, stage, query, begin, end
        if totals.SPLIT > 0:
            acc, row_max, row_sum, stage = attend_in_splits(*given, totals, CONSUMER)
        elif schedule.OVERLAP:
            acc, row_max, row_sum, stage = attend(*given, True, CONSUMER)
        else:
            acc, row_max, row_sum, stage = attend_in_order(*given, CONSUMER)
        if problem.LEFT:
            stage = pass_over(buffers, schedule, stage, begin - first, CONSUMER)
        if scales.FP8:
            row_max -= scales.SHIFT  # which row_sum counts
        if totals.SPLIT == 0:
            row_sum = row_sum.total()
        if problem.TAIL > 1:
            acc, row_max, row_sum, stores = totals.join(mine, acc, row_max, row_sum, CONSUMER)
        if problem.TAIL == 1 or stores:
            out, lse = acc.finalized(row_max, row_sum)
            if scales.FP8:
                out = out.scaled(tile_scales.value)
            mine.store_lse(lse_out, lse, sequence, head, query)
            COLUMNS: gl.constexpr = o.block_type.shape[-1]
            parts = out.parts(COLUMNS)
            box = mine.q_box(sequence, head, query)
            o_tile = buffers.o.tiles.index(CONSUMER)
            for i in gl.static_range(len(parts)):
                tma.store_wait(0)  # of the part before
                as_matrix(o_tile).store(parts[i].to(o.dtype))
                fence_async_shared()
                store_tile(o, moved(box, i * COLUMNS), o_tile)
        tile = scheduler.receive(round)
        round += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS + MORE_COUNTS)
def forward_kernel(
    q, k, v, o, q_second, k_second, v_second,
    lse_out, counters, plan, slopes, sinks, bounds, lists, q_scale, k_scale, v_scale, v_reference,
    totals,
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
    OVERLAP: gl.constexpr, LATE_WAIT: gl.constexpr, SPLIT: gl.constexpr, TAIL: gl.constexpr
):  # fmt: skip
    """Divide the warps of a program into consumers, four each, and one producer. Of 64 K registers,
    those of a thread are the last list; Triton counts the producer's warp as a warpgroup.
    """
    problem = make_query_problem(
        plan, slopes, sinks, lists, q_length, kv_length, heads, batch, section, window_left,
        window_right, scale_log2, cap_scale, kv_apart, slopes_batch_stride, slopes_head_stride,
        batch_lines, head_lines, listed_blocks, listed_tiles, HEADS, GROUP, LEFT, RIGHT, EDGE, CUT,
        UNEVEN, CAP, RAGGED, PACKED, ALIBI, SINK, LISTED, CONSUMERS, k.block_type.shape[-2], TAIL
    )  # fmt: skip
    scales = make_scales(
        q_scale, k_scale, v_scale, v_reference, FP8, FP16_SCORES, PER_BLOCK, SHIFT
    )  # fmt: skip
    q, k = make_boxes(q, q_second, PANELS), make_boxes(k, k_second, PANELS)
    v = make_boxes(v, v_second, PANELS_V)
    totals = Totals(totals, counters, CONSUMERS, SPLIT)
    schedule = Schedule(CONSUMERS, Q_STAGES, OVERLAP, PING_PONG, LATE_WAIT)
    buffers = make_buffers(q, k, v, bounds, o, CONSUMERS, STAGES, Q_STAGES, LISTED, False)
    scheduler = make_scheduler(problem.num_pieces(), counters, SCHEDULER, CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, scales, buffers, totals, scheduler, o, lse_out, 0)),
                (consume, (problem, schedule, scales, buffers, totals, scheduler, o, lse_out, 1)),
                (produce, (problem, schedule, buffers, scheduler, q, k, v, bounds)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, scales, buffers, totals, scheduler, o, lse_out, 0)),
                (consume, (problem, schedule, scales, buffers, totals, scheduler, o, lse_out, 1)),
                (consume, (problem, schedule, scales, buffers, totals, scheduler, o, lse_out, 2)),
                (produce, (problem, schedule, buffers, scheduler, q, k, v, bounds)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
