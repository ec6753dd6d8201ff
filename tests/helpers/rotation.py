"""Which cases of a product run everywhere, and which are wide."""

from itertools import product

import pytest


def named(x) -> str:
    """A case's own name, or a dtype's without torch's."""
    return getattr(x, "name", None) or str(x).removeprefix("torch.")


def rotated(cases, others, every=(), name=named) -> list:
    """Parameters (case, other): a case runs with one of the others, the next case with the next of
    them; with the rest it is wide.

    Args:
        cases, others: what is combined; at least as many cases as others.
        every: the names of cases that are wide with none.
        name: what an id says of one.
    """
    return [
        pytest.param(
            case,
            other,
            id=f"{name(case)}-{name(other)}",
            marks=pytest.mark.wide if (i + j) % len(others) and name(case) not in every else (),
        )
        for (i, case), (j, other) in product(enumerate(cases), enumerate(others))
    ]


def pairwise(*axes, name=named) -> list:
    """Parameters (value, ...) of a product: each value meets each value of another axis; what is
    left is wide.

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
