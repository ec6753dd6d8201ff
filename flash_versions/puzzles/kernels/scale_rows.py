"""Scale the rows of a matrix: y[i, j] = x[i, j] * w[i].

A program works on a tile of BLOCK x BLOCK elements. Two vectors of indices make a matrix of
addresses: rows[:, None] is a column, columns[None, :] a row, and their sum has all pairs.

    x     . . | . . | .       3 x 5 elements, BLOCK = 2
          . . | . . | .       program (1, 2) has one element
          ----+-----+--
          . . | . . | .

x may be a part of a larger matrix, so one row begins `stride` elements after the one before it.
"""

import torch
import triton
import triton.language as tl


def spec(x, w):
    """What is wanted, in PyTorch."""
    return x * w[:, None]


@triton.jit
def scale_rows_kernel(x, w, y, rows, columns, stride, BLOCK: tl.constexpr):
    """Scale one tile. y has rows without a gap: element (i, j) is y[i * columns + j]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # write: the addresses and the mask of the tile, two loads, a product, a store
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * stride + column[None, :], mask=inside)
    factor = tl.load(w + row, mask=row < rows)
    tl.store(y + row[:, None] * columns + column[None, :], tile * factor[:, None], mask=inside)
    # end


def scale_rows(x, w):
    """x (rows, columns) with row i times w[i]; w is (rows,)."""
    y = torch.empty(x.shape)
    grid = (triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))
    scale_rows_kernel[grid](x, w, y, x.shape[0], x.shape[1], x.stride(0), BLOCK=16)
    return y


# ---- check ----
HINTS = (
    "Element (i, j) of x is at x + i * stride + j, of y at y + i * columns + j.",
    "The mask has the tile's shape: (row < rows)[:, None] & (column < columns)[None, :]. The load "
    "of w has a mask of its own, row < rows.",
    "tile = tl.load(x + row[:, None] * stride + column[None, :], mask=inside), "
    "factor = tl.load(w + row, mask=row < rows), then "
    "tl.store(y + row[:, None] * columns + column[None, :], tile * factor[:, None], mask=inside)",
)
RESULTS = ("y",)
TILE = 256


def cases():
    """Inputs by what is special about them."""
    return {
        "32 x 16": (torch.randn(32, 16), torch.randn(32)),
        "19 x 35": (torch.randn(19, 35), torch.randn(19)),
        "7 x 20, columns of a matrix with 50": (torch.randn(7, 50)[:, :20], torch.randn(7)),
    }
