"""Accesses of shared memory that no barrier orders, found in whatever order this run happens to go.

Each partition has a clock: how much of each partition, and of each tile that something fills, has
happened before what it does now. An arrival at a barrier takes the clock along, and a wait that the
barrier ends joins it. So a partition may read a tile only if its clock has the fill, and fill it
only if its clock has all reads. A product of Hopper's reads until it is waited for, one of
Blackwell's until a barrier tells that it is done.
"""

import sys

import numpy as np

from flash_versions.simulator.errors import AccessError
from flash_versions.simulator.gluon import report
from flash_versions.simulator.state import here

PARTITIONS = 16  # of a program, at most: who stores what is numbered by programs and partitions


def join(clock, other):
    """Let what has happened before one happen before another, too."""
    for key, time in other.items():
        if clock.get(key, 0) < time:
            clock[key] = time


def released(partition):
    """What has happened before now; what the partition does next has not."""
    clock = dict(partition.clock)
    partition.clock[partition] += 1
    return clock


def share(x, y):
    """Whether two tiles have a place in common."""
    if x is y or x.low >= y.high or y.low >= x.high:
        return x is y
    return np.shares_memory(x.data, y.data)


class Read:
    """A read of a tile: over for whose clock has `time` of `key`; never yet if time is None."""

    def __init__(self, tile, partition, key, time, line):
        self.tile, self.partition, self.key, self.line = tile, partition, key, line
        self.time, self.begin = time, partition.clock[partition]


class Fill:
    """What is in a tile, by whom it was written, and who has read it.

    Attributes:
        key, time: that a clock has if the fill has happened before.
        barrier: that tells of it, if TMA fills; waited: that its filler has waited for last.
        earlier: the partitions that have read what was there before.
        guards: the barriers that the filler has waited for before; arrived: partition -> those at
            which it has arrived since: at all of them when it needs the tile no more.
    """

    def __init__(self, tile, partition, key, time, barrier=None):
        self.tile, self.partition, self.key, self.time = tile, partition, key, time
        self.barrier, self.waited, self.reads = barrier, partition.waited, []
        self.earlier, self.arrived = set(), {}
        self.guards = frozenset() if barrier is None else partition.guards
        self.place = f"{partition.short()} in {line()}"


class Hazards:
    """Of the tiles of a program in shared memory.

    Attributes:
        fills: what is in tiles now; filled: how often TMA has filled each.
        releases: barrier -> the tiles that are filled behind a wait for it alone.
        queued: products of Blackwell's.
    """

    def __init__(self):
        self.fills, self.filled, self.releases, self.queued = [], {}, {}, 0

    def overlapping(self, tile):
        """The fills of a place that the tile has, too."""
        return [x for x in self.fills if share(x.tile, tile)]

    def fill(self, tile, barrier=None):
        """The partition that runs writes a tile, or has TMA do so, which a barrier is told of.

        Returns:
            The clock of what has happened before the fill is there.
        """
        partition = here.partition
        old = self.overlapping(tile)
        for fill in old:
            for read in fill.reads:
                known = read.time is not None and partition.clock.get(read.key, 0) >= read.time
                if not known and share(read.tile, tile):
                    raise AccessError(self.too_early(fill, read, partition))
            if partition.clock.get(fill.key, 0) < fill.time:
                raise AccessError(
                    f"{report.name_of(tile)} is filled again by {partition.short()} before it is "
                    "known "
                    f"that the tile of {fill.place} has landed and been read, without waiting "
                    f"for who reads it{stale(partition)}"
                )
        clock, key, time = dict(partition.clock), partition, partition.clock[partition]
        if barrier is not None:
            check_init(barrier, f"a load of {partition.short()}")
            key = "fill", tile.low, tile.high
            time = self.filled[key] = self.filled.get(key, 0) + 1
            clock[key] = time
            if len(partition.waits) == 1:
                self.releases.setdefault(partition.waits[0], set()).add(key)
            if partition.waits:
                partition.guards, partition.waits = frozenset(partition.waits), []
        made = Fill(tile, partition, key, time, barrier)
        for fill in old:
            made.earlier |= {x.partition for x in fill.reads}
            if tile.low <= fill.tile.low and fill.tile.high <= tile.high:
                self.fills.remove(fill)
        self.fills.append(made)
        return clock

    def release(self, barrier, partition):
        """A partition arrives at a barrier, which may tell that it has read a tile."""
        for fill in self.fills:
            if barrier in fill.guards:
                fill.arrived.setdefault(partition, set()).add(barrier)
        keys = self.releases.get(barrier, set())
        if len(keys) != 1 or sum(not keys.isdisjoint(x) for x in self.releases.values()) > 1:
            return
        for fill in (x for x in self.fills if x.key in keys):
            for read in fill.reads:
                if read.partition is partition and read.time is None:
                    raise AccessError(
                        f"{report.name_of(fill.tile)} is released before it is read: "
                        f"{partition.short()} arrives at {report.name_of(barrier)} while the "
                        f"product that reads the tile ({read.line}) is in flight, because no "
                        "warpgroup_mma_wait has waited for it yet"
                    )

    def read(self, tile, key=None, time=0, product=None):
        """The partition that runs reads a tile now; until something of `key` happens, if time is
        None or that of a queue. A product of Hopper's may read anything, if its result is not used.
        """
        partition, found = here.partition, self.overlapping(tile)
        late = [x for x in found if partition.clock.get(x.key, 0) < x.time]
        gone = [x for x in found if x.guards and x.guards == x.arrived.get(partition)]
        if late or gone or not found:
            wrong = self.unfilled(tile, late[0] if late else None, partition)
            if gone and not late:
                wrong = (
                    f"{report.name_of(tile)} is released before it is read: {partition.short()} "
                    "has "
                    f"arrived at {report.name_of(min(gone[0].guards, key=id))}, and reads the tile "
                    "behind that"
                )
            if product is None:
                raise AccessError(wrong)
            product.torn = product.torn or wrong
            return []
        key, time = (partition, partition.clock[partition]) if key is None else (key, time)
        reads = []
        for fill in found:
            last = fill.reads[-1] if fill.reads else None
            if last and time is not None and (last.tile, last.key, last.time) == (tile, key, time):
                continue
            reads.append(Read(tile, partition, key, time, line()))
            fill.reads.append(reads[-1])
        return reads

    def too_early(self, fill, read, partition):
        """What is said of a tile that is filled again while it may still be read."""
        name, reader = report.name_of(fill.tile), read.partition.short()
        said = (
            f"{name} is filled again by {partition.short()} while {reader} may still read it "
            f"({read.line})"
        )
        known, barrier = partition.clock.get(read.partition, 0), partition.waited
        who = {x.partition.short() for x in fill.reads}
        if read.partition is partition:
            return f"{said}: no warpgroup_mma_wait has waited for the product that reads it"
        if barrier is not None and 0 < barrier.count < len(who):
            return f"{said}: {counts(barrier)}, and {len(who)} partitions read the tile"
        if known >= read.begin and (read.time is None or read.time > known):
            return (
                f"{said}: {reader} has released it, by an arrival at a barrier, before it waited "
                "for the product that reads it"
            )
        if barrier is not None and known and not partition.stale:
            return (
                f"{said}: {partition.short()} has waited for {report.name_of(barrier)}, and the "
                f"last arrival of {reader} there came before that read; it has to arrive behind it"
            )
        return (
            f"{said}: {partition.short()} fills it without waiting for {reader}{stale(partition)}"
        )

    def unfilled(self, tile, fill, partition):
        """What is said of a tile that is read before it is known to be filled."""
        name, reader = report.name_of(tile), partition.short()
        if fill and partition not in fill.earlier and partition.clock.get(fill.key, 0):
            barrier, others = fill.waited, {x.short() for x in fill.earlier} | {reader}
            why = f"{fill.partition.short()} fills it again before {reader} has read it"
            if barrier is not None and 0 < barrier.count < len(others):
                why += f": {counts(barrier)}, and {len(others)} partitions read the tile"
            return f"{name} is overwritten while {reader} has still to read it: {why}"
        by = "; nothing has filled it yet"
        if fill:
            by = f"; it is filled by {fill.place}"
        wait = stale(partition)
        if not wait and fill and fill.barrier is not None:
            wait = f" for {report.name_of(fill.barrier)}, which tells that it has landed"
        return f"{name} is read by {reader} before it is filled, without waiting{wait}{by}"


def counts(barrier):
    """How many arrivals end a phase of a barrier."""
    return f"{report.name_of(barrier)} counts {barrier.count} arrival{'s' * (barrier.count > 1)}"


def stale(partition):
    """What is said of a partition whose last wait was for a phase that had ended before."""
    if not partition.stale:
        return ""
    return (
        f": its wait for phase {partition.phase} of {report.name_of(partition.waited)} returns at "
        f"once, because that phase has ended before; is it the wrong phase, and should it be "
        f"{1 - partition.phase}?"
    )


def line():
    """Where in the kernel's file the partition that runs is; if it is not there, in which other."""
    frame, found = sys._getframe(2), None
    while frame is not None and frame.f_code is not here.partition.base.f_code:
        name = frame.f_code.co_filename
        if name == here.partition.machine.file or not (found or name.startswith(report.OWN)):
            found = frame
            if name == here.partition.machine.file:
                break
        frame = frame.f_back
    return f"line {found.f_lineno} of {found.f_code.co_name}" if found else "its begin"


def check_stores(memory, offset):
    """Refuse to store to a tensor where another partition of the program has stored, if no barrier
    says that this comes later.
    """
    seen, partition, writer = memory.seen, here.partition, memory.seen.writer[offset]
    own = here.program.number * PARTITIONS
    for other in set(np.unique(writer[writer // PARTITIONS == here.program.number]).tolist()):
        one = partition.program.partitions[other - own]
        if one is not partition and partition.clock.get(one, 0) < seen.epochs[other]:
            at = int(np.asarray(offset)[np.asarray(writer == other)].reshape(-1)[0])
            raise AccessError(
                f"two partitions store {memory.element(at)}: {partition.short()} and "
                f"{one.short()}; either may come first"
            )
    seen.epochs[own + partition.index] = partition.clock[partition]


def check_init(barrier, user):
    """Refuse that TMA uses a barrier that no fence shows to it; of Blackwell's kernels, which have
    tensor memory, none is asked.
    """
    if barrier.unfenced is not None and not here.program.columns:
        raise AccessError(
            f"{user} uses {report.name_of(barrier)} without a fence behind mbarrier.init: "
            "fence_async_shared() has to follow, which shows new barriers to TMA"
        )
