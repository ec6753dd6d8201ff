"""Tensor memory, Blackwell's memory for accumulators, under the names of each Triton version.

A streaming multiprocessor has 128 lanes of 512 columns, each of 32 bits. The tensor cores write
products to it and read their left operand from it. Four warps load and store tiles of 128 rows.
Each of their threads has one row in its registers, so a maximum or a sum over a row needs no other
thread.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import blackwell

from flash_versions.dispatch.device import devices

ROWS = gl.constexpr(128)  # of a tile: the lanes of tensor memory


def available(device: torch.device) -> bool:
    """Whether kernels written for Blackwell run on a device."""
    return devices[device].capability == (10, 0)


@builtin
def view(tile, dtype, shape, layout, _semantic=None):
    """The same columns as a tile of another type."""
    method = getattr(tile, "reinterpret", None) or tile._reinterpret  # public from Triton 3.8 on
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.constexpr_function
def columns_layout(columns):
    """A tile of 128 rows: a lane for each row, a column for each fp32 or two 16-bit numbers."""
    return blackwell.TensorMemoryLayout((128, columns), col_stride=1)


@gluon.constexpr_function
def registers_of(dtype, columns):
    """The registers of four warps for a tile of 128 rows: a thread for each row."""
    shape = [128, columns]
    layout = blackwell.TensorMemoryLayout((128, columns), col_stride=1)
    if hasattr(blackwell, "get_tmem_reg_layout"):  # until Triton 3.7
        return blackwell.get_tmem_reg_layout(dtype, shape, layout, 4)
    kind = blackwell.tensor_memory_descriptor_type(dtype, shape, layout, shape)
    return kind.get_reg_layout(num_warps=4)


@gluon.jit
def split_columns(x, PARTS: gl.constexpr):
    """A tile in registers as PARTS tiles of fewer columns, from left to right; no data moves."""
    if PARTS == 1:
        return (x,)
    else:
        HALF: gl.constexpr = x.shape[1] // 2
        LAYOUT: gl.constexpr = registers_of(x.dtype, HALF)
        left, right = gl.split(x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)))
        left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
        right = gl.convert_layout(right, LAYOUT, assert_trivial=True)
        return split_columns(left, PARTS // 2) + split_columns(right, PARTS // 2)
