"""Integers that overflow wrap around in kernels, silently; simulated in tests, it is an error."""

import operator

import numpy as np

from flash_versions.simulator.values import Tile


def check_overflow() -> None:
    """Refuse an operation of less than 64 bits whose result does not fit, as of indices."""
    for name in ("add", "sub", "mul"):
        compute = getattr(operator, name)
        setattr(Tile, f"__{name}__", checked(getattr(Tile, f"__{name}__"), compute))


def checked(original, compute):
    def apply(x, y):
        result = original(x, y)
        kind = getattr(result, "dtype", None)
        if type(result) is Tile and kind.kind == 1 and kind.signed and kind.primitive_bitwidth < 64:
            exact = compute(np.int64(x.a), np.int64(y.a if isinstance(y, Tile) else y))
            assert np.array_equal(exact, result.a), f"{kind} overflow in {compute.__name__}"
        return result

    return apply
