"""The online softmax: maximum and sum of exponentials of rows that are read once.

A row is longer than the chip has room for. Its softmax needs the maximum m and the sum l of
exp(x - m), and l needs m first: two passes. Unless l is corrected whenever m grows:

    block 0:   m = 2    l = exp(1 - 2) + exp(2 - 2)
    block 1:   m = 5    l = exp(2 - 5) * l + exp(5 - 5) + ...      one factor repairs all of l

At the end m + log(l) is the log of the sum of all exponentials, LSE. Return that.
"""

import torch
import triton
import triton.language as tl


def spec(x):
    """What is wanted, in PyTorch."""
    return torch.logsumexp(x, 1)


@triton.jit
def online_softmax_kernel(x, lse, rows, columns, BLOCK: tl.constexpr):
    """The LSE of BLOCK rows of x (rows, columns)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        s = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=float("-inf"))
        # write: the new maximum; the sum corrected to it, plus this block's exponentials
        new_m = tl.maximum(m, tl.max(s, 1))
        pivot = tl.where(new_m == float("-inf"), 0.0, new_m)
        l = l * tl.exp(m - pivot) + tl.sum(tl.exp(s - pivot[:, None]), 1)
        m = new_m
        # end
    tl.store(lse + row, m + tl.log(l), mask=row < rows)


def online_softmax(x):
    """The log of the sum of the exponentials of each row of x (rows, columns)."""
    lse = torch.empty(x.shape[0])
    grid = (triton.cdiv(x.shape[0], 16),)
    online_softmax_kernel[grid](x, lse, x.shape[0], x.shape[1], BLOCK=16)
    return lse


# ---- check ----
HINTS = (
    "new_m = tl.maximum(m, tl.max(s, 1)). Which of your numbers were computed with the old m?",
    "l was a sum of exp(x - m); times exp(m - new_m) it is the sum of exp(x - new_m).",
    "While a row has seen only -inf, m - new_m is inf - inf. Subtract a pivot instead, which is "
    "new_m, or 0 where new_m is -inf.",
)
RESULTS = ("lse",)
TILE = 256


def cases():
    """Inputs by what is special about them."""
    growing = torch.randn(16, 48) + 100 * torch.arange(3).repeat_interleave(16)
    hidden = torch.randn(16, 40)
    hidden[2, :20] = hidden[3] = float("-inf")
    return {
        "rows of 40": (torch.randn(19, 40),),
        "scores that grow": (growing,),
        "scores that fall": (growing.flip(1).contiguous(),),
        "scores near 1000": (torch.randn(16, 48) + 1000,),
        "rows near 1000 and near -1000": (
            torch.randn(16, 48) + 1000 * (-1.0) ** torch.arange(16)[:, None],
        ),
        "a row that begins with -inf, and one with nothing else": (hidden,),
    }
