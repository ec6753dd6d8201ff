"""A softmax of each row: y[i, j] = exp(x[i, j]) / sum over k of exp(x[i, k]).

A row fits in one block, and a program has one row. Two things go wrong in a first attempt:

    x = 300       exp(300) is inf. Subtract the row's maximum first: the result is the same.
    no element    a row in which every score is -inf has no softmax. We say: all 0.

The second happens in attention, where a mask sets scores to -inf and may leave a query no key.
"""

import torch
import triton
import triton.language as tl


def spec(x):
    """What is wanted, in PyTorch."""
    return torch.softmax(x, 1).nan_to_num(0.0)


@triton.jit
def row_softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    """The softmax of one row of x (rows, columns); BLOCK is at least `columns`."""
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    # write: load the row, then maximum, exponentials, sum; store the row
    inside = column < columns
    s = tl.load(x + row * columns + column, mask=inside, other=float("-inf"))
    largest = tl.max(s, 0)
    p = tl.exp(s - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(p, 0)
    tl.store(y + row * columns + column, p / tl.where(total == 0.0, 1.0, total), mask=inside)
    # end


def row_softmax(x):
    """The softmax of each row of x (rows, columns)."""
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    row_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=block)
    return y


# ---- check ----
HINTS = (
    'Load with other=float("-inf"): the exponential of what is not there is 0.',
    "Subtract tl.max(s, 0) from the row. Where it is -inf, s - max is inf - inf, not a number: "
    "subtract 0 there, with tl.where.",
    'p = tl.exp(s - tl.where(largest == float("-inf"), 0.0, largest)); divide by the sum, or by 1 '
    "where the sum is 0.",
)
RESULTS = ("y",)


def cases():
    """Inputs by what is special about them."""
    hidden = torch.randn(3, 16)
    hidden[1] = hidden[2, 3:] = float("-inf")
    return {
        "rows of 16": (torch.randn(4, 16),),
        "rows of 13, in a block of 16": (torch.randn(4, 13),),
        "scores of 300": (300 * torch.randn(4, 16),),
        "a row of -inf": (hidden,),
    }
