"""How the CPU computes with floating-point numbers: as the units of a GPU do."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, this thread computes without warnings, and numbers below 2^-126 are 0: that is what a
    GPU's exponentials give, and a CPU is slower with them by up to two hundred times.
    """
    was_on = bool(np.float32(1e-40) * np.float32(1) == 0)
    torch.set_flush_denormal(True)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        torch.set_flush_denormal(was_on)


MOST_ALONE = 2**18  # multiplications for which NumPy's BLAS starts no threads


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b. For more than MOST_ALONE multiplications BLAS starts threads, which for tiles takes
    several times as long. So the rows of a are multiplied in parts: each sum has the same order.
    """
    if a.ndim > 2 or a.size * b.shape[1] <= MOST_ALONE:
        return a @ b
    rows, parts = a.shape[0], 1
    while rows % (2 * parts) == 0 and a.size * b.shape[1] > parts * MOST_ALONE:
        parts *= 2
    return (a.reshape(parts, rows // parts, -1) @ b).reshape(rows, -1)
