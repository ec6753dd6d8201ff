"""Barriers in shared memory, by Gluon's names, and the named barriers of PTX."""

import operator

from flash_versions.simulator.errors import AccessError
from flash_versions.simulator.gluon import hazards, report
from flash_versions.simulator.gluon.machine import note
from flash_versions.simulator.state import here


class Layout:
    """Takes anything, means nothing."""

    def __init__(self, *arguments, **named):
        pass

    @classmethod
    def get_default_for(cls, *arguments, **named):
        return cls()


class MBarrierLayout(Layout):
    """Tells barriers from tiles where shared memory is allocated."""


class Barrier(report.Named):
    """An mbarrier: its phase flips when `count` have arrived and all expected bytes have landed. A
    named barrier, which has a number, counts threads and is one of these for a single phase.

    Attributes:
        ended: how many phases have; expected: the bytes of this one.
        arrived: name of a partition -> turn of its last arrival, the latest last.
        hold, known: clocks (see `hazards`): of those that have arrived, also in phases that go on.
    """

    def __init__(self, count=0, number=None):
        super().__init__()
        self.count, self.pending, self.number = count, count, number
        self.missing_bytes = self.expected = self.phase = self.ended = 0
        self.waiting, self.arrived, self.hold, self.known = [], {}, {}, {}

    def __str__(self):
        return super().__str__() if self.number is None else f"named barrier {self.number}"

    def arrive(self, count, missing_bytes=0, partition=None, clock=None):
        """Count arrivals, and bytes that are to land or, below 0, have landed."""
        partition = partition or here.partition
        self.check()
        if partition.program.fills is not None:
            if clock is None:
                hazards.release(self, partition)
            hazards.join(self.hold, clock or hazards.released(partition))
        self.arrived.pop(partition.name, None)
        self.arrived[partition.name] = partition.machine.turns
        self.pending -= count
        self.missing_bytes += missing_bytes
        self.expected += max(missing_bytes, 0)
        if self.pending < 0:
            who = ", ".join(self.arrived)
            raise AccessError(f"more arrivals than {self} counts, {self.count}: they are of {who}")
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
            raise AccessError(f"{self} is used before mbarrier.init")

    def wait_for(self, phase):
        """Let the partition that runs go on when this phase has ended."""
        partition = here.partition
        partition.barrier, partition.phase = self, phase
        partition.pause(self.waiting if self.phase == phase else None)
        partition.barrier = None
        hazards.join(partition.clock, self.known)


class Barriers(list, report.Named):
    """A row of barriers."""

    program = None
    shape = property(lambda self: (len(self), 1))

    def index(self, index):
        return self[self.slot(index)]


def allocate_mbarrier(batch=None, two_ctas=False):
    return Barrier() if batch is None else Barriers(Barrier() for _ in range(batch))


def init(mbarrier, count):
    here.partition.initialised.add(mbarrier)
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
    mbarrier.wait_for(phase)
    seen, partition.ended[mbarrier] = partition.ended.get(mbarrier, 0), mbarrier.ended
    partition.waited, partition.stale = mbarrier, phase if seen == mbarrier.ended else None
    partition.waits.append(mbarrier)
    note("resume", barrier=mbarrier)


def named_barrier(action, number, threads):
    """`bar.sync` and `bar.arrive` of the warps of a partition."""
    partition, barriers = here.partition, here.partition.program.named_barriers
    if not 0 <= number < 16:
        raise AccessError(f"there is no named barrier {number}: there are 16")
    barrier = barriers[number] = barriers.get(number) or Barrier(threads, number)
    barrier.arrive(partition.threads)
    if barrier.ended:
        del barriers[number]
    note("arrive" if action == "arrive" else "wait", barrier=number)
    if action == "arrive":
        partition.pause()
    else:
        barrier.wait_for(0)
        note("resume", barrier=number)
