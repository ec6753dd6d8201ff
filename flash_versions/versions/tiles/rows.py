"""Rows in memory: a tensor as a pointer with strides, tiles as rows gathered from it.

Tensors are addressed as (batch, head, row, dim) whatever their layout, so transposed views, slices
of a packed QKV and expanded tensors (stride 0) cost nothing. Offsets are 64-bit: `batch * stride`
of a large cache passes 2^31 elements long before memory ends.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.replay.traced import pinned
from flash_versions.dispatch.sizes import LaunchConfig, padded_head_dim


class View(NamedTuple):
    """A tensor as a kernel receives it; strides in elements, the last dimension has stride 1.

    DIM and PADDED, the width of a row and of its tile, are compile-time constants.
    """

    ptr: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    DIM: Any = None
    PADDED: Any = None

    @classmethod
    def of(cls, x: torch.Tensor) -> "View":
        """The view of a (batch, length, heads, dim) tensor."""
        batch_stride, row_stride, head_stride, _ = x.stride()
        widths = x.shape[3], padded_head_dim(x.shape[3])
        return cls(x, batch_stride, head_stride, row_stride, *map(constant, widths))

    @classmethod
    def of_rows(cls, x: torch.Tensor) -> "View":
        """The view of a (batch, heads, length) tensor: one number per row, as the LSE."""
        return cls(x, *x.stride())


class Rows(NamedTuple):
    """The rows of one sequence and head in a tensor: row i < length is row first + i of (batch,
    head). A vector of heads gives each row of a tile its own.
    """

    batch: Any
    head: Any
    first: Any
    length: Any


@lru_cache(None, typed=True)
def constant(value: float | None) -> tl.constexpr:
    """A number for a kernel that is compiled for it. The same object each time: a launch compares
    it with that of the launches before.
    """
    return tl.constexpr(pinned(value))


def launch_tiles(
    launcher: Launcher,
    grid: tuple[int, ...],
    arguments: tuple,
    config: LaunchConfig,
    **constants: Any,
) -> None:
    """Launch a kernel with the tile sizes of a configuration, which are its last constants."""
    constants |= {"BLOCK_Q": config.block_q, "BLOCK_KV": config.block_kv}
    launcher(grid, arguments, constants, config.num_warps, config.num_stages)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (triton.cdiv takes microseconds on the host.)"""
    return -(-a // b)


@triton.jit
def row_pointers(view, rows, index):
    """Pointers to the first element of rows `index`."""
    start = rows.batch.to(tl.int64) * view.batch_stride + rows.head.to(tl.int64) * view.head_stride
    start += tl.cast(rows.first, tl.int64) * view.row_stride  # first may be a constant
    return view.ptr + start + index.to(tl.int64) * view.row_stride


@triton.jit
def load_rows(view, rows, index, MASKED: tl.constexpr):
    """Rows `index` as an (index, PADDED) tile; dims past DIM read as 0, and rows past the length if
    MASKED.
    """
    dim = tl.arange(0, view.PADDED)
    ptrs = row_pointers(view, rows, index)[:, None] + dim[None, :]
    if MASKED:
        mask = (index < rows.length)[:, None] & (dim < view.DIM)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)
    elif view.DIM < view.PADDED:
        return tl.load(ptrs, mask=(dim < view.DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_rows(view, rows, index, tile):
    """Write an (index, PADDED) tile in the dtype of its target, without the padding and the rows
    past the length.
    """
    dim = tl.arange(0, view.PADDED)
    ptrs = row_pointers(view, rows, index)[:, None] + dim[None, :]
    mask = (index < rows.length)[:, None] & (dim < view.DIM)[None, :]
    tl.store(ptrs, tile.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def store_row_values(view, rows, index, values):
    """Write one number per row, without the rows past the length."""
    tl.store(row_pointers(view, rows, index), values, mask=index < rows.length)


@triton.jit
def load_row_values(view, rows, index, other):
    """One number per row; `other` for the rows past the length."""
    return tl.load(row_pointers(view, rows, index), mask=index < rows.length, other=other)
