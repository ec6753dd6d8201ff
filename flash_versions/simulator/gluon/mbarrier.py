"""Barriers in shared memory, by Gluon's names, and the named barriers of PTX."""

import operator

from flash_versions.simulator.errors import AccessError
from flash_versions.simulator.gluon import hazards, report
from flash_versions.simulator.gluon.machine import note
from flash_versions.simulator.state import here


class MBarrierLayout:
    """Tells barriers from tiles where shared memory is allocated."""

    def __init__(self, *arguments):
        pass


class Barrier:
    """An mbarrier: its phase flips when `count` have arrived and all expected bytes have landed.

    Attributes:
        ended: how many phases have; expected: the bytes of this one.
        unfenced: the partition that has initialised it, until it executes a fence.
        hold, known: clocks (see `hazards`): of those that have arrived, also in phases that go on.
    """

    count = pending = missing_bytes = expected = phase = ended = 0
    unfenced = None

    def __init__(self):
        self.waiting, self.hold, self.known = [], {}, {}
        self.arrived = {}  # name of a partition -> turn of its last arrival, the latest last

    def arrive(self, count, missing_bytes=0, partition=None, clock=None):
        """Count arrivals, and bytes that are to land or, below 0, have landed."""
        partition = partition or here.partition
        self.check()
        if partition.program.hazards:
            if clock is None:
                partition.program.hazards.release(self, partition)
            hazards.join(self.hold, clock or hazards.released(partition))
        self.arrived.pop(partition.name, None)
        self.arrived[partition.name] = partition.machine.turns
        self.pending -= count
        self.missing_bytes += missing_bytes
        self.expected += max(missing_bytes, 0)
        if self.pending < 0:
            name = report.name_of(self, partition.program)
            several = len(self.arrived) > 1
            who = f"{len(self.arrived)} partitions" if several else "one partition several times"
            raise AccessError(
                f"more arrivals than {name} counts: it counts {self.count}, and {who} arrive"
                f"{'s' * (not several)} there: {', '.join(self.arrived)}"
            )
        if self.pending == self.missing_bytes == 0:
            self.phase ^= 1
            self.ended += 1
            hazards.join(self.known, self.hold)
            self.pending, self.expected = self.count, 0
            partition.machine.able += self.waiting
            self.waiting = []

    def check(self):
        """Refuse a barrier that no count was given to."""
        if not self.count:
            raise AccessError(f"{report.name_of(self)} is used before mbarrier.init")


class Barriers(list):
    """A row of barriers."""

    shape = property(lambda self: (len(self), 1))

    def index(self, index):
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise AccessError(
                f"slot {i} of {report.name_of(self)} does not exist: it has {len(self)}"
            )
        return self[i]


def allocate_mbarrier(batch=None, two_ctas=False):
    return Barrier() if batch is None else Barriers(Barrier() for _ in range(batch))


def init(mbarrier, count):
    mbarrier.unfenced = here.partition
    here.partition.initialised.append(mbarrier)
    mbarrier.count = mbarrier.pending = operator.index(count)


def invalidate(mbarrier):
    mbarrier.count = mbarrier.pending = 0


def expect(mbarrier, bytes=None, pred=True, bytes_per_cta=None):
    if pred:
        mbarrier.arrive(1, operator.index(bytes_per_cta if bytes is None else bytes))


def arrive(mbarrier, count=1, pred=True):
    if pred:
        here.partition.pause()
        mbarrier.arrive(count)
        note("arrive", barrier=mbarrier)


def wait(mbarrier, phase, pred=True, deps=()):
    if not pred:
        return
    mbarrier.check()
    partition, phase = here.partition, operator.index(phase)
    if phase not in (0, 1):
        raise AccessError(f"a barrier has phases 0 and 1, and {phase} is waited for")
    note("wait", barrier=mbarrier)
    partition.barrier, partition.phase = mbarrier, phase
    if mbarrier.phase != phase:
        partition.pause()
    else:
        mbarrier.waiting.append(partition)
        partition.wait()
    partition.barrier = None
    seen, partition.ended[mbarrier] = partition.ended.get(mbarrier, 0), mbarrier.ended
    partition.waited, partition.stale = mbarrier, seen == mbarrier.ended
    partition.waits.append(mbarrier)
    hazards.join(partition.clock, mbarrier.known)
    note("resume", barrier=mbarrier)


class NamedBarrier:
    """One of the 16 counters of threads that a program has, in a phase.

    Attributes:
        threads: that have arrived; needed: that end the phase.
        arrived: the partitions that have; waiting: those that wait.
    """

    def __init__(self, number):
        self.number, self.threads, self.needed = number, 0, 0
        self.arrived, self.waiting, self.hold = [], [], {}


def named_barrier(action, number, threads):
    """`bar.sync` and `bar.arrive` of the warps of a partition."""
    partition = here.partition
    if not 0 <= number < 16:
        raise AccessError(f"there is no named barrier {number}: there are 16")
    barriers = partition.program.named_barriers
    barrier = barriers.setdefault(number, NamedBarrier(number))
    barrier.threads, barrier.needed = barrier.threads + partition.threads, threads
    barrier.arrived.append(partition)
    hazards.join(barrier.hold, hazards.released(partition))
    if barrier.threads > threads:
        raise AccessError(
            f"{barrier.threads} threads arrive at named barrier {number}, which waits for "
            f"{threads}: {', '.join(x.short() for x in barrier.arrived)}"
        )
    note("arrive" if action == "arrive" else "wait", barrier=number)
    partition.named = barrier if action == "sync" else None
    if barrier.threads < threads and action == "sync":
        barrier.waiting.append(partition)
        partition.wait()
    else:
        if barrier.threads == threads:
            partition.machine.able += barrier.waiting
            del barriers[number]
        partition.pause()
    partition.named = None
    if action == "sync":
        hazards.join(partition.clock, barrier.hold)
        note("resume", barrier=number)
