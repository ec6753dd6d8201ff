"""Tensor descriptors on the host: what a tensor looks like to Hopper's Tensor Memory Accelerator.

A descriptor holds an address, a shape, strides and the shape of a box. The order of the strides
does not matter, so a tensor is described as (batch, head, row, dim) whatever its layout, and a box
is a tile: so many rows of one head. What lies outside of the tensor reads as 0, also the padding of
a head_dim that is no power of two.
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_versions.memory import padded_head_dim


def describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A (batch, length, heads, dim) tensor as boxes of `rows` rows of one head, each as wide as a
    tile.
    """
    width = padded_head_dim(x.shape[3])
    return TensorDescriptor(x, *box_steps(x), [1, 1, rows, width])


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
    if x.numel() == 0:
        return f"{name} is empty, and a descriptor has no empty dimension."
    if x.data_ptr() % 16:
        return f"{name} does not begin at a multiple of 16 bytes, where a descriptor has to."
    for n, stride in zip(x.shape[:3], x.stride()):
        if n > 1 and (stride == 0 or stride * x.element_size() % 16):
            return (
                f"{name} has strides {x.stride()}; a descriptor steps by positive multiples of 16 "
                f"bytes."
            )
    return None
