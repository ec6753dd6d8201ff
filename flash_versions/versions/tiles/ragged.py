"""Ragged sequences for Hopper's Tensor Memory Accelerator: boxes that end with their sequence.

A box may reach past the end of its sequence. What it would read there belongs to the next one or to
nobody, and 0 * NaN is NaN; what it would write there is not its own. So a box must know where its
sequence ends, and TMA compares coordinates only with the shape of the whole tensor.

Two dimensions in front make it compare with the sequence. Row r of a sequence of n rows that begins
at row f is asked for at coordinates (FAR, f + n, head, FAR - n + r, dim), in a tensor of FAR rows:
so rows from n on lie outside. The steps are those of a row for the second and the fourth
coordinate; for the first, what brings their sum, FAR + f + r rows, back to f + r: addresses are
counted modulo 2^64, and FAR times (2^34 elements less a row) is, modulo 2^64, FAR rows backwards.

Source: `triton.tools.ragged_tma`, which comes with Triton.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from flash_versions.versions.tiles.tma import box_steps, swizzled
from flash_versions.versions.tiles.varlen_scheduler import LINE_SIZE

FAR = gl.constexpr(2**30)
ANY = 2**31 - 2**16  # bounds of the two dimensions in front, which no coordinate reaches
LINE = gl.constexpr(LINE_SIZE)
BACK = 2**34  # elements: times FAR, and 2 or 4 bytes, a multiple of 2^64


def describe_ragged(x: torch.Tensor, rows: int, dims: int, heads: int = 1) -> GluonDescriptor:
    """A (batch, length, heads, dim) tensor of ragged sequences for TMA, as boxes of `rows` rows and
    `dims` dims of so many heads of one sequence; see `box_in_sequence`. Rows are counted from the
    first one of all, and all at one distance: more than one in the batch are whole rows apart.

    Raises:
        ValueError: there are more than 2^30 rows.
    """
    total = x.shape[1] if x.shape[0] == 1 else x.stride(0) // x.stride(1) * x.shape[0]
    if total > FAR.value:
        raise ValueError(f"{total} rows are too many; 2^30 are possible.")
    (_, of_heads, _, dim), (_, head, row, _) = box_steps(x.shape, x.stride())
    shape, strides = [ANY, ANY, of_heads, FAR.value, dim], [BACK - row, row, head, row, 1]
    return swizzled(x, shape, strides, [1, 1, heads, rows, dims])


@gluon.jit
def box_in_sequence(first, length, head, row, dim=0):
    """The coordinates of a box that begins at a row and a dim of a sequence."""
    return FAR, first + length, head, FAR - length + row, dim


@gluon.jit
def planned_tiles(plan):
    """How many tiles a plan has."""
    return gl.load(plan)


@gluon.jit
def planned_tile(plan, number):
    """A line of a plan: (sequence, number of the tile there, the sequence's first query, its number
    of queries, the same of its keys).
    """
    line = plan + LINE * (number + 1)
    return (
        gl.load(line), gl.load(line + 1), gl.load(line + 2), gl.load(line + 3), gl.load(line + 4),
        gl.load(line + 5),
    )  # fmt: skip
