"""Tiles of C = A B^T on Hopper: where they are, how they lie in registers, and how they leave."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.versions.tiles.tma import swizzled
from flash_versions.versions.tiles.triton_compat import aggregate, store_tile
from flash_versions.versions.tiles.wgmma import accumulator_layout
from transformer.model.kernels.gemm import config

CONSUMERS = gl.constexpr(config.CONSUMERS)


@aggregate
class GemmProblem:
    """Tiles of C and their order, and what is done with them."""

    rows: gl.tensor
    columns: gl.tensor
    steps: gl.tensor  # stages of the pipeline that a tile takes
    TILE_ROWS: gl.constexpr
    TILE_COLUMNS: gl.constexpr  # of C: with SwiGLU half of those that are multiplied
    GROUP: gl.constexpr
    SWIGLU: gl.constexpr

    @gluon.jit
    def num_tiles(self):
        """How many there are."""
        return gl.cdiv(self.rows, self.TILE_ROWS) * gl.cdiv(self.columns, self.TILE_COLUMNS)

    @gluon.jit
    def locate(self, tile):
        """(first row, first column) of a tile: down GROUP rows of tiles, then one to the right."""
        down = gl.cdiv(self.rows, self.TILE_ROWS)
        in_group = self.GROUP * gl.cdiv(self.columns, self.TILE_COLUMNS)
        first = tile // in_group * self.GROUP
        height = gl.minimum(down - first, self.GROUP)
        row = first + tile % in_group % height
        return row * self.TILE_ROWS, tile % in_group // height * self.TILE_COLUMNS


@aggregate
class Schedule:
    """How it is computed: `GemmConfig` for the kernel."""

    ROWS: gl.constexpr
    READERS: gl.constexpr  # consumers that compute one tile, and so read the same slots
    BUFFERS: gl.constexpr
    RESIDUAL: gl.constexpr

    @gluon.jit
    def stage_out(self, out, consumer, number):
        """Where the sub-tile of that number of a consumer leaves by."""
        slot = consumer * self.BUFFERS + number % self.BUFFERS
        return out.at(slot, (number // self.BUFFERS) & 1)


@gluon.jit
def halves(x):
    """The left and the right half of a tile's columns; both stay where they are, in registers."""
    HALF: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = accumulator_layout(HALF)
    left, right = gl.split(x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)))
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1 + gl.exp(-x))


@gluon.jit
def in_parts(x, WIDTH: gl.constexpr):
    """A tile as a tuple of tiles of WIDTH columns, from left to right."""
    parts = (x,)
    for _ in gl.static_range(doublings(x.shape[1] // WIDTH)):
        finer = halves(parts[0])
        for i in gl.static_range(1, len(parts)):
            finer += halves(parts[i])
        parts = finer
    return parts


@gluon.constexpr_function
def doublings(n):
    """log2 of a power of two."""
    return n.bit_length() - 1


@gluon.jit
def finish(
    acc, scale, problem, schedule, out, c, bias, row, column, number, CONSUMER: gl.constexpr
):
    """Epilogue: bring a consumer's part of a tile to C, sub-tile by sub-tile.

    Args:
        acc: fp32 (ROWS, columns); with SwiGLU, gate and up side by side.
        scale: fp32 (ROWS,), by which rows are multiplied; None: they are not.
        out: a pipeline of buffers (ROWS, WIDTH), some of them this consumer's; with a residual, in
            which its sub-tiles arrive.
        number: how many sub-tiles this consumer has stored.
    """
    WIDTH: gl.constexpr = out.tiles.shape[2]
    layout: gl.constexpr = accumulator_layout(WIDTH)
    PARTS: gl.constexpr = problem.TILE_COLUMNS // WIDTH
    if problem.SWIGLU:
        gate, up = halves(acc)
        gates, parts = in_parts(gate, WIDTH), in_parts(up, WIDTH)
    else:
        parts = in_parts(acc, WIDTH)
    if scale is not None:
        across: gl.constexpr = gl.SliceLayout(1, layout)
        scale = gl.convert_layout(scale, across, assert_trivial=True)[:, None]
    for i in gl.static_range(PARTS):
        part = parts[i]
        if scale is not None:
            part *= scale
        if problem.SWIGLU:
            part *= silu(gates[i] if scale is None else gates[i] * scale)
        if bias is not None:
            columns = column + i * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
            values = gl.load(bias + columns, mask=columns < problem.columns, other=0)
            part += values.to(gl.float32)[None, :]
        stage = schedule.stage_out(out, CONSUMER, number + i)
        buffer = out.tiles.index(stage.slot)
        if schedule.RESIDUAL:
            out.wait(stage)
            part += buffer.load(layout).to(gl.float32)
        else:
            tma.store_wait(schedule.BUFFERS - 1)
        buffer.store(part.to(c.dtype))
        fence_async_shared()
        store_tile(c, [row, column + i * WIDTH], buffer)
        if schedule.RESIDUAL:
            if i > 0:
                tma.store_wait(1)
                out.release(schedule.stage_out(out, CONSUMER, number + i - 1))
            if i == PARTS - 1:
                tma.store_wait(0)
                out.release(stage)
    return number + PARTS


def describe_matrix(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix as boxes, swizzled, so that the tensor cores meet no bank twice. What lies outside
    of the matrix reads as 0 and is not written.
    """
    return swizzled(x, [*x.shape], [*x.stride()], [rows, columns])
