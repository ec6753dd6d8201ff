"""Tiles of C = A B^T on Hopper: where they are, and how they lie in registers and in memory."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.versions.tiles.triton_compat import GLUON_DTYPES, aggregate
from flash_versions.versions.tiles.wgmma import accumulator_layout


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


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix for TMA, in boxes. What lies outside reads as 0 and is not written."""
    layout = box_layout(rows, columns, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


@cache
def box_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory: swizzled, so that the tensor cores meet no bank twice."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON_DTYPES[dtype])
