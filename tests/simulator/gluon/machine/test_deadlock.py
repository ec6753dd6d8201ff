"""What is said of dead-locks in a ring of one slot."""

import re
from functools import partial

import pytest

from flash_versions.simulator.errors import Deadlock
from flash_versions.simulator.gluon import mbarrier
from flash_versions.simulator.gluon.machine import run_grid, warp_specialize
from flash_versions.simulator.state import here

ONE = 1, 1, 1


def producer(full, empty, filled, expected=0):
    for i in range(filled):
        mbarrier.wait(empty.index(0), i & 1 ^ 1)
        (mbarrier.expect if expected else mbarrier.arrive)(full.index(0), expected or 1)


def consumer(full, empty, read):
    for i in range(read):
        mbarrier.wait(full.index(0), i & 1)
        mbarrier.arrive(empty.index(0), count=1)


def ring(filled, read, expected=0):
    full, empty = mbarrier.allocate_mbarrier(1), mbarrier.allocate_mbarrier(1)
    for barriers in (full, empty):
        mbarrier.init(barriers[0], count=1)
    parts = [(consumer, (full, empty, read)), (producer, (full, empty, filled, expected))]
    warp_specialize(parts, [1], [24])
    assert here.partition.name == "program 0, kernel"


def test_a_ring_that_is_right_ends():
    run_grid(partial(ring, 3, 3), ONE, ())


@pytest.mark.parametrize(
    ("filled", "read", "expected", "found"),
    [
        (
            3, 1, 0,
            r"producer 1 in producer:\d+: mbarrier.wait\(empty.*\n"
            r" +It waits for the end of phase 1 of slot 0 of `empty`, which needs 1 more arrival "
            r"\(it counts 1\)\.\n.*last arrival came from program 0, consumer 0, at turn \d+\. "
            r"program 0, consumer 0 has ended\.",
        ),
        (1, 2, 0, r"phase 1 of slot 0 of `full`.*\n.* program 0, producer 1 has ended\."),
        (0, 1, 0, r"phase 0 of slot 0 of `full`.*\n.*No partition has arrived there"),
        (1, 1, 64, r"slot 0 of `full`, which needs 64 more bytes from a load"),
    ],
    ids=["the consumer ends early", "the producer ends early", "no arrival", "no load"],
)  # fmt: skip
def test_a_dead_lock_says_what_is_missing_and_who_arrived_last(filled, read, expected, found):
    with pytest.raises(Deadlock) as failed:
        run_grid(partial(ring, filled, read, expected), ONE, ())
    assert re.search(found, str(failed.value)), failed.value
