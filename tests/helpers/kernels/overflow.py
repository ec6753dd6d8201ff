"""Integers that overflow, which Triton's interpreter checks for and then ignores, are an error."""

import numpy as np
from triton.language.semantic import TritonSemantic


def check_overflow() -> None:
    """Refuse an integer operation of less than 64 bits whose result does not fit, as of indices."""

    def check(self, left, right, operation):
        kind = left.type.scalar
        if kind.int_bitwidth >= 64 or not kind.is_int_signed():  # unsigned integers wrap around
            return
        of_name = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        exact = of_name(left.handle.data, right.handle.data, dtype=np.int64)
        low, high = kind.get_int_min_value(), kind.get_int_max_value()
        assert exact.size == 0 or low <= exact.min() and exact.max() <= high, (
            f"{kind} overflow detected for operation {operation.__name__}"
        )

    TritonSemantic.binary_op_sanitize_overflow_impl = check
