"""How the CPU computes with floating-point numbers: as the units of a GPU do."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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
MOST_ROWS = 128


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, in which a row's bits do not depend on its place, as in a product of tensor cores.

    The rows of a are multiplied in parts: of no more rows than BLAS multiplies alike, and of no
    more than MOST_ALONE multiplications, because threads take several times as long for tiles.
    """
    if a.ndim > 2:
        return a @ b
    rows, at_most = a.shape[0], rows_alike()
    part = rows
    while part % 2 == 0 and (part > at_most or part * b.size > MOST_ALONE):
        part //= 2
    return a @ b if part == rows else (a.reshape(rows // part, part, -1) @ b).reshape(rows, -1)


@cache
def rows_alike() -> int:
    """How many equal rows this machine's BLAS multiplies with equal results, at most MOST_ROWS.

    On some CPUs a tile of 12 rows is two of 6, of which each adds in an order of its own.
    """
    numbers = np.random.default_rng(0).standard_normal(2**16, np.float32)
    sizes = (8, 16, 32, 64, 128, 256)
    rows = MOST_ROWS
    while rows > 1 and not all(
        _is_alike(np.tile(numbers[:k], (rows, 1)), b)
        for k, n in itertools.product(sizes, sizes)
        if rows * k * n <= MOST_ALONE
        for b in (numbers[: k * n].reshape(k, n), numbers[: k * n].reshape(n, k).T)
    ):
        rows //= 2
    return rows


def _is_alike(a: np.ndarray, b: np.ndarray) -> bool:
    made = a @ b
    return bool((made == made[0]).all())
