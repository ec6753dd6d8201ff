"""Tensor descriptors on the host: what a tensor looks like to Hopper's Tensor Memory Accelerator.

A descriptor holds an address, a shape, strides and the shape of a box. The order of the strides
does not matter, so a tensor is described as (batch, head, row, dim) whatever its layout, and a box
is a tile: so many rows of one head. What lies outside of the tensor reads as 0, also the padding of
a head_dim that is no power of two.
"""

from collections.abc import Callable
from functools import cache
from operator import index
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_versions.dispatch.replay.driver import moved
from flash_versions.dispatch.sizes import padded_head_dim
from flash_versions.versions.tiles.triton_compat import GLUON_DTYPES

Box = Callable[[torch.Tensor], Any]  # what describes a tensor as boxes of one shape


def boxes(describe: Callable[..., Any], *shape: int) -> Box:
    """What describes tensors as boxes of a shape: describe(x, *shape)."""
    return lambda x: describe(x, *shape)


def describe(x: torch.Tensor, rows: int, dims: int | None = None) -> TensorDescriptor:
    """A (batch, length, heads, dim) tensor as boxes of `rows` rows of one head, each as wide as a
    tile, or of so many dims.
    """
    box = [1, 1, rows, dims or padded_head_dim(x.shape[3])]
    return TensorDescriptor(x, *box_steps(x.shape, x.stride()), box)


def describe_swizzled(x: torch.Tensor, rows: int, dims: int, heads: int = 1) -> GluonDescriptor:
    """A (batch, length, heads, dim) tensor for TMA, as boxes of `rows` rows and `dims` dims of one
    head, or of several. What lies outside of the tensor reads as 0 and is not written.
    """
    return swizzled(x, *box_steps(x.shape, x.stride()), [1, heads, rows, dims])


def swizzled(x: torch.Tensor, shape: list, strides: list, box: list[int]) -> GluonDescriptor:
    """A descriptor of boxes that lie in shared memory swizzled, so that the tensor cores meet no
    bank twice.
    """
    return moved(descriptor(x.dtype, *map(index, box)), x, shape, strides)


@cache
def descriptor(dtype: torch.dtype, *box: int) -> GluonDescriptor:
    """One of such boxes, of any tensor. It is checked; to copy it takes a fraction of the time."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), GLUON_DTYPES[dtype])
    x = torch.empty(box, dtype=dtype, device="meta")
    return GluonDescriptor(x, list(box), [*x.stride()], list(box), layout)


def box_steps(shape: tuple, strides: tuple) -> tuple[list[int], list[int]]:
    """Shape and strides of a (batch, length, heads, dim) tensor as (batch, head, row, dim)."""
    batch, length, heads, dim = shape
    of_batch, of_row, of_head, _ = strides
    # The stride of a single element may be anything, and a descriptor must like it all the same.
    if batch == 1:
        of_batch = 16
    if heads == 1:
        of_head = 16
    if length == 1:
        of_row = 16
    return [batch, heads, length, dim], [of_batch, of_head, of_row, 1]


def undescribable(name: str, x: torch.Tensor) -> str | None:
    """Why no descriptor can address a (batch, length, heads, dim) tensor, as a sentence, or
    None.
    """
    if x.data_ptr() % 16:
        return f"{name} does not begin at a multiple of 16 bytes, where a descriptor has to."
    (batch, length, heads, dim), strides = x.shape, x.stride()
    of_batch, of_row, of_head, _ = strides
    if not (batch and length and heads and dim):
        return f"{name} is empty, and a descriptor has no empty dimension."
    vector = 16 // x.element_size()
    if (
        (batch > 1 and (of_batch % vector or not of_batch))
        or (length > 1 and (of_row % vector or not of_row))
        or (heads > 1 and (of_head % vector or not of_head))
    ):
        return (
            f"{name} has strides {strides}; a descriptor steps by positive multiples of 16 bytes."
        )
    return None
