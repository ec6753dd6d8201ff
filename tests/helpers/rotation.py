"""Which cases of a product run everywhere, and which are wide."""

from itertools import product

import pytest


def named(x) -> str:
    """A case's own name, or a dtype's without torch's."""
    return getattr(x, "name", None) or str(x).removeprefix("torch.")


def rotated(*axes, name=named) -> list:
    """Parameters (value, ...) of a product: each value meets each value of another axis, the next
    one with the next; what is left is wide.

    Args:
        axes: what is combined; the last one has no more values than any other.
        name: what an id says of a value.
    """
    return [
        pytest.param(
            *(value for _, value in values),
            id="-".join(name(value) for _, value in values),
            marks=pytest.mark.wide if sum(i for i, _ in values) % len(axes[-1]) else (),
        )
        for values in product(*map(enumerate, axes))
    ]
