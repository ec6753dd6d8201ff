"""Memory in which a wrong access is seen: every tensor has a margin on both sides.

The margins of what a kernel allocates are filled with a pattern that a store past the end changes,
and the tensor itself with the same pattern, so that an element that was never stored is seen. The
margins of inputs are NaN: a load past the end spoils the result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

MARGIN = 1 << 16  # elements; a block of queries of 8 heads of 128 dims past the end
PATTERN = 0xFF  # of every byte: no arithmetic gives this NaN, and -1 of an integer
ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch, "zeros"), (torch, "zeros_like"))


class Guarded(NamedTuple):
    """A tensor in the middle of a larger buffer of bytes."""

    tensor: torch.Tensor
    buffer: torch.Tensor

    def damage(self) -> str | None:
        """Where the margins were written to, in words, or None."""
        width = MARGIN * self.tensor.element_size()
        before, after = self.buffer[:width] != PATTERN, self.buffer[-width:] != PATTERN
        if after.any():
            return f"{_elements(after.nonzero()[0], self.tensor)} behind its end"
        if before.any():
            return (
                f"{_elements(width - 1 - before.nonzero()[-1], self.tensor)} before its beginning"
            )
        return None


def _elements(byte: torch.Tensor, x: torch.Tensor) -> str:
    count = int(byte) // x.element_size() + 1
    return f"{count} element{'s' * (count != 1)}"


def guard(like: torch.Tensor, device: torch.device) -> Guarded:
    """A tensor with the shape, strides and dtype of `like`, which may be on the meta device."""
    span = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride()))
    size = like.element_size()
    buffer = _empty((2 * MARGIN + span) * size, dtype=torch.uint8, device=device).fill_(PATTERN)
    inner = buffer[MARGIN * size : -MARGIN * size].view(like.dtype)
    return Guarded(inner.as_strided(like.shape, like.stride()), buffer)


_empty = torch.empty


def guarded_input(x: torch.Tensor, margin: float) -> torch.Tensor:
    """A copy of x between two margins of this number, those of integers as they are."""
    if x.numel() == 0:
        return x
    found = guard(x, x.device)
    if x.is_floating_point():
        found.buffer.view(x.dtype).fill_(margin)
    found.tensor.copy_(x)
    return found.tensor


@contextmanager
def guarding() -> Iterator[list[Guarded]]:
    """Inside, `torch.empty`, `zeros` and their `_like` give guarded tensors, kept in the list."""
    found: list[Guarded] = []

    def guarded(allocate: Callable) -> Callable:
        def run(*args: Any, **options: Any) -> torch.Tensor:
            like = allocate(*args, **options | {"device": "meta"})
            device = options.get("device")
            if device is None:
                device = args[0].device if isinstance(args[0], torch.Tensor) else "cpu"
            if like.numel() == 0 or torch.device(device).type == "meta":
                return allocate(*args, **options)
            one = guard(like, torch.device(device))
            found.append(one)
            return one.tensor.zero_() if allocate.__name__.startswith("zeros") else one.tensor

        return run

    before = [getattr(of, name) for of, name in ALLOCATORS]
    try:
        for (of, name), allocate in zip(ALLOCATORS, before):
            setattr(of, name, guarded(allocate))
        yield found
    finally:
        for (of, name), allocate in zip(ALLOCATORS, before):
            setattr(of, name, allocate)


def never_stored(x: torch.Tensor) -> torch.Tensor:
    """Which elements of a guarded tensor still have the pattern: booleans of its shape."""
    same = x.contiguous().view(torch.uint8) == PATTERN
    return same.unflatten(-1, (x.shape[-1], x.element_size())).all(-1)
