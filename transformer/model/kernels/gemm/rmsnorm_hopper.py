"""y = rms_norm(x) W^T on Hopper: a copy of A in registers is squared and summed up.

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

* Products that read A from the registers that are squared would read shared memory a sixth less,
  but wait for the loads: on an H200 that was slower (docs/understand/log.md).
* Within a chain of CHAIN slots, spelled out one after the other, the next product is issued before
  the last one is done; a chain ends with a wait for all of it. The other consumer's products fill
  the gap.
* The squares stand behind the wait for the next slot. That wait is a branch, and ptxas does not
  move the squares across it, in between the instructions that issue the product.
* A thread holds 16 numbers of each of two rows, and four threads share a row. Each sums up its own;
  the four meet once, when the tile is done.

Registers, for each thread of a consumer: 128 of the accumulator (64 x 256), 16 of A for each slot
in flight, two sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, operand_layout
from transformer.model.kernels.gemm import config
from transformer.model.kernels.gemm.tiles import CONSUMERS, finish

CHAIN = gl.constexpr(config.CHAIN)

# What each thread holds when it has summed up its part of 64 rows of A, in the registers of WGMMA:
# by bits, where the next register is, the next lane of a warp, the next warp.
ROWS_BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)


@gluon.jit
def sum_of_squares(a):
    """Of each row of A, the sum of squares of what one thread holds: fp32 (64, 4)."""
    x = a.to(gl.float32)
    # A row's columns, from the outside in: 16 of an instruction, two halves, four threads, pairs.
    x = (x * x).reshape([a.shape[0], a.shape[1] // 16, 2, 4, 2]).permute((0, 3, 1, 2, 4))
    x = gl.sum(x.reshape([a.shape[0], 4, a.shape[1] // 4]), axis=2)
    return gl.convert_layout(x, ROWS_BY_THREAD, assert_trivial=True)


@gluon.jit
def multiply(operands, stage, steps, CONSUMER: gl.constexpr):
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
    for step in range(0, steps, CHAIN):
        before = stage
        for i in gl.static_range(CHAIN):
            a_tile = operands.a.index(stage.slot * CONSUMERS + CONSUMER)
            a = a_tile.load(operand)
            b_tile = pipeline.tiles.index(stage.slot).permute((1, 0))
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
def consume_normed(problem, schedule, operands, out, c, bias, inner, eps, CONSUMER: gl.constexpr):
    """A consumer: its rows of each tile; `inner` is the number of A's columns."""
    stage = operands.b.at(0, 0)
    number = gl.to_tensor(0)
    for tile in range(gl.program_id(0), problem.num_tiles(), gl.num_programs(0)):
        row, column = problem.locate(tile)
        row += CONSUMER * WARPGROUP_ROWS
        acc, squares, stage = multiply(operands, stage, problem.steps, CONSUMER)
        scale = gl.rsqrt(squares / inner + eps)
        number = finish(acc, scale, problem, schedule, out, c, bias, row, column, number, CONSUMER)
    tma.store_wait(0)
