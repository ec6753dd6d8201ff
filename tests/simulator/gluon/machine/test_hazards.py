"""Checking mode of shared memory: accesses that no barrier orders are found in every order, and
dead-locks are told with what is wrong.
"""

import re
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


def produce(slots, full, empty, tiles, waits, phase, expected):
    """Fill slots in turn."""
    for i in range(tiles):
        if waits:
            mbarrier.wait(empty.index(i % SLOTS), (i // SLOTS & 1) ^ phase)
        slots.index(i % SLOTS).store(ONE)
        tma.fence_async_shared()
        (mbarrier.expect if expected else mbarrier.arrive)(full.index(i % SLOTS), expected or 1)


def consume(slots, full, empty, tiles, waits, early):
    """Read slots in turn."""
    for i in range(tiles):
        if waits:
            mbarrier.wait(full.index(i % SLOTS), i // SLOTS & 1)
        if early:
            mbarrier.arrive(empty.index(i % SLOTS))
        slots.index(i % SLOTS).load()
        tma.fence_async_shared()
        if early is False:
            mbarrier.arrive(empty.index(i % SLOTS))


def ring(
    filled=TILES, read=TILES, fills=(True, 1), reads=(True, False), counts=(1, 1), consumers=1,
    expected=0
):  # fmt: skip
    """A ring, with its producer and consumers."""
    slots = allocate_shared_memory(float32, [SLOTS, 4, 8])
    full, empty = mbarrier.allocate_mbarrier(SLOTS), mbarrier.allocate_mbarrier(SLOTS)
    for barriers, count in ((full, counts[0]), (empty, counts[1])):
        for barrier in barriers:
            mbarrier.init(barrier, count)
    tma.fence_async_shared()
    parts = [(consume, (slots, full, empty, read, *reads)) for _ in range(consumers)]
    parts.append((produce, (slots, full, empty, filled, *fills, expected)))
    warp_specialize(parts, [4] * (consumers - 1) + [1])


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


ENDS = {
    "the consumer ends early": (
        {"read": 1},
        r"produce 1 in produce:\d+: mbarrier.wait\(empty.*\n"
        r" +It waits for the end of phase 0 of slot 1 of `empty`, which needs 1 more arrival "
        r"\(it counts 1\)\.\n.*No partition has arrived there",
    ),
    "the producer ends early": (
        {"filled": 1},
        r"phase 0 of slot 1 of `full`, which .*\n.*No partition has arrived there and no load",
    ),
    "the producer ends behind a phase": (
        {"filled": 4},
        r"phase 0 of slot 0 of `full`.*\n.*last arrival came from program 0, produce 1, at turn "
        r"\d+\. program 0, produce 1 has ended\.",
    ),
    "no load": ({"expected": 64}, r"slot 0 of `full`, which needs 64 more bytes from a load"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_dead_lock_says_what_is_missing_and_who_arrived_last(name):
    given, found = ENDS[name]
    with pytest.raises(Deadlock) as failed:
        run_grid(partial(ring, **given), (1, 1, 1), ())
    assert re.search(found, str(failed.value)), failed.value


def test_a_named_barrier_that_others_do_not_reach():
    def one(number):
        mbarrier.named_barrier("sync", number, 256)

    def both():
        warp_specialize([(one, (1,)), (one, (2,))], [4])

    with pytest.raises(Deadlock, match="waits at named barrier 1 for 256 threads, of which 128"):
        run_grid(both, (1, 1, 1), ())
