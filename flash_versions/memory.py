"""The pointer world of FA1 and FA2: tensors as a pointer with strides, tiles as rows gathered from
them.

Tensors are addressed as (batch, head, row, dim) whatever their layout, so transposed views, slices
of a packed QKV and expanded tensors (stride 0) cost nothing. Offsets are 64-bit: `batch * stride`
of a large cache passes 2^31 elements long before memory ends.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class View(NamedTuple):
    """A tensor as a kernel receives it; strides in elements, the last dimension has stride 1."""

    ptr: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any

    @classmethod
    def of(cls, x: torch.Tensor) -> "View":
        """The view of a (batch, length, heads, dim) tensor."""
        return cls(x, x.stride(0), x.stride(2), x.stride(1))

    @classmethod
    def of_rows(cls, x: torch.Tensor) -> "View":
        """The view of a (batch, heads, length) tensor: one number per row, as the LSE."""
        return cls(x, x.stride(0), x.stride(1), x.stride(2))


class Rows(NamedTuple):
    """The rows of one (batch, head): row i < length starts at ptr + i * stride."""

    ptr: Any
    stride: Any
    length: Any


@triton.jit
def rows_of(view, batch, head, length):
    """The rows of (batch, head) in a view. A vector of heads, one per row of a tile, gives each row
    its own head.
    """
    start = batch.to(tl.int64) * view.batch_stride + head.to(tl.int64) * view.head_stride
    return Rows(view.ptr + start, view.row_stride, length)


@triton.jit
def load_rows(
    rows,
    index,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows `index` as an (index, PADDED_DIM) tile; dims past HEAD_DIM read as 0, and rows past the
    length if MASKED.
    """
    dim = tl.arange(0, PADDED_DIM)
    ptrs = (rows.ptr + index.to(tl.int64) * rows.stride)[:, None] + dim[None, :]
    if MASKED:
        mask = (index < rows.length)[:, None] & (dim < HEAD_DIM)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)
    elif HEAD_DIM < PADDED_DIM:
        return tl.load(ptrs, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_rows(rows, index, tile, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Write an (index, PADDED_DIM) tile in the dtype of its target, without the padding and the
    rows past the length.
    """
    dim = tl.arange(0, PADDED_DIM)
    ptrs = (rows.ptr + index.to(tl.int64) * rows.stride)[:, None] + dim[None, :]
    mask = (index < rows.length)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(ptrs, tile.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def store_row_values(rows, index, values):
    """Write one number per row, without the rows past the length."""
    tl.store(rows.ptr + index.to(tl.int64) * rows.stride, values, mask=index < rows.length)


@triton.jit
def load_row_values(rows, index, other):
    """One number per row; `other` for the rows past the length."""
    return tl.load(
        rows.ptr + index.to(tl.int64) * rows.stride, mask=index < rows.length, other=other
    )


@triton.jit
def visible_length(kv_lengths, batch, kv_length):
    """How many keys a batch row has: kv_lengths[batch], clamped to 0 .. kv_length; None: all."""
    if kv_lengths is not None:
        kv_length = tl.minimum(tl.maximum(tl.load(kv_lengths + batch), 0), kv_length).to(tl.int32)
    return kv_length
