"""Which cases of a product run everywhere, and which are slow or wide."""

from itertools import product

import pytest

from flash_versions.dispatch.emulator.machine import ORDERS


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


def in_turn(*axes, pairs=False, name=named) -> list:
    """Parameters (value, ..., order) of emulations in the orders that hardware may have. `make
    test` takes the one that has something of the others, and a slow test one of the others, the
    next case the next of them; the rest is wide. Planted bugs are looked for in every order.

    Args:
        axes: what is combined; of each all values.
        pairs: only as `pairwise` combines them.
        name: what an id says of a value.
    """
    mixed, found = "any order", []
    others = [order for order in ORDERS if order != mixed]
    for values in product(*map(enumerate, axes)):
        place = sum(i for i, _ in values)
        left_out = pairs and place % len(axes[-1])
        for order in ORDERS:
            if left_out or order not in (mixed, others[place % len(others)]):
                marks = pytest.mark.wide
            else:
                marks = () if order == mixed else pytest.mark.slow
            of = *(value for _, value in values), order
            found.append(pytest.param(*of, id="-".join(map(name, of)), marks=marks))
    return found
