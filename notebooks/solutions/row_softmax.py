"""A softmax of each row as a Triton kernel."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    """y = softmax of each row of x (rows, columns); one program for a row."""
    index = tl.arange(0, BLOCK)
    inside = index < columns
    start = tl.program_id(0) * columns
    s = tl.load(x + start + index, mask=inside, other=float("-inf"))  # the exponential is 0
    p = tl.exp(s - tl.max(s, 0))
    tl.store(y + start + index, p / tl.sum(p, 0), mask=inside)


@triton.jit
def padded_with_zero(x, y, columns, BLOCK: tl.constexpr):
    """Where there is no number it loads 0, whose exponential counts."""
    index = tl.arange(0, BLOCK)
    inside = index < columns
    start = tl.program_id(0) * columns
    s = tl.load(x + start + index, mask=inside, other=0.0)
    p = tl.exp(s - tl.max(s, 0))
    tl.store(y + start + index, p / tl.sum(p, 0), mask=inside)


@triton.jit
def without_maximum(x, y, columns, BLOCK: tl.constexpr):
    """Exponentials of large scores are infinite."""
    index = tl.arange(0, BLOCK)
    inside = index < columns
    start = tl.program_id(0) * columns
    p = tl.exp(tl.load(x + start + index, mask=inside, other=float("-inf")))
    tl.store(y + start + index, p / tl.sum(p, 0), mask=inside)


@triton.jit
def unmasked_store(x, y, columns, BLOCK: tl.constexpr):
    """Stores the padding, too: behind the last row is memory of something else."""
    index = tl.arange(0, BLOCK)
    inside = index < columns
    start = tl.program_id(0) * columns
    s = tl.load(x + start + index, mask=inside, other=float("-inf"))
    p = tl.exp(s - tl.max(s, 0))
    tl.store(y + start + index, p / tl.sum(p, 0))


@triton.jit
def unmasked_load(x, y, columns, BLOCK: tl.constexpr):
    """Right numbers; of the last row it reads memory of something else."""
    index = tl.arange(0, BLOCK)
    inside = index < columns
    start = tl.program_id(0) * columns
    s = tl.where(inside, tl.load(x + start + index), float("-inf"))
    p = tl.exp(s - tl.max(s, 0))
    tl.store(y + start + index, p / tl.sum(p, 0), mask=inside)


@triton.jit
def copied(x, y, columns, BLOCK: tl.constexpr):
    """y = x."""
    index = tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + index
    tl.store(y + at, tl.load(x + at, mask=index < columns), mask=index < columns)


def launched(kernel, x):
    """What a kernel makes of x."""
    y = torch.empty_like(x)
    kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def row_softmax(x):
    """Softmax of each row of x (rows, columns)."""
    return launched(row_softmax_kernel, x)


def wrong_padding(x):
    """The padding takes part in the sum."""
    return launched(padded_with_zero, x)


def wrong_overflow(x):
    """The row's maximum is not subtracted."""
    return launched(without_maximum, x)


def wrong_store(x):
    """The store has no mask."""
    return launched(unmasked_store, x)


def wrong_torch(x):
    """No kernel at all."""
    return torch.softmax(x, 1)


def wrong_load(x):
    """The load has no mask."""
    return launched(unmasked_load, x)


def wrong_copy(x):
    """PyTorch computes, and the kernel copies."""
    return launched(copied, torch.softmax(x, 1))
