"""Orders in which partitions run, as the hardware may have them. One that is late with loads finds
a missing wait for a load, one that is late with products a slot that is given back too early: so a
case runs in one of them, the next case in the next one, and a few cases in all.
"""

from itertools import cycle

import pytest
import torch

from flash_versions.simulator.gluon.machine import ORDERS, using
from tests.helpers.rotation import named

by_order = pytest.mark.parametrize("order", ORDERS, indirect=True)


def in_turn(names, cases):
    """Each case in one of the orders: the decorator of a test with these parameters and `order`."""
    parameters = []
    for case, order in zip(cases, cycle(ORDERS)):
        values = case if " " in names else (case,)
        named_values = "-".join(map(named, (*values, order)))
        parameters.append(pytest.param(*values, order, id=named_values))
    return pytest.mark.parametrize([*names.split(), "order"], parameters, indirect=["order"])


def in_every_order(compute):
    """What compute() returns, tensors by name, which must have the same bits in every order."""
    results = []
    for order in (*ORDERS.values(), ORDERS["any order"]._replace(seed=9)):
        with using(order=order):
            results.append(compute())
    for result in results[1:]:
        for name, x in results[0].items():
            assert torch.equal(x, result[name]), f"{name} depends on the order"
    return results[0]
