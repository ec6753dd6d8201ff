"""Tensor descriptors on the host: what a tensor looks like to Hopper's Tensor Memory Accelerator.

A descriptor holds an address, a shape, strides and the shape of a box. The order of the strides
does not matter, so a tensor is described as (batch, head, row, dim) whatever its layout, and a box
is a tile: so many rows of one head. What lies outside of the tensor reads as 0, also the padding of
a head_dim that is no power of two.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_versions.dispatch.sizes import padded_head_dim
from flash_versions.versions.tiles.triton_compat import GLUON_DTYPES


class Box:
    """How tensors are cut into boxes: of a tensor that is not `undescribable` it gives the
    descriptor.

    Args:
        like: a descriptor with such boxes, of any tensor. It was checked; to copy it and change the
            tensor takes a fraction of the time.
        steps: of a tensor's shape and strides, those that its descriptor has.
    """

    def __init__(self, like: Any, steps: Callable[[tuple, tuple], tuple[list, list]]) -> None:
        self.kind, self.fields, self.steps = type(like), vars(like), steps

    def __call__(self, x: torch.Tensor, steps: tuple[list, list] | None = None) -> Any:
        """The descriptor of a tensor, or of one whose shape and strides are known to be steps."""
        fields = self.fields.copy()  # what builds it anew takes three times as long
        fields["base"] = x
        fields["shape"], fields["strides"] = steps or self.steps(x.shape, x.stride())
        made: Any = object.__new__(self.kind)
        made.__dict__ = fields
        return made


def describe(x: torch.Tensor, rows: int, dims: int | None = None) -> TensorDescriptor:
    """A (batch, length, heads, dim) tensor as boxes of `rows` rows of one head, each as wide as a
    tile, or of so many dims.
    """
    return portable_box(x.dtype, rows, dims or padded_head_dim(x.shape[3]))(x)


def describe_swizzled(x: torch.Tensor, rows: int, dims: int, heads: int = 1) -> GluonDescriptor:
    """A (batch, length, heads, dim) tensor for TMA, as boxes of `rows` rows and `dims` dims of one
    head, or of several. What lies outside of the tensor reads as 0 and is not written.
    """
    return swizzled_box(x.dtype, rows, dims, heads)(x)


@cache
def portable_box(dtype: torch.dtype, rows: int, dims: int) -> Box:
    """Boxes of a portable kernel."""
    box = [1, 1, rows, dims]
    x = torch.empty(box, dtype=dtype, device="meta")
    return Box(TensorDescriptor(x, box, [*x.stride()], box), box_steps)


@cache
def swizzled_box(dtype: torch.dtype, rows: int, dims: int, heads: int = 1) -> Box:
    """Boxes as `describe_swizzled` has them."""
    return Box(swizzled(dtype, [1, heads, rows, dims]), box_steps)


def swizzled(dtype: torch.dtype, box: list[int]) -> GluonDescriptor:
    """A descriptor of boxes that lie in shared memory swizzled, so that the tensor cores meet no
    bank twice.
    """
    layout = gl.NVMMASharedLayout.get_default_for(box, GLUON_DTYPES[dtype])
    x = torch.empty(box, dtype=dtype, device="meta")
    return GluonDescriptor(x, box, [*x.stride()], box, layout)


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


def describable(*tensors: torch.Tensor) -> bool:
    """Whether no tensor is `undescribable`; most of them are contiguous."""
    for x in tensors:
        whole = x.is_contiguous() and x.numel()
        if not whole or (x.data_ptr() | x.stride(2) * x.element_size()) % 16:
            if undescribable("x", x):
                return False
    return True


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
