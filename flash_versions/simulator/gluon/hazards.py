"""Accesses of shared memory that no barrier orders, found in whatever order this run happens to go.

Each partition has a clock: how much of each partition, and of each tile that something fills, has
happened before what it does now. An arrival at a barrier takes the clock along, and a wait that the
barrier ends joins it. So a partition may read a tile only if its clock has the fill, and fill it
only if its clock has all reads. A product of Hopper's reads until it is waited for, one of
Blackwell's until a barrier tells that it is done.
"""

import numpy as np

from flash_versions.simulator.errors import AccessError
from flash_versions.simulator.gluon import report
from flash_versions.simulator.state import here


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


def overlap(x, y):
    """Whether the ranges of two tiles have a place in common."""
    return x.low < y.high and y.low < x.high


def share(x, y):
    """Whether two tiles have a place in common, which overlapping columns of a matrix need not."""
    return x is y or (overlap(x, y) and np.shares_memory(x.data, y.data))


class Access:
    """Of a tile by the partition that runs: over for whose clock has `time` of `key`; never yet if
    time is None.
    """

    def __init__(self, tile, key, time):
        self.tile, self.key, self.time, self.partition = tile, key, time, here.partition
        self.line = report.line(here.partition)

    def is_over(self, clock):
        return self.time is not None and clock.get(self.key, 0) >= self.time

    def end(self):
        """It is over for the partition itself."""
        self.time = self.partition.clock[self.partition]


class Fill(Access):
    """What is in a tile, and who has read it.

    Attributes:
        barrier: that tells of it, if TMA fills; waited: that its filler has waited for last.
        earlier: the partitions that have read what was there before.
        guards: the barriers that the filler has waited for since its last fill by TMA; arrived:
            partition -> those at which it has arrived since: at all when it needs the tile no more.
    """

    def __init__(self, tile, key, time, barrier, guards):
        super().__init__(tile, key, time)
        self.barrier, self.waited, self.guards = barrier, here.partition.waited, guards
        self.reads, self.earlier, self.arrived = [], set(), {}


def fill(tile, barrier=None):
    """The partition that runs writes a tile, or has TMA do so, which a barrier is told of. Returns
    the clock of what has happened before the fill is there; None if accesses are not watched.
    """
    partition, fills = here.partition, here.program.fills
    if fills is None:
        return None
    old = [x for x in fills if share(x.tile, tile)]
    for fill in old:
        for read in fill.reads:
            if not read.is_over(partition.clock) and share(read.tile, tile):
                raise AccessError(too_early(fill, read, partition))
        if not fill.is_over(partition.clock):
            raise AccessError(
                f"{tile} is filled again by {partition} before it is known that the tile of "
                f"{fill.partition} in {fill.line} has landed and been read, without waiting "
                f"for who reads it{stale(partition)}"
            )
    clock, key, guards = dict(partition.clock), partition, frozenset()
    if barrier is not None:
        # None is asked of Blackwell's kernels, which have tensor memory.
        initialised = (x.initialised for x in here.program.partitions)
        if not here.program.columns and any(barrier in x for x in initialised):
            raise AccessError(
                f"a load of {partition} uses {barrier} without a fence behind mbarrier.init: "
                "fence_async_shared() has to follow, which shows new barriers to TMA"
            )
        key = tile.low, tile.high
        clock[key] = partition.machine.tick()
        guards, partition.waits = frozenset(partition.waits), []
    made = Fill(tile, key, clock[key], barrier, guards)
    for fill in old:
        made.earlier |= {x.partition for x in fill.reads}
        if tile.low <= fill.tile.low and fill.tile.high <= tile.high:
            fills.remove(fill)
    fills.append(made)
    return clock


def release(barrier, partition):
    """A partition arrives at a barrier, which may tell that it has read a tile."""
    for fill in (x for x in partition.program.fills if barrier in x.guards):
        arrived = fill.arrived.setdefault(partition, set())
        arrived.add(barrier)
        for read in fill.reads:
            if arrived == fill.guards and read.partition is partition and read.time is None:
                raise AccessError(
                    f"{fill.tile} is released before it is read: {partition} arrives at "
                    f"{barrier} while the product that reads the tile ({read.line}) is in "
                    "flight, because no warpgroup_mma_wait has waited for it yet"
                )


def read(tile, key=None, time=0, product=None):
    """The partition that runs reads a tile now; until something of `key` happens, if time is
    None or that of a queue. A product of Hopper's may read anything, if its result is not used.
    """
    partition, fills = here.partition, here.program.fills
    if fills is None:
        return None
    found = [x for x in fills if share(x.tile, tile)]
    late = [x for x in found if not x.is_over(partition.clock)]
    gone = [x for x in found if x.guards and x.guards == x.arrived.get(partition)]
    if late or gone or not found:
        wrong = unfilled(tile, (late or gone or [None])[0], partition, bool(late))
        if product is None:
            raise AccessError(wrong)
        product.torn, found = product.torn or wrong, []
    read = Access(tile, key or partition, time if key else partition.clock[partition])
    for fill in found:
        fill.reads.append(read)
    return read


def too_early(fill, read, partition):
    """What is said of a tile that is filled again while it may still be read."""
    filler, reader, barrier = partition, read.partition, partition.waited
    if read.partition is partition:
        why = "no warpgroup_mma_wait has waited for the product that reads it"
    elif few := too_few(barrier, {x.partition for x in fill.reads}):
        why = few
    elif barrier is not None and partition.clock.get(read.partition, 0) and partition.stale is None:
        why = (
            f"{filler} has waited for {barrier}, and the last arrival of {reader} "
            "there came before that read; it has to arrive behind it"
        )
    else:
        why = f"{filler} fills it without waiting for {reader}{stale(partition)}"
    return (
        f"{fill.tile} is filled again by {filler} while {reader} may still read "
        f"it ({read.line}): {why}"
    )


def unfilled(tile, fill, partition, is_late):
    """What is said of a tile that is read before it is known to be filled, or behind its release.

    Args:
        fill: that is late, or whose tile was released; None if there is none.
    """
    name, reader = f"{tile}", partition
    if fill and not is_late:
        return (
            f"{name} is released before it is read: {reader} has arrived at "
            f"{min(fill.guards, key=id)}, and reads the tile behind that"
        )
    if fill and partition not in fill.earlier and partition.clock.get(fill.key, 0):
        few = too_few(fill.waited, fill.earlier | {partition})
        return (
            f"{name} is overwritten while {reader} has still to read it: {fill.partition} "
            f"fills it again before {reader} has read it{few and f': {few}'}"
        )
    by = f"it is filled by {fill.partition} in {fill.line}" if fill else "nothing has filled it yet"
    wait = stale(partition)
    if not wait and fill and fill.barrier is not None:
        wait = f" for {fill.barrier}, which tells that it has landed"
    return f"{name} is read by {reader} before it is filled, without waiting{wait}; {by}"


def too_few(barrier, readers):
    """What is said of a barrier that counts fewer arrivals than there are readers of a tile."""
    if barrier is None or barrier.count >= len(readers):
        return ""
    counted = report.number(barrier.count, "arrival")
    return f"{barrier} counts {counted}, and {len(readers)} partitions read the tile"


def stale(partition):
    """What is said of a partition whose last wait was for a phase that had ended before."""
    phase = partition.stale
    if phase is None:
        return ""
    return (
        f": its wait for phase {phase} of {partition.waited} returns at once, "
        f"because that phase has ended before; is it the wrong phase, and should it be {1 - phase}?"
    )
