"""C = A B^T on Hopper: a persistent, warp-specialised product with an epilogue under way.

A is (M, K), B is (N, K), as the weight of a linear layer lies in memory: both have what is summed
over in rows. A program walks over tiles of C; its warps are partitions that do one thing each. A
column is a stretch of time, [..] what the tensor cores do:

    producer     A B of tile 0's steps, one after another   of tile 1's   of tile 2's
                   | full
    consumer 0        [tile 0: acc += A B, step by step] epilogue     [tile 2 ..
                                                        |arrive
    consumer 1                                           [tile 1 ..           ] epilogue

* The producer, one warp, asks TMA for a slot of the pipeline: 64 columns of A and of B. It runs
  ahead by as many slots as there are, across the borders of tiles.
* A consumer, one warpgroup, has a tile in its registers and keeps the products of one step in
  flight while it issues those of the next: that a slot has been read is known one step later.
* Ping-pong. Consumers take turns at the tensor cores, which so never wait for an epilogue.
* The epilogue brings the accumulator to memory in sub-tiles of some columns: to 16 bits in
  registers, by stmatrix to a buffer in shared memory, by TMA to C. A buffer is written again when
  its store has read it, and as there are several, a store overlaps the next sub-tile, and the last
  stores of a tile overlap what comes after it.

Without PING_PONG both consumers compute the same tile, each half of its rows. A slot of B then
feeds both, so that tiles of twice the size need three quarters of the loads; but the tensor cores
idle while both are in their epilogue.

Fused into the epilogue, in fp32 and before the only rounding:

* bias, a number for each column.
* residual, a tensor like C. A warp of its own fetches each sub-tile by TMA into the very buffer
  that the sum leaves by.
* SwiGLU, silu(A G^T) * (A U^T), with two weights G and U. The left half of a tile's columns is of
  G, the right half of U: they are two boxes of one slot of B, so the main loop does not know.
  Gate and up of an element are then in one thread, and nothing but their product is written.

    waits           for                                             at
    producer        every consumer has read the slot                operands.b.empty
    consumer        the producer's copies have landed               operands.b.full
    consumer        its own products of the step before             warpgroup_mma_wait(1)
    consumer        PING_PONG: the other has issued its products    its named barrier
    consumer        its own store of BUFFERS sub-tiles before       tma.store_wait
    consumer        with a residual: its sub-tile has landed        out.full
    the fetcher     the sum has left the buffer                     out.empty

Sources: CUTLASS's kernels for Hopper, "warp-specialized pingpong" and "cooperative"; the order of
tiles is that of the Triton tutorial on matrix multiplication.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.pipeline import (
    Pipeline,
    make_pipeline,
    make_unguarded,
    named_barrier_arrive,
    named_barrier_sync,
)
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.triton_compat import aggregate, load_tile, reinterpret
from flash_versions.versions.tiles.wgmma import accumulator_layout
from transformer.model.kernels.gemm.config import BLOCK_K, CHAIN, NORM, GemmConfig, default_config
from transformer.model.kernels.gemm.rmsnorm_hopper import consume_normed
from transformer.model.kernels.gemm.tiles import (
    CONSUMERS,
    GemmProblem,
    Schedule,
    describe_matrix,
    finish,
)


@aggregate
class Operands:
    """What the consumers multiply: slots of the pipeline with a tile of B, and of A one for each
    reader.
    """

    a: gl.shared_memory_descriptor
    b: Pipeline
    READERS: gl.constexpr

    @gluon.jit
    def load(self, stage, a, b, up, row, column, k):
        """Producer: when the slot is empty, start to load columns k.. of A and B."""
        ROWS: gl.constexpr = a.block_type.shape[0]
        BYTES: gl.constexpr = self.READERS * a.block_type.nbytes + b.block_type.nbytes
        self.b.wait_empty(stage)
        full, b_tile = self.b.full.index(stage.slot), self.b.tiles.index(stage.slot)
        if up is None:
            mbarrier.expect(full, BYTES)
            load_tile(b, [column, k], full, b_tile)
        else:
            mbarrier.expect(full, BYTES + up.block_type.nbytes)
            both = reinterpret(b_tile, [2] + b.block_type.shape, b.layout)
            load_tile(b, [column, k], full, both.index(0))
            load_tile(up, [column, k], full, both.index(1))
        for reader in gl.static_range(self.READERS):
            a_tile = self.a.index(stage.slot * self.READERS + reader)
            load_tile(a, [row + reader * ROWS, k], full, a_tile)

    @gluon.jit
    def multiply(self, stage, acc, use_acc, READER: gl.constexpr):
        """Consumer: start to add the product of a slot that is full."""
        a_tile = self.a.index(stage.slot * self.READERS + READER)
        b_tile = self.b.tiles.index(stage.slot).permute((1, 0))
        return warpgroup_mma(a_tile, b_tile, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def make_operands(a, b, STAGES: gl.constexpr, READERS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate the pipeline."""
    WIDTH: gl.constexpr = a.block_type.shape[1]
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES * READERS] + a.block_type.shape, a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, COLUMNS, WIDTH], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return Operands(a_tiles, Pipeline(b_tiles, full, empty, STAGES), READERS)


@gluon.jit
def produce(problem, schedule, operands, a, b, up):
    """The producer: for each tile, load all of A and B that it needs."""
    stage = operands.b.at(0, 0)
    for tile in range(gl.program_id(0), problem.num_tiles(), gl.num_programs(0)):
        row, column = problem.locate(tile)
        for step in range(problem.steps):
            operands.load(stage, a, b, up, row, column, step * a.block_type.shape[1])
            stage = stage.next()


@gluon.jit
def fetch(problem, schedule, out, residual):
    """Load the residual, each sub-tile into the buffer that the sum will leave by."""
    WIDTH: gl.constexpr = residual.block_type.shape[1]
    PARTS: gl.constexpr = problem.TILE_COLUMNS // WIDTH
    round = gl.to_tensor(0)
    for tile in range(gl.program_id(0), problem.num_tiles(), gl.num_programs(0)):
        row, column = problem.locate(tile)
        for part in gl.static_range(PARTS):
            for reader in gl.static_range(schedule.READERS):
                if schedule.READERS == CONSUMERS:
                    stage = schedule.stage_out(out, reader, round * PARTS + part)
                else:
                    before = round // CONSUMERS * PARTS
                    stage = schedule.stage_out(out, round % CONSUMERS, before + part)
                corner = [row + reader * schedule.ROWS, column + part * WIDTH]
                out.fill(stage, residual, corner)
        round += 1


@gluon.jit
def multiply(operands, first, steps, READER: gl.constexpr, ROWS: gl.constexpr):
    """Multiply a consumer's rows with all columns of a tile: the sum over so many stages
    from the `first` on.

    Returns:
        acc, fp32 (ROWS, columns), and the place of the last slot, which is in flight.
    """
    pipeline = operands.b
    stage = pipeline.at(first % pipeline.STAGES, (first // pipeline.STAGES) & 1)
    COLUMNS: gl.constexpr = pipeline.tiles.shape[1]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    pipeline.wait(stage)
    acc = warpgroup_mma_wait(1, deps=[operands.multiply(stage, acc, False, READER)])
    for _ in range(1, steps):
        before = stage
        stage = stage.next()
        pipeline.wait(stage)
        acc = warpgroup_mma_wait(1, deps=[operands.multiply(stage, acc, True, READER)])
        pipeline.release(before)
    return acc, stage


@gluon.jit
def consume(problem, schedule, operands, out, c, bias, inner, eps, CONSUMER: gl.constexpr):
    """A consumer: its rows of each tile or, where it is the only reader, its tiles."""
    if eps is None:
        consume_plain(problem, schedule, operands, out, c, bias, CONSUMER)
    else:
        consume_normed(problem, schedule, operands, out, c, bias, inner, eps, CONSUMER)


@gluon.jit
def consume_plain(problem, schedule, operands, out, c, bias, CONSUMER: gl.constexpr):
    """A consumer of a product without a norm."""
    PING_PONG: gl.constexpr = schedule.READERS < CONSUMERS
    READER: gl.constexpr = 0 if PING_PONG else CONSUMER
    begin, stride = gl.program_id(0), gl.num_programs(0)
    steps = problem.steps  # from the begin of a tile of this consumer to that of its next
    first = gl.to_tensor(0)  # slots that the producer filled before this tile
    number = gl.to_tensor(0)
    if PING_PONG:
        begin += CONSUMER * stride
        stride *= CONSUMERS
        first += CONSUMER * steps
        steps *= CONSUMERS
        if CONSUMER == CONSUMERS - 1:
            named_barrier_arrive(CONSUMER, CONSUMERS)  # consumer 0 begins
    for tile in range(begin, problem.num_tiles(), stride):
        row, column = problem.locate(tile)
        if PING_PONG:
            named_barrier_sync(CONSUMER)
        acc, stage = multiply(operands, first, problem.steps, READER, schedule.ROWS)
        if PING_PONG:
            named_barrier_arrive(CONSUMER, CONSUMERS)
        acc = warpgroup_mma_wait(0, deps=[acc])
        operands.b.release(stage)
        first += steps
        row += READER * schedule.ROWS
        number = finish(acc, None, problem, schedule, out, c, bias, row, column, number, CONSUMER)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "steps", "inner"])
def gemm_kernel(
    a, b, up, c, residual, bias, rows, columns, steps, inner, eps,
    READERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BUFFERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Divide the warps of a program into consumers, four each, one producer and, with a residual,
    one that fetches it.
    """
    ROWS: gl.constexpr = a.block_type.shape[0]
    TILE_COLUMNS: gl.constexpr = b.block_type.shape[0]
    SWIGLU: gl.constexpr = up is not None
    RESIDUAL: gl.constexpr = residual is not None
    problem = GemmProblem(
        gl.to_tensor(rows), gl.to_tensor(columns), gl.to_tensor(steps),
        ROWS * READERS, TILE_COLUMNS, GROUP, SWIGLU,
    )  # fmt: skip
    schedule = Schedule(ROWS, READERS, BUFFERS, RESIDUAL)
    operands = make_operands(a, b, STAGES, READERS, TILE_COLUMNS * (2 if SWIGLU else 1))
    TILES: gl.constexpr = CONSUMERS * BUFFERS
    out = make_pipeline(c, TILES, 1) if RESIDUAL else make_unguarded(c, TILES)
    fence_async_shared()
    if eps is not None:
        inner, eps = gl.to_tensor(inner).to(gl.float32), gl.to_tensor(eps)
    if RESIDUAL:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, operands, out, c, bias, inner, eps, 0)),
                (consume, (problem, schedule, operands, out, c, bias, inner, eps, 1)),
                (produce, (problem, schedule, operands, a, b, up)),
                (fetch, (problem, schedule, out, residual)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (problem, schedule, operands, out, c, bias, inner, eps, 0)),
                (consume, (problem, schedule, operands, out, c, bias, inner, eps, 1)),
                (produce, (problem, schedule, operands, a, b, up)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


launch_gemm = Launcher(gemm_kernel)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float | None = None,
    config: GemmConfig | None = None,
) -> None:
    """c = a b^T or, with `up`, silu(a b^T) * (a up^T); plus bias, plus residual. With `eps`, each
    product is divided by rms(a); there is no residual then.

    Args:
        a: (M, K), 16-bit; like all matrices here, with rows that TMA can address.
        b: (N, K).
        c: (M, N), written.
        up: (N, K).
        bias: (N,), contiguous.
        residual: (M, N); may be c.
        eps: added to the mean square under the root; None: no norm.
        config: the schedule; None chooses.

    Raises:
        ValueError: the configuration does not fit the residual or the norm.
    """
    rows, columns = c.shape
    num_sms, both, added = devices[a.device].num_sms, up is not None, residual is not None
    if config is None:
        config = default_config(rows, columns * (1 + both), num_sms, added, both)
        config = config if eps is None else NORM
    if added and config.buffers == 1:
        raise ValueError("buffers=1 and a residual are not possible: it waits in the other buffer.")
    if eps is not None and (config.rows != 64 or config.ping_pong):
        raise ValueError("with a norm, both consumers compute a tile, 64 rows each.")
    aligned = None if bias is None else bias.data_ptr() % 16 == 0
    tile_columns = config.columns // (1 + both)
    tiles = cdiv(rows, config.tile_rows) * cdiv(columns, tile_columns)
    chain = 1 if eps is None else CHAIN
    of_b = tile_columns, BLOCK_K
    of_c = config.rows, min(config.epilogue_columns, tile_columns)
    launch_gemm(
        (min(tiles, num_sms),),
        (
            describe_matrix(a, config.rows, BLOCK_K),
            describe_matrix(b, *of_b),
            None if up is None else describe_matrix(up, *of_b),
            describe_matrix(c, *of_c),
            None if residual is None else describe_matrix(residual, *of_c),
            bias,
            rows,
            columns,
            cdiv(a.shape[1], BLOCK_K * chain) * chain,  # behind the end TMA reads 0
            None if eps is None else a.shape[1],
            eps,
        ),
        {
            "READERS": config.readers,
            "STAGES": config.stages,
            "GROUP": config.group,
            "BUFFERS": config.buffers,
            # 64 K registers less the producer's; Triton starts its warps as a warpgroup.
            "CONSUMER_REGISTERS": 240,
            "PRODUCER_REGISTERS": 24,
        },
        key=(config, a.dtype, a.device, both, added, aligned, eps is None),
    )
