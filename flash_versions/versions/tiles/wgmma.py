"""The tensor cores of Hopper, which a warpgroup of four warps uses as one (WGMMA)."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.dispatch import interpreter
from flash_versions.dispatch.device import devices

WARPGROUP_ROWS = gl.constexpr(64)  # rows that the four warps of a warpgroup multiply


def available(device: torch.device) -> bool:
    """Whether kernels written for Hopper run on a device: Triton's interpreter knows no Gluon."""
    return not interpreter.enabled() and devices[device].capability == (9, 0)


@gluon.constexpr_function
def accumulator_layout(columns, fp8=False):
    """The registers in which a warpgroup multiplies 64 rows by tiles of `columns`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 if fp8 else 16])


@gluon.constexpr_function
def operand_layout(accumulator, fp8=False):
    """The registers in which a product with this accumulator has its left operand: each holds 32
    bits, two or four numbers.
    """
    return gl.DotOperandLayout(0, accumulator, 4 if fp8 else 2)


@gluon.jit
def unknown_zero():
    """0, unknown to the compiler: what is addressed with it is addressed anew in each step.

    The tensor cores are told of a tile by descriptors, eight of 64 bits for 128 rows. Of a tile
    that stays the same in a loop, ptxas computes them once and keeps them, in registers that it
    then has to spill; with an address that it does not know, it steps from one to the next.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
