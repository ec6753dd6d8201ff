"""FlashAttention 4, forward, on Blackwell (sm_100): the machine that both of its ideas are for.

It compiles without a GPU and is simulated. It never ran on hardware, so nothing is known of its
speed.

What the machine changes. Blackwell's tensor cores multiply twice as fast as Hopper's, and its
special function unit computes exponentials as slowly as before: for a block at head_dim 128 the
exponentials take as long as the products. Products no longer take registers. They read operands
from shared memory, one warp issues them (`tcgen05.mma`), and accumulators are in tensor memory
(`tensor_memory.py`), which other warps can read and write, too.

What the kernel does with it.
* A role for each unit. On Hopper a consumer issued products, computed the softmax and corrected its
  accumulator. Here three roles do that, and they only meet at barriers.
* Two tiles of 128 queries. While the tensor cores multiply for one, the softmax of the other runs.
* P is written over S in tensor memory, where P V reads it.
* The correction is no part of the softmax any more. It rescales O in tensor memory, and only where
  the maximum of one of its 128 rows grew by more than the threshold (`softmax.py`).
* A polynomial computes a share of the exponentials (`exp2.py`). A thread has one row, so columns
  are registers, and selecting columns moves no data.

    role         warps   does
    correction       4   O *= alpha where a row was raised; at the end O / row_sum, and the LSE
    softmax 0, 1  4 + 4  of one tile each: maximum, 2^x, P and alpha to tensor memory
    products         1   S = Q K^T and O += P V, tile 0 and tile 1 in turns
    loader           1   TMA: Q, and K and V through one pipeline
    storer           1   TMA: O

    columns of tensor memory
      0..127   S of tile 0. Once it is loaded: P in 0..63, alpha in 64, row_sum in 65, row_max in 66
    128..255   the same of tile 1
    256..      O of tile 0, then of tile 1: as many columns each as a tile is wide

    barrier         count  arrives                                waits       phase
    q.full, .empty      1  TMA; commit of the last Q K^T          products; loader    tile
    kv.full, .empty     1  TMA; commit of tile 1's product        products; loader    slot
    s_full              1  commit of Q K^T                        softmax     block
    p_full              2  softmax: P is written. Correction: O   products    block
                           is rescaled, or (first block) was read
    alpha_full          1  softmax: alpha is written              correction  block but the first
    sums_full           1  softmax: row_sum, row_max are written  correction  tile
    sums_empty          1  correction has read them               products    tile
    o_full              1  commit of the last P V                 correction  tile
    o.full, .empty      1  correction: O is in shared memory;     storer; correction  tile
                           storer has copied it

Three orders need no barrier, because products are computed in the order in which they are issued.
S may be overwritten: Q K^T of a block is issued after P V of the block before. P V is done when O
is rescaled: alpha of block j follows S of block j, which is computed after P V of block j - 1.
Alpha was read when the next one is written: S of the next block follows P V of this one, which
waits for the correction.

Hardware may need more: Triton orders accesses to tensor memory by waits and
barriers and emits no `tcgen05.fence`, which the simulator does not model.

Tile 0 and tile 1 take the same blocks of keys, so under a causal mask tile 0 has one block that is
masked in full.

Sources. Zadouri et al. 2026, "FlashAttention-4", arXiv:2603.05451: roles and columns are those of
its code in outline. Alpha, sums and maxima in spare columns of S are as in the Gluon example of
Triton's repository. Problem, pipelines and scheduler are FA3's, unchanged.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    allocate_tensor_memory,
    mbarrier,
    tcgen05_mma,
    tensor_memory_descriptor,
    tma,
)

from flash_versions.dispatch.autograd.compute import narrowed
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.host import O_MULTIPLE, num_programs, numbers
from flash_versions.versions.fa3.hopper.problem import COUNTS, make_query_problem
from flash_versions.versions.fa4.blackwell.host import (
    BlackwellConfig,
    constants,
    default_config,
    tensors,
)
from flash_versions.versions.fa4.blackwell.tensor_memory import (
    ROWS,
    columns_layout,
    registers_of,
    split_columns,
    view,
)
from flash_versions.versions.fa4.exp2 import mixed_exp2
from flash_versions.versions.fa4.softmax import raise_reference
from flash_versions.versions.tiles.algebra import finalize
from flash_versions.versions.tiles.pipeline import Pipeline, make_barriers, make_pipeline
from flash_versions.versions.tiles.sequences import new_outputs
from flash_versions.versions.tiles.tile_scheduler import make_scheduler
from flash_versions.versions.tiles.triton_compat import aggregate, store_tile
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

TILES = gl.constexpr(2)  # of a program, 128 queries each
BLOCK_KV = gl.constexpr(128)
PARTS = gl.constexpr(4)  # of the columns of S: a part of P is added up before the next is computed
CHUNK = gl.constexpr(16)  # columns of O that the correction has in registers
ALPHA = gl.constexpr(64)  # columns of S behind P
ROW_SUM = gl.constexpr(65)
ROW_MAX = gl.constexpr(66)


@aggregate
class Schedule:
    """How it is computed: `BlackwellConfig` for the kernel."""

    THRESHOLD: gl.constexpr
    EIGHTHS: gl.constexpr
    DEGREE: gl.constexpr


@aggregate
class Buffers:
    """What the roles share. Each barrier is two, one for each tile."""

    q: Pipeline  # a slot for each tile
    kv: Pipeline
    o: Pipeline  # one slot: both tiles take it in turns, in each of its two phases the same tile
    s: tensor_memory_descriptor
    acc: tensor_memory_descriptor
    s_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    alpha_full: gl.shared_memory_descriptor
    sums_full: gl.shared_memory_descriptor
    sums_empty: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor

    @gluon.jit
    def p(self, t: gl.constexpr):
        """P of a tile, over the first half of its S."""
        WIDE: gl.constexpr = columns_layout(2 * BLOCK_KV)
        s = self.s.index(t)
        return view(s, self.kv.tiles.dtype, [ROWS, 2 * BLOCK_KV], WIDE).slice(0, BLOCK_KV)

    @gluon.jit
    def put(self, x, t: gl.constexpr, COLUMN: gl.constexpr):
        """Softmax: write a number for each row to a column of the tile's S."""
        COLUMN_OF: gl.constexpr = registers_of(gl.float32, 1)
        x = gl.convert_layout(x, gl.SliceLayout(1, COLUMN_OF), assert_trivial=True)
        self.s.index(t).slice(COLUMN, 1).store(x.reshape([ROWS, 1]))

    @gluon.jit
    def get(self, t: gl.constexpr, COLUMN: gl.constexpr, LAYOUT: gl.constexpr):
        """Correction: the numbers of such a column, for rows of a tile in this layout."""
        COLUMN_OF: gl.constexpr = registers_of(gl.float32, 1)
        x = self.s.index(t).slice(COLUMN, 1).load(COLUMN_OF).reshape([ROWS])
        return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def load(problem, buffers, scheduler, q, k, v):
    """The loader: for each tile, ask for Q and the blocks of K and V that it sees, last first."""
    tile = gl.program_id(0)
    round = 0
    stage = buffers.kv.at(0, 0)
    while tile < scheduler.number:
        _, query, head, sequence = problem.locate(tile)
        begin, _, _, end = problem.blocks(query, problem.BLOCK_Q)
        tile = scheduler.claim(round)
        kv_head = head // problem.GROUP
        buffers.q.fill(buffers.q.at(0, round & 1), q, [sequence, head, query, 0])
        for block in range(end - 1, begin - 1, -1):
            first_key = block * BLOCK_KV
            buffers.kv.fill(stage, k, [sequence, kv_head, first_key, 0])
            if block == end - 1:
                buffers.q.fill(buffers.q.at(1, round & 1), q, [sequence, head, query + ROWS, 0])
            stage = stage.next()
            buffers.kv.fill(stage, v, [sequence, kv_head, first_key, 0])
            stage = stage.next()
        round += 1
    scheduler.retire()


@gluon.jit
def multiply_qk(buffers, k_stage, last, t: gl.constexpr):
    """S = Q K^T of a tile; tile 1 releases K, and the last block Q."""
    q_tile = buffers.q.tile(buffers.q.at(t, 0))
    k_tile = buffers.kv.tile(k_stage).permute((1, 0))
    s_full, q_empty = buffers.s_full.index(t), buffers.q.empty.index(t)
    if t == 0:
        tcgen05_mma(
            q_tile, k_tile, buffers.s.index(t), use_acc=False,
            mbarriers=[s_full, q_empty], mbarrier_preds=[True, last],
        )  # fmt: skip
    else:
        tcgen05_mma(
            q_tile, k_tile, buffers.s.index(t), use_acc=False,
            mbarriers=[s_full, buffers.kv.empty.index(k_stage.slot), q_empty],
            mbarrier_preds=[True, True, last],
        )  # fmt: skip


@gluon.jit
def multiply_pv(buffers, v_stage, use_acc, last, t: gl.constexpr):
    """O += P V of a tile; tile 1 releases V."""
    p_tile, v_tile = buffers.p(t), buffers.kv.tile(v_stage)
    o_full = buffers.o_full.index(t)
    if t == 0:
        tcgen05_mma(
            p_tile, v_tile, buffers.acc.index(t), use_acc=use_acc,
            mbarriers=[o_full], mbarrier_preds=[last],
        )  # fmt: skip
    else:
        tcgen05_mma(
            p_tile, v_tile, buffers.acc.index(t), use_acc=use_acc,
            mbarriers=[buffers.kv.empty.index(v_stage.slot), o_full], mbarrier_preds=[True, last],
        )  # fmt: skip


@gluon.jit
def multiply(problem, buffers, scheduler):
    """The products: P V of a block and Q K^T of the next, tile 0 and tile 1 in turns."""
    tile = gl.program_id(0)
    round = 0
    step = 0  # blocks of all tiles so far
    stage = buffers.kv.at(0, 0)
    while tile < scheduler.number:
        _, query, _, _ = problem.locate(tile)
        begin, _, _, end = problem.blocks(query, problem.BLOCK_Q)
        blocks = end - begin
        buffers.kv.wait(stage)
        for t in gl.static_range(TILES):
            mbarrier.wait(buffers.sums_empty.index(t), (round & 1) ^ 1)
            buffers.q.wait(buffers.q.at(t, round & 1))
            multiply_qk(buffers, stage, blocks == 1, t)
        for i in range(blocks):
            v_stage = stage.next()
            stage = v_stage.next()
            buffers.kv.wait(v_stage)
            for t in gl.static_range(TILES):
                mbarrier.wait(buffers.p_full.index(t), step & 1)
                multiply_pv(buffers, v_stage, i > 0, i + 1 == blocks, t)
                if i + 1 < blocks:
                    if t == 0:
                        buffers.kv.wait(stage)
                    multiply_qk(buffers, stage, i + 2 == blocks, t)
            step += 1
        tile = scheduler.receive(round)
        round += 1


@gluon.jit
def exponentiate(s, pivot, row_sum, scale_log2, p_tile, schedule):
    """P = 2^(scale_log2 S - pivot), to tensor memory; returns row_sum with the sums of P's rows.

    P is computed part by part, and each part is added up before it is written: the sum of a whole
    P would keep all of it in registers.
    """
    WIDTH: gl.constexpr = BLOCK_KV // PARTS
    PART: gl.constexpr = registers_of(gl.float32, WIDTH)
    NARROW: gl.constexpr = registers_of(p_tile.dtype, WIDTH)
    parts = split_columns(s, PARTS)
    pivot = gl.convert_layout(pivot, gl.SliceLayout(1, PART), assert_trivial=True)
    for c in gl.static_range(PARTS):
        x = parts[c] * scale_log2 - pivot[:, None]
        p = mixed_exp2(x, schedule.EIGHTHS, schedule.DEGREE)
        p = gl.convert_layout(p, PART, assert_trivial=True)
        narrow = gl.convert_layout(p.to(p_tile.dtype), NARROW, assert_trivial=True)
        p_tile.slice(c * WIDTH, WIDTH).store(narrow)
        added = gl.sum(p, axis=1)
        row_sum += gl.convert_layout(added, row_sum.type.layout, assert_trivial=True)
    return row_sum


@gluon.jit
def softmax(problem, schedule, buffers, scheduler, T: gl.constexpr):
    """The softmax of tile T."""
    S: gl.constexpr = registers_of(gl.float32, BLOCK_KV)
    PER_ROW: gl.constexpr = gl.SliceLayout(1, S)
    p_tile = buffers.p(T)
    tile = gl.program_id(0)
    round = 0
    step = 0
    while tile < scheduler.number:
        _, query, _, _ = problem.locate(tile)
        begin, _, _, end = problem.blocks(query, problem.BLOCK_Q)
        query += T * ROWS
        _, full_begin, full_end, _ = problem.blocks(query, ROWS)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, PER_ROW)
        row_sum = gl.full([ROWS], 0.0, gl.float32, PER_ROW)
        for block in range(end - 1, begin - 1, -1):
            mbarrier.wait(buffers.s_full.index(T), step & 1)
            s = problem.capped(buffers.s.index(T).load(S))
            if problem.CUT:
                if (block >= full_end) | (block < full_begin):
                    s = problem.masked(s, query, block)
            row_max, pivot, alpha = raise_reference(
                s, row_max, problem.scale_log2, schedule.THRESHOLD
            )
            if block < end - 1:  # before the first block there is nothing to rescale
                buffers.put(alpha, T, ALPHA)
                mbarrier.arrive(buffers.alpha_full.index(T), count=1)
            row_sum = exponentiate(s, pivot, row_sum * alpha, problem.scale_log2, p_tile, schedule)
            mbarrier.arrive(buffers.p_full.index(T), count=1)
            step += 1
        buffers.put(row_sum, T, ROW_SUM)
        buffers.put(row_max, T, ROW_MAX)
        mbarrier.arrive(buffers.sums_full.index(T), count=1)
        tile = scheduler.receive(round)
        round += 1


@gluon.jit
def rescale(acc, alpha, D: gl.constexpr):
    """O *= alpha in tensor memory, if a row of the tile was raised."""
    O: gl.constexpr = registers_of(gl.float32, CHUNK)  # noqa: E741
    if gl.min(alpha, axis=0) < 1.0:
        for c in gl.static_range(D // CHUNK):
            part = acc.slice(c * CHUNK, CHUNK)
            part.store(part.load(O) * alpha[:, None])


@gluon.jit
def hand_over(problem, buffers, lse_out, tile, round, t: gl.constexpr, D: gl.constexpr):
    """Normalise O of a tile for the storer, and write its LSE."""
    O: gl.constexpr = registers_of(gl.float32, CHUNK)  # noqa: E741
    _, query, head, sequence = problem.locate(tile)
    mbarrier.wait(buffers.sums_full.index(t), round & 1)
    row_sum = buffers.get(t, ROW_SUM, O)
    row_max = buffers.get(t, ROW_MAX, O)
    mbarrier.arrive(buffers.sums_empty.index(t), count=1)
    stage = buffers.o.at(0, t)
    buffers.o.wait_empty(stage)
    mbarrier.wait(buffers.o_full.index(t), round & 1)
    for c in gl.static_range(D // CHUNK):
        part = buffers.acc.index(t).slice(c * CHUNK, CHUNK).load(O)
        out, lse = finalize(part, row_max, row_sum)
        buffers.o.tile(stage).slice(c * CHUNK, CHUNK, dim=1).store(out.to(buffers.o.tiles.dtype))
        if c == 0:
            problem.store_lse(lse_out, lse, sequence, head, query + t * ROWS)
    buffers.o.publish(stage)


@gluon.jit
def correct(problem, buffers, scheduler, lse_out):
    """The correction: alpha of each block, and the end of each tile."""
    D: gl.constexpr = buffers.o.tiles.shape[4]
    O: gl.constexpr = registers_of(gl.float32, CHUNK)  # noqa: E741
    tile = gl.program_id(0)
    round = 0
    step = 0  # blocks with an alpha so far
    while tile < scheduler.number:
        _, query, _, _ = problem.locate(tile)
        begin, _, _, end = problem.blocks(query, problem.BLOCK_Q)
        for t in gl.static_range(TILES):  # O of the tile before was read
            mbarrier.arrive(buffers.p_full.index(t), count=1)
        for _ in range(end - begin - 1):
            for t in gl.static_range(TILES):
                mbarrier.wait(buffers.alpha_full.index(t), step & 1)
                rescale(buffers.acc.index(t), buffers.get(t, ALPHA, O), D)
                mbarrier.arrive(buffers.p_full.index(t), count=1)
            step += 1
        for t in gl.static_range(TILES):
            hand_over(problem, buffers, lse_out, tile, round, t, D)
        tile = scheduler.receive(round)
        round += 1


@gluon.jit
def store(problem, buffers, scheduler, o):
    """The storer: copy each tile's O to memory as the correction hands it over."""
    tile = gl.program_id(0)
    round = 0
    while tile < scheduler.number:
        _, query, head, sequence = problem.locate(tile)
        for t in gl.static_range(TILES):
            stage = buffers.o.at(0, t)
            buffers.o.wait(stage)
            store_tile(o, [sequence, head, query + t * ROWS, 0], buffers.o.tiles.index(0))
            tma.store_wait(0)
            buffers.o.release(stage)
        tile = scheduler.receive(round)
        round += 1


@gluon.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, o, lse_out, counters,
    q_length, kv_length, heads, batch, section, window_left, window_right, scale_log2, cap_scale,
    GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, EDGE: gl.constexpr,
    CAP: gl.constexpr, CUT: gl.constexpr, STAGES: gl.constexpr, SCHEDULER: gl.constexpr,
    THRESHOLD: gl.constexpr, EIGHTHS: gl.constexpr, DEGREE: gl.constexpr
):  # fmt: skip
    """Allocate what the roles share, and divide the warps of a program among them. Registers of a
    thread are the last list; the correction gets what is left of 64 K.
    """
    problem = make_query_problem(
        lse_out, lse_out, lse_out, lse_out, q_length, kv_length, heads, batch, section, window_left,
        window_right, scale_log2, cap_scale, 0, 0, 0, 0, 0, 0, 0, 1, GROUP, LEFT, RIGHT, EDGE, CUT,
        False, CAP, False, False, False, False, False, TILES * ROWS // WARPGROUP_ROWS, BLOCK_KV
    )  # fmt: skip
    schedule = Schedule(THRESHOLD, EIGHTHS, DEGREE)
    D: gl.constexpr = o.block_type.shape[3]
    S: gl.constexpr = columns_layout(BLOCK_KV)
    O: gl.constexpr = columns_layout(D)  # noqa: E741
    buffers = Buffers(
        make_pipeline(q, TILES, 1),
        make_pipeline(k, STAGES, 1),
        make_pipeline(o, 1, 1),
        allocate_tensor_memory(gl.float32, [TILES, ROWS, BLOCK_KV], S),
        allocate_tensor_memory(gl.float32, [TILES, ROWS, D], O),
        make_barriers(TILES, 1),
        make_barriers(TILES, 2),
        make_barriers(TILES, 1),
        make_barriers(TILES, 1),
        make_barriers(TILES, 1),
        make_barriers(TILES, 1),
    )
    scheduler = make_scheduler(problem.num_tiles(), counters, SCHEDULER, 5)
    gl.warp_specialize(
        [
            (correct, (problem, buffers, scheduler, lse_out)),
            (softmax, (problem, schedule, buffers, scheduler, 0)),
            (softmax, (problem, schedule, buffers, scheduler, 1)),
            (multiply, (problem, buffers, scheduler)),
            (load, (problem, buffers, scheduler, q, k, v)),
            (store, (problem, buffers, scheduler, o)),
        ],
        [4, 4, 1, 1, 1],
        [192, 192, 32, 32, 32],
    )


launch_forward = Launcher(forward_kernel)


def forward(
    request: Request, config: BlackwellConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE on an sm_100 GPU, as `fa2.forward` has them.

    Args:
        request: see `Request`; one that is not `host.left_to_portable`, on the current GPU, with
            rows that boxes can reach.
        config: the switches; None takes `default_config`.
    """
    config = config or default_config(request)
    o, lse = new_outputs(request, O_MULTIPLE)
    arguments = *tensors(request, config, o, lse), *numbers(request)
    launch_forward((num_programs(request, config),), arguments, constants(request, config))
    return narrowed(o, request.v), lse, None
