"""Sum the rows of a matrix: y[i] = the sum of x[i, :].

A row is longer than a block, so a program goes along its rows block by block and adds.

    x     . . . . | . . . . | . .      ->  y
    step     0         1        2

What is loaded where the mask is False? Nothing, and the value is undefined unless you say which
number takes its place: tl.load(..., mask=..., other=0.0).
"""

import torch
import triton
import triton.language as tl


def spec(x):
    """What is wanted, in PyTorch."""
    return x.sum(1)


@triton.jit
def row_sum_kernel(x, y, rows, columns, BLOCK: tl.constexpr):
    """The sums of BLOCK rows of x (rows, columns)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        # write: load the tile of these rows and columns, and add its sums to `total`
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        total += tl.sum(tile, 1)
        # end
    tl.store(y + row, total, mask=row < rows)


def row_sum(x):
    """The sums of the rows of x (rows, columns)."""
    y = torch.empty(x.shape[0])
    row_sum_kernel[(triton.cdiv(x.shape[0], 16),)](x, y, x.shape[0], x.shape[1], BLOCK=16)
    return y


# ---- check ----
HINTS = (
    "tl.sum(tile, 1) adds along the columns and leaves one number for each row.",
    "What the mask leaves out must not count: other=0.0.",
    "tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0); "
    "total += tl.sum(tile, 1)",
)
RESULTS = ("y",)
TILE = 256


def cases():
    """Inputs by what is special about them."""
    return {f"{m} x {n}": (torch.randn(m, n),) for m, n in ((16, 32), (16, 40), (19, 5))}
