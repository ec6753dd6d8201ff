"""Checking mode of shared memory: accesses that no barrier orders are found in every order, and
dead-locks are told with what is wrong.
"""

from functools import partial

import numpy as np
import pytest

from flash_versions.simulator.checking import Watch
from flash_versions.simulator.dtypes import float32
from flash_versions.simulator.errors import AccessError, Deadlock
from flash_versions.simulator.gluon import mbarrier, tma
from flash_versions.simulator.gluon.machine import ORDERS, run_grid, warp_specialize
from flash_versions.simulator.gluon.shared import allocate_shared_memory
from flash_versions.simulator.values import Tile

TILES, SLOTS = 5, 2
ONE = Tile(np.ones((4, 8), np.float32), float32)


def produce(slots, full, empty, waits, phase):
    """Fill slots in turn."""
    for i in range(TILES):
        if waits:
            mbarrier.wait(empty.index(i % SLOTS), (i // SLOTS & 1) ^ phase)
        slots.index(i % SLOTS).store(ONE)
        tma.fence_async_shared()
        mbarrier.arrive(full.index(i % SLOTS))


def consume(slots, full, empty, waits, early):
    """Read slots in turn."""
    for i in range(TILES):
        if waits:
            mbarrier.wait(full.index(i % SLOTS), i // SLOTS & 1)
        if early:
            mbarrier.arrive(empty.index(i % SLOTS))
        slots.index(i % SLOTS).load()
        tma.fence_async_shared()
        if early is False:
            mbarrier.arrive(empty.index(i % SLOTS))


def ring(fills=(True, 1), reads=(True, False), counts=(1, 1), consumers=1):
    """A ring, with its producer and consumers."""
    slots = allocate_shared_memory(float32, [SLOTS, 4, 8])
    full, empty = mbarrier.allocate_mbarrier(SLOTS), mbarrier.allocate_mbarrier(SLOTS)
    for barriers, count in ((full, counts[0]), (empty, counts[1])):
        for barrier in barriers:
            mbarrier.init(barrier, count)
    tma.fence_async_shared()
    parts = [(consume, (slots, full, empty, *reads)) for _ in range(consumers)]
    warp_specialize([*parts, (produce, (slots, full, empty, *fills))], [4] * (consumers - 1) + [1])


def run(**given):
    """Run a ring, watched."""
    with Watch({}).watching():
        run_grid(partial(ring, **given), (1, 1, 1), ())


in_every_order = pytest.mark.parametrize("order", ORDERS, indirect=True)


@in_every_order
def test_right_rings_end(order):
    run()
    run(counts=(1, 2), consumers=2)


@in_every_order
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reads": (False, False)}, "slot 0 of `slots` is read by consume 0 before it is filled"),
        ({"fills": (False, 1)}, "(is|was) filled again|overwritten while consume 0"),
        ({"reads": (True, True)}, "slot 0 of `slots` is (filled again|overwritten)"),
        ({"consumers": 2}, "counts 1.*2 partitions|more arrivals than"),
    ],
    ids=["no wait for full", "no wait for empty", "released before it is read", "too few arrivals"],
)  # fmt: skip
def test_what_no_barrier_orders(given, said, order):
    with pytest.raises((AccessError, Deadlock), match=said):
        run(**given)


@in_every_order
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fills": (True, 0)}, "first wait of .* for slot 0 of .* does not end.*phase 1 first"),
        ({"counts": (2, 1)}, "slot 0 of `full` counts 2 arrivals, and 1 came in this phase"),
        (
            {"reads": (True, None)},
            "produce 1 waits for phase 0 of slot 0 of `empty`, and no partition arrives",
        ),
    ],
    ids=["wrong phase", "too many arrivals expected", "never released"],
)
def test_what_a_dead_lock_comes_from(given, said, order):
    with pytest.raises(Deadlock, match=said):
        run(**given)


def test_a_named_barrier_that_others_do_not_reach():
    def one(number):
        mbarrier.named_barrier("sync", number, 256)

    def both():
        warp_specialize([(one, (1,)), (one, (2,))], [4])

    with pytest.raises(Deadlock, match="waits at named barrier 1 for 256 threads, of which 128"):
        run_grid(both, (1, 1, 1), ())
