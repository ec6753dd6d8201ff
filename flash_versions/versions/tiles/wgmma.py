"""The tensor cores of Hopper, which a warpgroup of four warps uses as one (WGMMA)."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.dispatch.device import devices
from flash_versions.versions.tiles.triton_compat import aggregate

WARPGROUP_ROWS = gl.constexpr(64)  # rows that the four warps of a warpgroup multiply


def available(device: torch.device) -> bool:
    """Whether kernels written for Hopper run on a device."""
    return devices[device].capability == (9, 0)


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
def sums_of_threads(x):
    """The sums of an accumulator's rows in parts (rows, 4), those of the four threads that share a
    row: of every eight columns each has two.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    pairs = x.reshape([ROWS, COLUMNS // 8, 4, 2])
    # Left and right columns apart, then together: in other orders calls were up to 13 % slower, as
    # ptxas orders all instructions by it (docs/understand/log.md).
    return gl.sum(gl.sum(pairs, axis=1), axis=2)


@aggregate
class RowSums:
    """Running sums of the rows of accumulators. The parts of a row's four threads meet at the end
    only, in `total`, so no step exchanges sums between threads.
    """

    parts: gl.tensor  # (rows, 4)

    @gluon.jit
    def per_row(self, x):
        """A number for each row as one for each row of the parts."""
        return gl.convert_layout(x, gl.SliceLayout(1, self.parts.type.layout), assert_trivial=True)

    @gluon.jit
    def spread(self, x):
        """The sums and x, a number for each row: every thread adds a quarter of it."""
        return RowSums(self.parts + self.per_row(x * 0.25)[:, None])

    @gluon.jit
    def grown(self, alpha, new, weight):
        """alpha times the sums, a number for each row, and weight times new parts (rows, 4)."""
        new = gl.convert_layout(new, self.parts.type.layout, assert_trivial=True)
        return RowSums(self.per_row(alpha)[:, None] * self.parts + weight * new)

    @gluon.jit
    def total(self):
        """The sums of whole rows: (rows,)."""
        return gl.sum(self.parts, axis=1)


@gluon.jit
def no_sums(COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Sums of 0, over accumulators of so many columns."""
    return RowSums(sums_of_threads(gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, layout)))


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
