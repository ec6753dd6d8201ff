"""Tensor descriptors on the host: what a tensor looks like to Hopper's Tensor Memory Accelerator.

A descriptor holds an address, a shape, strides and the shape of a box. The order of the strides
does not matter, so a tensor is described as (batch, head, row, dim) whatever its layout, and a box
is a tile: so many rows of one head. What lies outside of the tensor reads as 0, also the padding of
a head_dim that is no power of two.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_versions.dispatch.sizes import padded_head_dim
from flash_versions.versions.tiles.triton_compat import GLUON_DTYPES

MAX_KNOWN = 4096


def describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A (batch, length, heads, dim) tensor as boxes of `rows` rows of one head, each as wide as a
    tile.
    """
    return described(TensorDescriptor, x, rows, padded_head_dim(x.shape[3]))


def describe_swizzled(x: torch.Tensor, rows: int, dims: int, heads: int = 1) -> GluonDescriptor:
    """A (batch, length, heads, dim) tensor for TMA, as boxes of `rows` rows and `dims` dims of one
    head, or of several. What lies outside of the tensor reads as 0 and is not written.
    """
    return described(swizzled_descriptor, x, rows, dims, heads)


def swizzled_descriptor(
    x: torch.Tensor, shape: list[int], strides: list[int], box: list[int]
) -> GluonDescriptor:
    """Boxes that lie in shared memory swizzled, so that the tensor cores meet no bank twice."""
    layout = gl.NVMMASharedLayout.get_default_for(box, GLUON_DTYPES[x.dtype])
    return GluonDescriptor(x, shape, strides, box, layout)


def described(
    make: Callable[..., Any], x: torch.Tensor, rows: int, dims: int, heads: int = 1
) -> Any:
    """`make(x, shape, strides, box)` for an x that is not `undescribable`, with boxes of rows and
    dims of so many heads.

    All of a descriptor but the address follows from the tensor's type, shape and strides: one that
    was made, and checked, before is copied, which takes a fraction of the time.
    """
    key = (make, x.dtype, x.shape, x.stride(), rows, dims, heads)
    like = known.get(key)
    if like is None:
        if len(known) >= MAX_KNOWN:
            known.clear()
        found = make(x, *box_steps(x), [1, heads, rows, dims])
        like = known[key] = (type(found), {**vars(found), "base": None})
    kind, fields = like
    copy: Any = object.__new__(kind)
    copy.__dict__ = {**fields, "base": x}
    return copy


known: dict[tuple, tuple[type, dict[str, Any]]] = {}  # classes and fields of descriptors


def box_steps(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a (batch, length, heads, dim) tensor as (batch, head, row, dim)."""
    x = x.transpose(1, 2)
    # The stride of a single element may be anything, and a descriptor must like it all the same.
    strides = [16 if n == 1 else stride for n, stride in zip(x.shape[:3], x.stride())]
    return list(x.shape), [*strides, 1]


def undescribable(name: str, x: torch.Tensor) -> str | None:
    """Why no descriptor can address a (batch, length, heads, dim) tensor, as a sentence, or
    None.
    """
    aligned = x.data_ptr() % 16 == 0
    return undescribable_steps(name, aligned, x.shape, x.stride(), x.element_size())


@lru_cache(MAX_KNOWN)
def undescribable_steps(
    name: str, aligned: bool, shape: torch.Size, strides: tuple[int, ...], itemsize: int
) -> str | None:
    """`undescribable` of a tensor with this shape; strides in elements."""
    if shape.numel() == 0:
        return f"{name} is empty, and a descriptor has no empty dimension."
    if not aligned:
        return f"{name} does not begin at a multiple of 16 bytes, where a descriptor has to."
    for n, stride in zip(shape[:3], strides):
        if n > 1 and (stride == 0 or stride * itemsize % 16):
            return (
                f"{name} has strides {strides}; a descriptor steps by positive multiples of 16 "
                f"bytes."
            )
    return None
