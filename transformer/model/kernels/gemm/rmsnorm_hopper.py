"""y = rms_norm(x) W^T on Hopper: A passes through registers, and its squares are summed up there.

What stays of hopper.py: the pipeline, its producer, the tiles and their order, an epilogue that
leaves in sub-tiles. What is new: while the tensor cores multiply, a consumer loads its 64 x 64 of A
by ldmatrix, squares and sums. When a tile's last product is done, so are its sums of squares, and
the reciprocal root mean square of each row multiplies the accumulator's rows on their way out.

One consumer; a column is a stretch of time, [..] what the tensor cores do:

    [A0 B0          ][A1 B1          ]        [A2 B2          ][A3 B3 ..
       load A0, square  load A1, square  wait    load A2, square
       and sum up       and sum up               and sum up

    waits           for                                             at
    producer        both consumers have read the slot               pipeline.empty
    consumer        the producer's copies have landed               pipeline.full
    consumer        its own products                                warpgroup_mma_wait
    consumer        its own store of BUFFERS sub-tiles before       tma.store_wait

* ldmatrix fills just the registers that WGMMA would take its left operand from. So there are two
  ways to go on, by THROUGH_REGISTERS: the products read these registers, and A leaves shared memory
  once; or they read A from shared memory, and the registers are a copy to be squared. The first
  waits for the loads before it can issue a product, and on an H200 that costs more than reading
  shared memory twice (docs/understand/norm_gemm.md).
* Registers that a product in flight reads must not change. Within a chain of CHAIN slots, spelled
  out one after the other, each slot's A has registers of its own, and the next product is issued
  before the last one is done. Round the loop there is no such way: ptxas would run each product by
  itself (its warning C7512), so a chain ends with a wait for all of it. The other consumer's
  products fill the gap.
* The squares stand behind the wait for the next slot. That wait is a branch, and ptxas does not
  move the squares across it, in between the instructions that issue the product.
* A thread holds 16 numbers of each of two rows, and four threads share a row. Each sums up its own;
  the four meet once, when the tile is done.

Registers, for each thread of a consumer: 128 of the accumulator (64 x 256), 16 of A for each slot
in flight, two sums.

Source: the register operand of WGMMA as FlashAttention 3 uses it for P (arXiv:2407.08608).
"""

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.pipeline import make_unguarded
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, operand_layout
from transformer.model.kernels.gemm.config import BLOCK_K
from transformer.model.kernels.gemm.hopper import (
    CONSUMERS,
    Schedule,
    finish,
    make_operands,
    produce,
)
from transformer.model.kernels.gemm.tiles import GemmProblem, describe

# What each thread holds when it has summed up its part of 64 rows of A, in the registers of WGMMA:
# by bits, where the next register is, the next lane of a warp, the next warp.
ROWS_BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)


@dataclass(frozen=True)
class NormGemmConfig:
    """The switches of the kernel.

    Attributes:
        columns: of a tile; its rows are 64 of each of two consumers.
        stages: slots of the pipeline.
        group: rows of tiles that are walked down before the next column of tiles.
        chain: slots whose products are in flight together.
        through_registers: the tensor cores read A from the registers that are squared; False: from
            shared memory, and the registers are a copy.
        epilogue_columns: of a sub-tile.
        buffers: for sub-tiles, of each consumer.
    """

    columns: int = 256
    stages: int = 4
    group: int = 8
    chain: int = 2
    through_registers: bool = False
    epilogue_columns: int = 64
    buffers: int = 2


@gluon.jit
def sum_of_squares(a):
    """Of each row of A, the sum of squares of what one thread holds: fp32 (64, 4)."""
    x = a.to(gl.float32)
    # A row's columns, from the outside in: 16 of an instruction, two halves, four threads, pairs.
    x = (x * x).reshape([a.shape[0], a.shape[1] // 16, 2, 4, 2]).permute((0, 3, 1, 2, 4))
    x = gl.sum(x.reshape([a.shape[0], 4, a.shape[1] // 4]), axis=2)
    return gl.convert_layout(x, ROWS_BY_THREAD, assert_trivial=True)


@gluon.jit
def multiply(operands, schedule, stage, steps, CONSUMER: gl.constexpr):
    """The product of a consumer's rows of A with a tile's columns, and the sums of squares of these
    rows: fp32 (64, columns), fp32 (64,), next stage of the pipeline.
    """
    pipeline = operands.b
    COLUMNS: gl.constexpr = pipeline.tiles.shape[1]
    layout: gl.constexpr = accumulator_layout(COLUMNS)
    operand: gl.constexpr = operand_layout(layout)
    acc = gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, layout)
    squares = gl.zeros([WARPGROUP_ROWS, 4], gl.float32, ROWS_BY_THREAD)
    pipeline.wait(stage)
    for step in range(0, steps, schedule.CHAIN):
        before = stage
        for i in gl.static_range(schedule.CHAIN):
            a_tile = operands.a.index(stage.slot * CONSUMERS + CONSUMER)
            a = a_tile.load(operand)
            b_tile = pipeline.tiles.index(stage.slot).permute((1, 0))
            if schedule.THROUGH_REGISTERS:
                product = warpgroup_mma(a, b_tile, acc, is_async=True)
            else:
                product = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[product])
            if i > 0:
                pipeline.release(before)
            before = stage
            stage = stage.next()
            pipeline.wait(stage, pred=step + i + 1 < steps)
            squares += sum_of_squares(a)
        acc = warpgroup_mma_wait(0, deps=[acc])
        pipeline.release(before)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    squares = gl.convert_layout(gl.sum(squares, axis=1), rows, assert_trivial=True)
    return acc, squares, stage


@gluon.jit
def consume(problem, schedule, operands, out, c, bias, inner, eps, CONSUMER: gl.constexpr):
    """A consumer: its rows of each tile."""
    stage = operands.b.at(0, 0)
    number = gl.to_tensor(0)
    for tile in range(gl.program_id(0), problem.num_tiles(), gl.num_programs(0)):
        row, column = problem.locate(tile)
        row += CONSUMER * WARPGROUP_ROWS
        acc, squares, stage = multiply(operands, schedule, stage, problem.steps, CONSUMER)
        scale = gl.rsqrt(squares / inner + eps)
        number = finish(acc, scale, problem, schedule, out, c, bias, row, column, number, CONSUMER)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "steps", "inner"])
def norm_gemm_kernel(
    a, b, up, c, bias, rows, columns, steps, inner, eps,
    STAGES: gl.constexpr, GROUP: gl.constexpr, CHAIN: gl.constexpr, THROUGH_REGISTERS: gl.constexpr,
    BUFFERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Divide the warps of a program into two consumers, four each, and one producer."""
    TILE_COLUMNS: gl.constexpr = b.block_type.shape[0]
    SWIGLU: gl.constexpr = up is not None
    problem = GemmProblem(
        gl.to_tensor(rows), gl.to_tensor(columns), gl.to_tensor(steps),
        WARPGROUP_ROWS * CONSUMERS, TILE_COLUMNS, GROUP, SWIGLU,
    )  # fmt: skip
    schedule = Schedule(WARPGROUP_ROWS, CONSUMERS, BUFFERS, False, CHAIN, THROUGH_REGISTERS)
    inner, eps = gl.to_tensor(inner).to(gl.float32), gl.to_tensor(eps)
    operands = make_operands(a, b, STAGES, CONSUMERS, TILE_COLUMNS * (2 if SWIGLU else 1))
    out = make_unguarded(c, CONSUMERS * BUFFERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (problem, schedule, operands, out, c, bias, inner, eps, 0)),
            (consume, (problem, schedule, operands, out, c, bias, inner, eps, 1)),
            (produce, (problem, schedule, operands, a, b, up)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


launch_norm_gemm = Launcher(norm_gemm_kernel)


def norm_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    eps: float,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    config: NormGemmConfig | None = None,
) -> None:
    """c = a b^T / rms(a) (+ bias) or, with `up`, silu(gate) * up of two such products.

    Args:
        a: (M, K), 16-bit; like all matrices here, with rows that TMA can address.
        b: (N, K).
        c: (M, N), written.
        eps: added to the mean square under the root.
        up: (N, K).
        bias: (N,), contiguous.
        config: the schedule; None: the one that was measured to be the fastest.
    """
    config = config or NormGemmConfig()
    rows, columns = c.shape
    tile_columns = config.columns if up is None else config.columns // 2
    tiles = cdiv(rows, WARPGROUP_ROWS.value * CONSUMERS.value) * cdiv(columns, tile_columns)
    steps = cdiv(a.shape[1], BLOCK_K * config.chain) * config.chain  # behind the end TMA reads 0
    launch_norm_gemm(
        (min(tiles, devices[a.device].num_sms),),
        (
            describe(a, WARPGROUP_ROWS.value, BLOCK_K),
            describe(b, tile_columns, BLOCK_K),
            None if up is None else describe(up, tile_columns, BLOCK_K),
            describe(c, WARPGROUP_ROWS.value, config.epilogue_columns),
            bias,
            rows,
            columns,
            steps,
            a.shape[1],
            eps,
        ),
        {
            "STAGES": config.stages,
            "GROUP": config.group,
            "CHAIN": config.chain,
            "THROUGH_REGISTERS": config.through_registers,
            "BUFFERS": config.buffers,
            # 64 K registers less the producer's; Triton starts its warps as a warpgroup.
            "CONSUMER_REGISTERS": 240,
            "PRODUCER_REGISTERS": 24,
        },
        num_warps=4,
    )
