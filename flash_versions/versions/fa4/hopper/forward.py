"""FlashAttention 4, forward, on Hopper: roles with states, and less work for the consumers.

`flash_versions/lessons/fa4_hopper.py` explains conditional rescaling and the polynomial. In this
kernel, which has options, FA3's consumers no longer wait for their own stores at the end of a tile.

* Roles. Loader, consumers (products and softmax) and storer are separate programs of the kernel.
  `roles.py` has their states and transitions as a table, and the code enters them by name. An
  instrumented launch notes when (`roles.Trace`), and a test compares that with the table.
* Conditional rescaling (`softmax.py`, `correction.py`) is a state of the consumers and not a role,
  because Hopper's accumulator is in the consumers' registers, which no other warp can read.
  (On Blackwell it is in tensor memory, and separate warps correct it.) It comes behind the issue of
  the next block's S, so that the tensor cores work meanwhile; rescaling in every block comes before
  it, as in FA3.
* One multiply-add for an exponent in FP8 with scales of heads or tensors (`starts.py`).
* The storer copies O, or its last part, while the consumers begin the next tile.

Where products are so short that FA3's three consumers in order are faster, or programs share tiles,
version "fa4" launches FA3's kernel (`prefers_order`, `shares_tail` and, for the caller's 8-bit
tensors only, `prefers_order_in_fp8` in fa3/hopper/config.py).

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
    consumer       the storer has copied its last O            o.empty
    storer         a consumer's O is in its buffer             o.full
    the others     the tile that the loader has claimed        scheduler.full

Interval masks have slots of their own, which the loader fills with K's (`bounds`).

The loader and the loop over blocks of keys are FA3's, `produce` and `attend`, which enter states,
fold scores and rescale by the methods of a schedule. This text has FA4's schedule, what consumers
do around the loop, and the storer.

Source. Zadouri et al. 2026, "FlashAttention-4", arXiv:2603.05451; this kernel takes from it what
Hopper can use.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flash_versions.versions.fa3.fp8.pairs import largest, powers, sums
from flash_versions.versions.fa3.fp8.scales import make_scales
from flash_versions.versions.fa3.hopper.forward import (
    attend,
    first_state,
    make_buffers,
    pass_over,
    produce,
)
from flash_versions.versions.fa3.hopper.panels import make_boxes, moved, number_of_parts
from flash_versions.versions.fa3.hopper.problem import COUNTS, MORE_COUNTS, make_query_problem
from flash_versions.versions.fa4.exp2 import mixed_exp2
from flash_versions.versions.fa4.hopper.correction import corrected
from flash_versions.versions.fa4.hopper.roles import FIXED_ROLES, LOADER, STORER, Trace
from flash_versions.versions.fa4.hopper.starts import LIMIT, raise_start, reference_of
from flash_versions.versions.fa4.softmax import raise_reference
from flash_versions.versions.tiles.pipeline import as_matrix, named_barrier_arrive
from flash_versions.versions.tiles.tile_scheduler import make_scheduler
from flash_versions.versions.tiles.triton_compat import aggregate, replaced, store_tile
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS


@aggregate
class Schedule:
    """How it is computed: `RolesConfig` for the kernel, and what `attend` does as it says."""

    CONSUMERS: gl.constexpr
    Q_STAGES: gl.constexpr
    O_PARTS: gl.constexpr  # in which a consumer hands O over
    PING_PONG: gl.constexpr
    LATE_WAIT: gl.constexpr  # FA3's
    THRESHOLD: gl.constexpr
    EIGHTHS: gl.constexpr
    DEGREE: gl.constexpr
    STARTS: gl.constexpr  # in tiles of small scores
    trace: Trace
    round: gl.tensor  # of a tile
    last: gl.tensor  # the tile's first block is at the place before

    @gluon.jit
    def first_state(self, problem, buffers, SPLIT: gl.constexpr):
        """FA3's; with STARTS, row_max is the start."""
        acc, row_max, row_sum = first_state(problem, buffers)
        if self.STARTS:
            row_max = -row_max
        return acc, row_max, row_sum

    @gluon.jit
    def fold_scores(self, s, row_max, row_sum, problem, scales, block):
        """A step of the online softmax: (p, row_max, row_sum, alpha); row_max is the reference, or
        with STARTS the start.
        """
        scale_log2, shift, weight = scales.of_block(problem, block)
        if self.STARTS:
            return raise_start(s, row_max, row_sum, scale_log2, shift, self.THRESHOLD)
        else:
            block_max = largest(s, row_max)[:, None]
            row_max, pivot, alpha = raise_reference(block_max, row_max, scale_log2, self.THRESHOLD)
            if self.EIGHTHS == 0:
                p = powers(s, scale_log2, pivot, shift, scales.PER_BLOCK)
            else:
                x = s * scale_log2 - (pivot - shift)[:, None]
                p = mixed_exp2(x, self.EIGHTHS, self.DEGREE)
                p = gl.convert_layout(p, s.type.layout, assert_trivial=True)
            return p, row_max, row_sum.grown(alpha, sums(p), weight), alpha

    @gluon.jit
    def rescaled_late(self, acc, alpha):
        """Under a threshold, correct acc here, where the tensor cores compute S."""
        return corrected(acc, alpha) if self.THRESHOLD > 0 else acc

    @gluon.jit
    def rescaled(self, acc, alpha):
        """Without a threshold, as FA3."""
        return acc if self.THRESHOLD > 0 else acc.rescaled(alpha)

    @gluon.jit
    def reference(self, row_max, scales):
        """The reference of a row: with STARTS, of its start."""
        return reference_of(row_max, scales.SHIFT) if self.STARTS else row_max

    @gluon.jit
    def enter(self, STATE: gl.constexpr, place, CONSUMER: gl.constexpr):
        """Note that a consumer enters a state, for the block at a place."""
        block = 0 if STATE == "drain" else self.last - 1 - place
        self.trace.enter(FIXED_ROLES + CONSUMER, self.round, block, "consumer", STATE)

    @gluon.jit
    def enter_as_loader(self, STATE: gl.constexpr, round, block):
        """Note that the loader does."""
        self.trace.enter(LOADER, round, block, "loader", STATE)


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
    mine = replaced(schedule, STARTS=STARTS, round=gl.to_tensor(round), last=gl.to_tensor(last))
    acc, row_max, row_sum, stage = attend(
        problem, mine, scales, buffers, q, q_stage, stage, query, begin, end, True, CONSUMER
    )
    if problem.LEFT:
        stage = pass_over(buffers, schedule, stage, begin - first, CONSUMER)
    out, lse = acc.finalized(row_max - scales.SHIFT, row_sum.total())
    if scales.FP8:
        out = out.scaled(scales.value)
    trace.enter(ME, round, 0, "consumer", "hand over")
    problem.store_lse(lse_out, lse, sequence, head, query)
    parts = out.parts(o.block_type.shape[-1])
    o_tile = as_matrix(buffers.o.tiles.index(CONSUMER))
    for i in gl.static_range(schedule.O_PARTS):
        turn = round * schedule.O_PARTS + i
        mbarrier.wait(buffers.o.empty.index(CONSUMER), (turn & 1) ^ 1)
        o_tile.store(parts[i].to(o.dtype))
        fence_async_shared()
        mbarrier.arrive(buffers.o.full.index(CONSUMER), count=1)
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
    trace.enter(ME, round, 0, "consumer", "await")
    while tile < scheduler.number:
        mine, query, head, sequence = problem.locate(tile)
        own_query = query + CONSUMER * problem.queries(WARPGROUP_ROWS)
        tile_scales = scales.of_tile(mine, own_query, head, sequence)
        given = (
            mine, schedule, tile_scales, buffers, trace, o, lse_out, stage, query, head, sequence,
            round
        )  # fmt: skip
        if schedule.STARTS and tile_scales.largest_score() <= LIMIT:
            stage = compute(*given, CONSUMER, True)
        else:
            stage = compute(*given, CONSUMER, False)
        tile = scheduler.receive(round)
        round += 1
        trace.enter(ME, round, 0, "consumer", "await")


@gluon.jit
def store(problem, schedule, buffers, scheduler, trace, o):
    """The storer: copy each tile's O to memory as the consumers hand it over."""
    tile = gl.program_id(0)
    round = 0
    trace.enter(STORER, round, 0, "storer", "idle")
    while tile < scheduler.number:
        mine, query, head, sequence = problem.locate(tile)
        for i in gl.static_range(schedule.O_PARTS):
            turn = round * schedule.O_PARTS + i
            for c in gl.static_range(schedule.CONSUMERS):
                mbarrier.wait(buffers.o.full.index(c), turn & 1)
                part = i * schedule.CONSUMERS + c
                trace.enter(STORER, round, part, "storer", "store")
                box = mine.q_box(sequence, head, query + c * problem.queries(WARPGROUP_ROWS))
                store_tile(o, moved(box, i * o.block_type.shape[-1]), buffers.o.tiles.index(c))
                tma.store_wait(0)
                mbarrier.arrive(buffers.o.empty.index(c), count=1)
                trace.enter(STORER, round, part + 1, "storer", "idle")
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
    trace = Trace(stamps, CONSUMERS, TRACED_ROUNDS, TRACED_BLOCKS, TRACED_ROUNDS > 0)
    none = gl.to_tensor(0)
    schedule = Schedule(
        CONSUMERS, Q_STAGES, O_PARTS, PING_PONG, False, THRESHOLD, EIGHTHS, DEGREE, STARTS, trace,
        none, none
    )  # fmt: skip
    buffers = make_buffers(q, k, v, bounds, o, CONSUMERS, STAGES, Q_STAGES, LISTED, True)
    scheduler = make_scheduler(problem.num_tiles(), counters, SCHEDULER, CONSUMERS + 1)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, scales, buffers, scheduler, trace, o, lse_out, 0)),
                (consume, (problem, schedule, scales, buffers, scheduler, trace, o, lse_out, 1)),
                (produce, (problem, schedule, buffers, scheduler, q, k, v, bounds)),
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
                (produce, (problem, schedule, buffers, scheduler, q, k, v, bounds)),
                (store, (problem, schedule, buffers, scheduler, trace, o)),
            ],
            [4, 4, 1, 1],
            [160, 160, 24, 24],
        )
