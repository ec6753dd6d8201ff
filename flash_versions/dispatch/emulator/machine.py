"""Partitions that take turns, and barriers: who runs when in emulator.py.

Each is a thread, but only one runs at a time, and at each barrier it is decided who goes on:
nothing is timed, the same seed gives the same order, and a dead-lock is seen at once.
"""

import random
import sys
import threading
import traceback
from pathlib import Path
from typing import NamedTuple

from flash_versions.dispatch.emulator.deadlock import explain


class Order(NamedTuple):
    """Seed of what is drawn, and the probabilities that a product or a load is late.

    What is late happens only when no partition can go on without it, or when it is waited for.
    """

    seed: int
    late_products: float
    late_loads: float


ORDERS = {
    "late products": Order(0, 1.0, 0.0),
    "late loads": Order(1, 0.0, 1.0),
    "any order": Order(2, 0.5, 0.5),
}
HARNESS = (*map(str, Path(__file__).parent.glob("*.py")), threading.__file__)
RESIDENT = 3  # programs of a grid that run at once
begun = range  # of a number of programs: in which order they begin
order = ORDERS["any order"]  # of the next launch
here = threading.local()  # .partition: who runs in this thread
# Whether TMA must not fill what was read to registers without a fence behind it. None is needed
# where a product that had those registers was waited for, as in `rmsnorm_gemm`.
loads_need_fences = True
watcher = None  # called with (partition, what, tile, barrier, cycle) at each event


def note(what, tile=None, barrier=None, partition=None):
    """Tell the watcher of an event: "wait", "resume" or "arrive" at a barrier; "copy" and "landed"
    of a load, "store" of a tile and "stored" in memory; "product" and "done" of what the tensor
    cores multiply.

    A tile is a Load, a Store, a Product or a tile in shared memory. What lands has the partition
    that asked.
    """
    if watcher is not None:
        partition = partition or here.partition
        watcher(partition, what, tile, barrier, partition.program.machine.tick())


class Deadlock(RuntimeError):
    """No partition can go on; says which waits where."""


class Stopped(BaseException):
    """Another partition failed."""


def always():
    return True


class Machine:
    """The partitions of the programs that are resident, and the loads in flight."""

    def __init__(self):
        self.order = order
        self.random = random.Random(order.seed)
        self.partitions, self.loads, self.threads = [], [], []
        self.error, self.cycle, self.turns = None, 0, 0

    def tick(self):
        """The next cycle: no two events are of one."""
        self.cycle += 1
        return self.cycle

    def draw(self, probability):
        return self.random.random() < probability

    def start(self, partitions):
        self.partitions += partitions
        self.threads += [x.thread for x in partitions]
        for x in partitions:
            x.thread.start()

    def run(self, partitions):
        """Run partitions, and those that they start, to their end."""
        self.start(partitions)
        self.next()
        for thread in self.threads:  # grows meanwhile
            thread.join()
        if self.error:
            raise self.error
        assert not self.loads, "programs end with loads in flight: no partition has waited for them"

    def next(self):
        """Choose who goes on, and let it."""
        self.turns += 1
        while self.partitions:
            able = [x for x in (*self.partitions, *self.loads) if x.ready()]
            if not able:
                lines = (f"\n  {explain(x, self.partitions)}" for x in self.partitions)
                self.fail(Deadlock(f"dead-lock, all partitions wait:{''.join(lines)}"))
                break
            chosen = self.random.choice([x for x in able if not x.late] or able)
            if chosen not in self.loads:
                chosen.turn.release()
                break
            self.loads.remove(chosen)
            chosen.land()

    def fail(self, error):
        """Stop all partitions."""
        self.error = self.error or error
        for x in list(self.partitions):
            x.turn.release()


def overlap(tile, others):
    """Whether a tile has a place in common with others."""
    storage, begin, end = tile.region
    regions = [x.region for x in others]
    return any(storage == s and begin < e and b < end for s, b, e in regions)


class Program:
    """What the partitions of a program share."""

    def __init__(self, machine, number, programs):
        self.machine, self.id, self.programs = machine, number, programs
        self.named_barriers = {}  # id -> [threads that have arrived, times that it was complete]
        self.unfenced = {}  # address of a tile written from registers -> (partition, tile)
        self.read = {}  # (address of a tile read to registers, partition) -> the tile
        self.columns = 0  # of tensor memory that are allocated
        self.queue = []  # products of Blackwell's tensor cores that are not computed yet, in order

    def check_fenced(self, *operands):
        """Fail if a product reads a tile that was written from registers without a fence."""
        written = [tile for _, tile in self.unfenced.values()]
        shared = [x for x in operands if hasattr(x, "region")]  # others are in registers
        assert not any(overlap(x, written) for x in shared), "a product without a fence"

    def check_loaded(self, tile):
        """Fail if TMA fills a tile that was read to registers without a fence behind it: TMA is
        another proxy, and may be earlier than reads that no fence says are done.
        """
        if loads_need_fences:
            assert not overlap(tile, self.read.values()), "TMA fills what was read without a fence"

    def check_read(self, tile, what):
        """Fail if a product that is not computed yet writes to a tile that is read."""
        for product in self.queue:
            assert not overlap(tile, product.written), f"{what} is read before its product is done"

    def check_write(self, tile, what):
        """Fail if a product that is not computed yet reads or writes a tile that is written."""
        for product in self.queue:
            touched = (*product.operands, *product.written)
            assert not overlap(tile, touched), f"{what} is written while a product is to use it"


class Partition:
    """Warps that run a function: a program's kernel, or what that gives to `warp_specialize`."""

    def __init__(self, program, name, function, arguments):
        self.program, self.name = program, f"program {program.id}, {name}"
        self.function, self.arguments = function, arguments
        self.thread = threading.Thread(target=self.run, name=self.name, daemon=True)
        self.turn = threading.Semaphore(0)
        self.ready, self.late = always, False
        self.threads = 128
        self.products, self.stores = [], []
        self.leaving = []  # stores whose tile was read, and that are not in memory yet
        # Fences that are missing: between what was read of other programs and TMA, and between what
        # TMA has written and what tells other programs of it.
        self.before_tma, self.before_count = set(), set()
        self.waits = None  # (barrier, phase) while it waits at an mbarrier

    def run(self):
        here.partition, machine = self, self.program.machine
        self.turn.acquire()
        try:
            if not machine.error:
                self.function(*self.arguments)
                assert not self.products, "a partition ends with products in flight"
                assert not self.stores, "a partition ends with stores in flight"
                for x in self.leaving:
                    x.land()
        except Stopped:
            pass
        except BaseException as error:
            error.add_note(f"in {self.name}")
            machine.fail(error)
        machine.partitions.remove(self)
        if not machine.error:
            machine.next()

    def pause(self, ready=always, late=False):
        """Let others run, until ready()."""
        self.ready, self.late = ready, late
        self.program.machine.next()
        self.turn.acquire()
        if self.program.machine.error:
            raise Stopped

    def where(self):
        """The lines of the kernel that this partition has come to."""
        stack = traceback.extract_stack(sys._current_frames()[self.thread.ident])
        kernel = [x for x in stack if x.filename not in HARNESS and not x.name.startswith("<")]
        return " > ".join(f"{x.name}:{x.lineno}" for x in kernel) + f": {kernel[-1].line}"


def run_grid(kernel, programs, arguments):
    """Run a kernel's programs, a few at once."""
    numbers = list(begun(programs))
    for first in range(0, programs, RESIDENT):
        machine = Machine()
        resident = [Program(machine, i, programs) for i in numbers[first : first + RESIDENT]]
        machine.run([Partition(x, "kernel", kernel, arguments) for x in resident])


def warp_specialize(parts, num_warps, num_registers):
    """Run each (function, arguments) in a partition of its own, to the end of all."""
    assert len(num_warps) == len(num_registers) == len(parts) - 1, "the first has the kernel's"
    program, machine = here.partition.program, here.partition.program.machine
    children = [
        Partition(program, f"{function.__name__} {i}", function, arguments)
        for i, (function, arguments) in enumerate(parts)
    ]
    for child, warps in zip(children[1:], num_warps, strict=True):
        child.threads = 32 * warps
    machine.start(children)
    here.partition.pause(lambda: not any(x in machine.partitions for x in children))


class Barrier:
    """An mbarrier: its phase flips when `count` have arrived and all expected bytes have landed."""

    count = pending = missing_bytes = phase = 0

    def __init__(self):
        self.arrived = {}  # name of a partition -> turn of its last arrival, the latest last

    def arrive(self, count, missing_bytes=0, partition=None):
        partition = partition or here.partition
        self.arrived.pop(partition.name, None)
        self.arrived[partition.name] = partition.program.machine.turns
        self.pending -= count
        self.missing_bytes += missing_bytes
        assert self.pending >= 0, "more arrivals at a barrier than it counts"
        if self.pending == self.missing_bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Barriers(list):
    def index(self, i):
        assert 0 <= i < len(self), f"barrier {i} of {len(self)}"
        return self[int(i)]


class Load:
    """A copy into shared memory that is on its way."""

    ready = staticmethod(always)

    def __init__(self, descriptor, coordinates, barrier, tile, late):
        assert tile.shape == descriptor.block_type.shape, "a tile of another shape than the box"
        here.partition.program.check_loaded(tile)
        self.coordinates = [int(i) for i in coordinates]
        self.part, self.place = descriptor.box(coordinates)
        self.bytes, self.barrier = descriptor.block_type.nbytes, barrier
        self.tile, self.late = tile, late
        self.partition = here.partition
        note("copy", self, barrier)

    def land(self):
        self.partition.program.check_write(self.tile, "shared memory")
        self.tile.data.zero_()[self.place] = self.part
        note("landed", self, self.barrier, self.partition)
        self.barrier.arrive(0, -self.bytes, self.partition)


class MBarrierLayout:
    """Tells barriers from tiles where shared memory is allocated."""


class mbarrier:
    MBarrierLayout = MBarrierLayout

    def init(barrier, count):
        barrier.count = barrier.pending = count

    def expect(barrier, bytes):
        barrier.arrive(1, bytes)

    def arrive(barrier, count):
        here.partition.pause()
        barrier.arrive(count)
        note("arrive", barrier=barrier)

    def wait(barrier, phase, pred=True):
        if pred:
            phase = int(phase)
            note("wait", barrier=barrier)
            here.partition.waits = barrier, phase
            here.partition.pause(lambda: barrier.phase != phase)
            here.partition.waits = None
            note("resume", barrier=barrier)


def named_barrier(action, number, threads):
    """`bar.sync` and `bar.arrive` of the warps of a partition."""
    assert 0 <= number < 16, f"no named barrier {number}: there are 16"
    barrier = here.partition.program.named_barriers.setdefault(number, [0, 0])
    barrier[0] += here.partition.threads
    assert barrier[0] <= int(threads), "more threads at a named barrier than meet there"
    complete = barrier[1] + 1
    if barrier[0] == int(threads):
        barrier[:] = 0, complete
    note("arrive" if action == "arrive" else "wait", barrier=number)
    here.partition.pause(lambda: action == "arrive" or barrier[1] >= complete)
    if action == "sync":
        note("resume", barrier=number)
