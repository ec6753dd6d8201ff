"""Transpose a matrix: y = x.T.

The tile at (i, j) of x becomes the tile at (j, i) of y. Load it with one matrix of addresses and
store it with another; the mask has to fit each of them.

    x    A B B        y    A C
         C D D             B D
                           B D
"""

import torch
import triton
import triton.language as tl


def spec(x):
    """What is wanted, in PyTorch."""
    return x.T


@triton.jit
def transpose_kernel(x, y, rows, columns, BLOCK: tl.constexpr):
    """Write tile (program_id(0), program_id(1)) of x (rows, columns) to y (columns, rows)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    # write: store the tile where y has it; y's rows have `rows` elements
    tl.store(y + column[None, :] * rows + row[:, None], tile, mask=inside)
    # end


def transpose(x):
    """The transpose of x (rows, columns)."""
    y = torch.empty(x.shape[1], x.shape[0])
    grid = (triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))
    transpose_kernel[grid](x, y, x.shape[0], x.shape[1], BLOCK=16)
    return y


# ---- check ----
HINTS = (
    "y[j, i] = x[i, j], and element (j, i) of y is at y + j * rows + i.",
    "The tile need not change: an address for each of its elements can point anywhere. Or store "
    "tile.T, and then the addresses and the mask are transposed, too.",
    "tl.store(y + column[None, :] * rows + row[:, None], tile, mask=inside)",
)
RESULTS = ("y",)
TILE = 256


def cases():
    """Inputs by what is special about them."""
    return {f"{m} x {n}": (torch.randn(m, n),) for m, n in ((16, 16), (32, 16), (21, 40))}
