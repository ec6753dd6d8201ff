"""Copy a vector: y = x.

Each program copies BLOCK elements. No block divides the length, so the last program would read
and write behind the end unless a mask keeps it off:

    x         0 1 2 3 | 4 5 6 7 | 8 9 . .      10 elements, BLOCK = 4
    program      0         1         2

Outside of a tensor is memory of something else. The check fills it with NaN and sees every access.
"""

import torch
import triton
import triton.language as tl


def spec(x):
    """What is wanted, in PyTorch."""
    return x


@triton.jit
def copy_kernel(x, y, length, BLOCK: tl.constexpr):
    """Copy block `program_id` of x to y, both pointers to `length` numbers."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # write: load from x + index and store to y + index, with a mask
    inside = index < length
    tl.store(y + index, tl.load(x + index, mask=inside), mask=inside)
    # end


def copy(x):
    """A copy of x (length,)."""
    y = torch.empty_like(x)
    copy_kernel[(triton.cdiv(len(x), 16),)](x, y, len(x), BLOCK=16)
    return y


# ---- check ----
HINTS = (
    "tl.load(pointers, mask=...) does not touch memory where the mask is False, and tl.store "
    "neither.",
    "The elements that exist are those with index < length.",
    "inside = index < length; then "
    "tl.store(y + index, tl.load(x + index, mask=inside), mask=inside)",
)
RESULTS = ("y",)
TILE = 16


def cases():
    """Inputs by what is special about them."""
    return {f"{n} elements, blocks of 16": (torch.randn(n),) for n in (32, 1, 37)}
