"""Integers that overflow wrap around in kernels, silently; simulated in tests, it is an error."""

import operator

import numpy as np

from flash_versions.simulator.dtypes import int8, int16, int32
from flash_versions.simulator.values import Tile

NARROW = int8, int16, int32


def check_overflow() -> None:
    """Refuse an operation of less than 64 bits whose result does not fit, as of indices."""
    for name in ("add", "sub", "mul"):
        compute = getattr(operator, name)
        setattr(Tile, f"__{name}__", checked(getattr(Tile, f"__{name}__"), compute))


def checked(original, compute):
    def apply(x, y):
        result = original(x, y)
        if type(result) is Tile and result.dtype in NARROW:
            a, b = x.a, y.a if isinstance(y, Tile) else y
            if result.a.ndim:
                fits = np.array_equal(compute(np.int64(a), np.int64(b)), result.a)
            else:  # as most are; Python's numbers take less time
                fits = compute(int(a), int(b)) == int(result.a)
            assert fits, f"{result.dtype} overflow in {compute.__name__}"
        return result

    return apply
