"""FlashAttention 3, forward, on Hopper: the asynchrony written out by hand.

What the portable kernel wastes. Its warps all do the same: they issue loads, issue a product, wait
for it, compute a softmax, and while they do one, the units that do the others idle. Hopper's TMA
copies tiles and its tensor cores multiply them (WGMMA) while the warps that asked for it go on.

What changes.
* Warp specialisation. One producer warp only issues TMA loads; two or three warpgroups of consumers
  only compute, 64 query rows each. The registers that the producer does not need are given to the
  consumers. Rings of tiles with barriers that say `full` and `empty` stand between them.
* Overlap inside a warpgroup. S of block j is issued before P V of block j - 1; the softmax of j
  runs when S is there, whatever P V does. So the first block is peeled off, and P V is one behind.
* Ping-pong. Consumers take turns at the tensor cores: while one computes its softmax, the other has
  its products there.
* P stays in registers: the accumulator of S is, converted to 16 bits, the left operand of P V.
* Persistent programs. One per multiprocessor walks from tile to tile: Q has two buffers, O one of
  its own, so that the producer is already at the next tile while this one is finished and stored
  (at head_dim 256 there is no room for these: O leaves through the only buffer of Q).

One program with two consumers; a column is a stretch of time, [..] what the tensor cores do:

    producer     K0 Q V0  K1 V1  K2 V2  waits for `empty` slots, then K0' Q' V0' of the next
                     | full
    consumer 0      [S0] softmax [S1 P0V0] softmax [S2 P1V1] softmax   [P2V2] / l, store O
                                 |pass turn        |
    consumer 1           [S0] softmax    [S1 P0V0] softmax   [S2 P1V1] softmax   [P2V2] / l, store O

    who waits       for whom                                        at
    producer        both consumers have read a slot of K or V       k.empty v.empty
    producer        a consumer has read its slot of Q               q.empty
    producer        both have taken the tile of two rounds ago      scheduler.empty
    consumer        the producer's copy has landed                  k.full v.full q.full
    consumer        the other consumer has issued its products      a named barrier, its turn
    consumer        its own products                                warpgroup_mma_wait
    consumer        its own O of the tile before has left           tma.store_wait
    consumer        the tile that the producer claimed              scheduler.full

Cost. Per block of 128 keys and 64 rows at head_dim 128: 1024 cycles of the tensor cores, and 66
exponentials of 8 cycles each for every warp, half as long, which hide behind the products of the
other consumer. At head_dim 64 the products are half, and the exponentials take as long as they.

The last wait of the loop stands behind the softmax in this text, and ptxas moves it to the front:
P V is then complete before the exponentials begin, and rescaling acc and rounding P run in their
shadow. LATE_WAIT puts a branch in between, and the wait stays where the paper has it. On an H200
that is slower (docs/progression.md): the other consumer keeps the tensor cores busy anyway.

Source: Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
Low-precision", arXiv:2407.08608, Algorithm 2 and sections 3.1 and 3.2. Its code has the order of
causal tiles by weight, in sections of heads whose keys fit in the L2 cache.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_versions import hopper
from flash_versions.fa3.config import HopperConfig, default_config
from flash_versions.fa3.forward import heads_of_section
from flash_versions.fa3.problem import Problem
from flash_versions.hopper import (
    WARPGROUP_ROWS,
    Counters,
    Ring,
    accumulator_layout,
    aggregate,
    describe,
    make_ring,
    make_scheduler,
    pass_turn,
    store_tile,
    take_turn,
)
from flash_versions.launch import Launcher, layout
from flash_versions.memory import cdiv, padded_head_dim
from flash_versions.request import Request
from flash_versions.tile import LOG2E, finalise, softmax_step
from flash_versions.version import num_multiprocessors

# Change from call to call: no kernel of its own for each.
COUNTS = [
    "q_length", "kv_length", "heads", "batch", "section",
    "window_left", "window_right", "scale_log2", "cap_scale",
]  # fmt: skip
PORTABLE_ONLY = (
    "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_starts", "block_table"
)  # fmt: skip


@aggregate
class Schedule:
    """How it is computed: `HopperConfig` for the kernel."""

    CONSUMERS: gl.constexpr
    Q_STAGES: gl.constexpr
    EPILOGUE_BUFFER: gl.constexpr
    OVERLAP: gl.constexpr
    PING_PONG: gl.constexpr
    LATE_WAIT: gl.constexpr


@aggregate
class Buffers:
    """What the partitions share."""

    q: Ring  # Q_STAGES slots for each consumer
    k: Ring
    v: Ring
    o: gl.shared_memory_descriptor  # a tile for each consumer, or the slots of q

    @gluon.jit
    def q_place(self, schedule, round, CONSUMER: gl.constexpr):
        """Where a consumer's Q of this round is."""
        slot = round % schedule.Q_STAGES * schedule.CONSUMERS + CONSUMER
        return self.q.at(slot, (round // schedule.Q_STAGES) & 1)


@gluon.jit
def produce(problem, schedule, buffers, scheduler, q, k, v):
    """The producer: for each tile, load Q and the blocks of K and V that it sees, last first."""
    tile = gl.program_id(0)
    round = 0
    place = buffers.k.at(0, 0)
    while tile < scheduler.number:
        query, head, sequence = problem.locate(tile)
        begin, _, _, end = problem.blocks(query, problem.BLOCK_Q)
        tile = scheduler.claim(round)
        kv_head = head // problem.GROUP
        for block in range(end - 1, begin - 1, -1):
            first_key = block * problem.BLOCK_KV
            buffers.k.fill(place, k, [sequence, kv_head, first_key, 0])
            if block == end - 1:
                for c in gl.static_range(schedule.CONSUMERS):
                    q_place = buffers.q_place(schedule, round, c)
                    buffers.q.fill(q_place, q, [sequence, head, query + c * WARPGROUP_ROWS, 0])
            buffers.v.fill(place, v, [sequence, kv_head, first_key, 0])
            place = place.next()
        round += 1
    scheduler.retire()


@gluon.jit
def multiply_qk(q_tile, k_tile):
    """Issue S = Q K^T: a token to wait for."""
    BLOCK_KV: gl.constexpr = k_tile.shape[0]
    zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], gl.float32, accumulator_layout(BLOCK_KV))
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def as_operand(p, v_tile):
    """P as the left operand of P V: the same registers, two numbers in each."""
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(v_tile.shape[1]), 2)
    return gl.convert_layout(p.to(v_tile.dtype), operand, assert_trivial=True)


@gluon.jit
def per_row(x, acc):
    """A number for each row of S as one for each row of acc."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)


@gluon.jit
def first_state(buffers, BLOCK_KV: gl.constexpr):
    """(acc, row_max, row_sum) of rows that have seen no key."""
    DIMS: gl.constexpr = buffers.v.tiles.shape[4]
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_KV))
    acc = gl.zeros([WARPGROUP_ROWS, DIMS], gl.float32, accumulator_layout(DIMS))
    row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, rows)
    return acc, row_max, gl.zeros([WARPGROUP_ROWS], gl.float32, rows)


@gluon.jit
def attend(problem, schedule, buffers, q_tile, place, query, begin, end, CONSUMER: gl.constexpr):
    """Fold KV blocks end - 1 .. begin into the state of a consumer's rows, with S of one block in
    flight together with P V of the block before: (acc, row_max, row_sum, next place in the rings).
    """
    _, full_begin, full_end, _ = problem.blocks(query, WARPGROUP_ROWS)
    acc, row_max, row_sum = first_state(buffers, problem.BLOCK_KV)
    buffers.k.wait(place)
    s = warpgroup_mma_wait(0, deps=[multiply_qk(q_tile, buffers.k.tile(place))])
    buffers.k.release(place)
    s = problem.capped(s)
    if problem.LEFT or problem.RIGHT or problem.EDGE:
        s = problem.masked(s, query, end - 1)
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, problem.scale_log2)
    p = as_operand(p, buffers.v.tile(place))
    if schedule.LATE_WAIT:
        buffers.k.wait(place.next(), end - 1 > begin)
    for block in range(end - 2, begin - 1, -1):
        before = place
        place = place.next()
        if not schedule.LATE_WAIT:
            buffers.k.wait(place)
        if schedule.PING_PONG:
            take_turn(CONSUMER)
        s_token = multiply_qk(q_tile, buffers.k.tile(place))
        buffers.v.wait(before)
        acc_token = warpgroup_mma(p, buffers.v.tile(before), acc, is_async=True)
        if schedule.PING_PONG:
            pass_turn(CONSUMER, schedule.CONSUMERS)
        s = warpgroup_mma_wait(1, deps=[s_token])
        buffers.k.release(place)
        s = problem.capped(s)
        if problem.CUT:
            if (block >= full_end) | (block < full_begin):
                s = problem.masked(s, query, block)
        p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, problem.scale_log2)
        if schedule.LATE_WAIT:
            buffers.k.wait(place.next(), block > begin)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        buffers.v.release(before)
        p = as_operand(p, buffers.v.tile(place))
        acc = acc * per_row(alpha, acc)[:, None]
    buffers.v.wait(place)
    acc_token = warpgroup_mma(p, buffers.v.tile(place), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    buffers.v.release(place)
    return acc, row_max, row_sum, place.next()


@gluon.jit
def attend_in_order(
    problem, schedule, buffers, q_tile, place, query, begin, end, CONSUMER: gl.constexpr
):
    """`attend` without the overlap: each product is waited for before the next step."""
    _, full_begin, full_end, _ = problem.blocks(query, WARPGROUP_ROWS)
    acc, row_max, row_sum = first_state(buffers, problem.BLOCK_KV)
    for block in range(end - 1, begin - 1, -1):
        buffers.k.wait(place)
        if schedule.PING_PONG:
            take_turn(CONSUMER)
        s_token = multiply_qk(q_tile, buffers.k.tile(place))
        if schedule.PING_PONG:
            pass_turn(CONSUMER, schedule.CONSUMERS)
        s = warpgroup_mma_wait(0, deps=[s_token])
        buffers.k.release(place)
        s = problem.capped(s)
        if problem.LEFT or problem.RIGHT or problem.EDGE:
            if (block >= full_end) | (block < full_begin):
                s = problem.masked(s, query, block)
        p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, problem.scale_log2)
        acc = acc * per_row(alpha, acc)[:, None]
        v_tile = buffers.v.tile(place)
        buffers.v.wait(place)
        acc_token = warpgroup_mma(as_operand(p, v_tile), v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        buffers.v.release(place)
        place = place.next()
    return acc, row_max, row_sum, place


@gluon.jit
def consume(problem, schedule, buffers, scheduler, o, lse_out, CONSUMER: gl.constexpr):
    """A consumer: 64 rows of each tile."""
    tile = gl.program_id(0)
    round = 0
    place = buffers.k.at(0, 0)
    if schedule.PING_PONG:
        if CONSUMER == schedule.CONSUMERS - 1:
            pass_turn(CONSUMER, schedule.CONSUMERS)  # consumer 0 begins
    while tile < scheduler.number:
        query, head, sequence = problem.locate(tile)
        begin, _, _, end = problem.blocks(query, problem.BLOCK_Q)
        query += CONSUMER * WARPGROUP_ROWS
        q_place = buffers.q_place(schedule, round, CONSUMER)
        buffers.q.wait(q_place)
        q_tile = buffers.q.tile(q_place)
        if schedule.OVERLAP:
            acc, row_max, row_sum, place = attend(
                problem, schedule, buffers, q_tile, place, query, begin, end, CONSUMER
            )
        else:
            acc, row_max, row_sum, place = attend_in_order(
                problem, schedule, buffers, q_tile, place, query, begin, end, CONSUMER
            )
        if schedule.EPILOGUE_BUFFER:
            buffers.q.release(q_place)
        out, lse = finalise(acc, per_row(row_max, acc), per_row(row_sum, acc))
        rows = query + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, acc.type.layout))
        first = (sequence * problem.heads + head).to(gl.int64) * problem.q_length
        gl.store(lse_out + first + rows, lse, mask=rows < problem.q_length)
        tma.store_wait(0)  # of the tile before
        if schedule.EPILOGUE_BUFFER:
            o_tile = buffers.o.index(CONSUMER)
        else:
            o_tile = buffers.o.index(q_place.slot)
        o_tile.reshape([o_tile.shape[2], o_tile.shape[3]]).store(out.to(o.dtype))
        fence_async_shared()
        store_tile(o, [sequence, head, query, 0], o_tile)
        if not schedule.EPILOGUE_BUFFER:
            tma.store_wait(0)
            buffers.q.release(q_place)
        tile = scheduler.receive(round)
        round += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q,
    k,
    v,
    o,
    lse_out,
    counters,
    q_length,
    kv_length,
    heads,
    batch,
    section,
    window_left,
    window_right,
    scale_log2,
    cap_scale,
    GROUP: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    EDGE: gl.constexpr,
    CUT: gl.constexpr,
    CAP: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    EPILOGUE_BUFFER: gl.constexpr,
    OVERLAP: gl.constexpr,
    PING_PONG: gl.constexpr,
    LATE_WAIT: gl.constexpr,
    SCHEDULER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Divide the warps of a program into consumers, four each, and one producer."""
    problem = Problem(
        gl.to_tensor(q_length), gl.to_tensor(kv_length), gl.to_tensor(heads), gl.to_tensor(batch),
        gl.to_tensor(section), gl.to_tensor(window_left), gl.to_tensor(window_right),
        gl.to_tensor(scale_log2), gl.to_tensor(cap_scale),
        GROUP, LEFT, RIGHT, EDGE, CUT, CAP, CONSUMERS * WARPGROUP_ROWS, k.block_type.shape[2]
    )  # fmt: skip
    schedule = Schedule(CONSUMERS, Q_STAGES, EPILOGUE_BUFFER, OVERLAP, PING_PONG, LATE_WAIT)
    q_ring = make_ring(q, CONSUMERS * Q_STAGES, 1)
    k_ring = make_ring(k, STAGES, CONSUMERS)
    v_ring = make_ring(v, STAGES, CONSUMERS)
    if EPILOGUE_BUFFER:
        o_tiles = gl.allocate_shared_memory(o.dtype, [CONSUMERS] + o.block_type.shape, o.layout)
    else:
        o_tiles = q_ring.tiles
    buffers = Buffers(q_ring, k_ring, v_ring, o_tiles)
    scheduler = make_scheduler(problem.num_tiles(), counters, SCHEDULER, CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, buffers, scheduler, o, lse_out, 0)),
                (consume, (problem, schedule, buffers, scheduler, o, lse_out, 1)),
                (produce, (problem, schedule, buffers, scheduler, q, k, v)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, buffers, scheduler, o, lse_out, 0)),
                (consume, (problem, schedule, buffers, scheduler, o, lse_out, 1)),
                (consume, (problem, schedule, buffers, scheduler, o, lse_out, 2)),
                (produce, (problem, schedule, buffers, scheduler, q, k, v)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


launch_forward = Launcher(forward_kernel)
counters = Counters()


def unsupported(request: Request) -> str | None:
    """Why a request that descriptors can address (`forward.unsupported`) is left to the portable
    kernel, as a sentence, or None.
    """
    q = request.q
    if not hopper.available(q.device):
        return f"{q.device} is no Hopper GPU (compute capability 9.0), or kernels are interpreted."
    if q.dtype not in hopper.GLUON_DTYPES:
        return f"q has dtype {q.dtype}; float16 and bfloat16 are what WGMMA multiplies here."
    for name in PORTABLE_ONLY:
        if getattr(request, name) is not None:
            return f"{name} is left to the portable kernel."
    if request.dropout_p > 0:
        return "dropout_p is left to the portable kernel."
    return None


def forward(
    request: Request, config: HopperConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE on a Hopper GPU.

    Args:
        request: see `Request`; one that is not `unsupported`, on the current GPU, with rows padded
            as `ops.in_vectors` does.
        config: the schedule; None chooses by shape.

    Raises:
        ValueError: the configuration does not fit the request.

    Returns:
        o (batch, M, heads, head_dim_v), contiguous, in q's dtype; lse natural log, fp32 (batch,
        heads, M); no further statistics.
    """
    q, k, v = request.q, request.k, request.v
    config = config or default_config(request)
    left, right, softcap = request.window_left, request.window_right, request.softcap
    batch, q_length, heads, head_dim = q.shape
    kv_length, head_dim_v = v.shape[1], v.shape[3]
    o = q.new_empty((batch, q_length, heads, head_dim_v))
    lse = q.new_empty((batch, heads, q_length), dtype=torch.float32)
    width, width_v = (max(64, padded_head_dim(dim)) for dim in (head_dim, head_dim_v))
    if width != width_v and not config.epilogue_buffer:
        raise ValueError(
            f"head_dim {head_dim} and {head_dim_v} of v differ, and O fits Q's buffer only if they "
            f"do not; use epilogue_buffer=True."
        )
    programs = cdiv(q_length, config.block_q) * heads * batch
    if config.scheduler != "grid":
        programs = min(programs, num_multiprocessors(q.device))
    # Tiles as high as a block is wide, and ends that are aligned: only the last block is cut.
    aligned = (
        config.block_q == config.block_kv
        and (kv_length - q_length + (right or 0)) % config.block_kv == 0
    )
    launch_forward(
        (*layout(request), config.block_kv),
        (programs,),
        (
            describe(q, WARPGROUP_ROWS.value, width),
            describe(k, config.block_kv, width),
            describe(v, config.block_kv, width_v),
            describe(o, WARPGROUP_ROWS.value, width_v),
            lse,
            counters.pair(q.device) if config.scheduler == "dynamic" else lse,
            q_length,
            kv_length,
            heads,
            batch,
            heads_of_section(request),
            left or 0,
            right or 0,
            (softcap or request.scale) * LOG2E.value,
            0.0 if softcap is None else request.scale / softcap,
        ),
        {
            "GROUP": request.group,
            "LEFT": left is not None,
            "RIGHT": right is not None,
            "EDGE": kv_length % config.block_kv != 0,
            "CUT": left is not None or (right is not None and not aligned),
            "CAP": softcap is not None,
            "CONSUMERS": config.consumers,
            "STAGES": config.stages,
            "Q_STAGES": config.q_stages,
            "EPILOGUE_BUFFER": config.epilogue_buffer,
            "OVERLAP": config.overlap,
            "PING_PONG": config.ping_pong,
            "LATE_WAIT": config.late_wait,
            "SCHEDULER": config.scheduler,
            # 64 K registers less the producer's; Triton starts its warps as a warpgroup.
            "CONSUMER_REGISTERS": 240 if config.consumers == 2 else 160,
            "PRODUCER_REGISTERS": 24,
        },
        num_warps=4,
    )
    return o, lse, None
