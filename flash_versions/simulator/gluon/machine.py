"""Partitions that take turns: who runs when.

A partition of warps has a thread, but only one runs at a time, and wherever it meets another one it
is drawn who goes on: nothing is timed, the same seed gives the same order, and a dead-lock is seen
at once. Hardware may be fast or slow; an `Order` says which of these freedoms a run takes. Late
loads find a partition that does not wait for `full`; late products, which read their tiles when
they are waited for, find one that gives a tile back too early. A store reads its tile when that is
waited for, and reaches memory then, or late: when that is waited for or the warps end.

Not simulated: layouts, registers, speed. A missing fence is noticed only before a TMA store or a
product, and, with `loads_need_fences`, where TMA fills what was read.
"""

import itertools
import random
import sys
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, NamedTuple

from flash_versions.simulator.errors import AccessError, CompileError, Deadlock
from flash_versions.simulator.floats import as_on_a_gpu
from flash_versions.simulator.gluon import hazards, report
from flash_versions.simulator.gluon.hazards import join, overlap, released
from flash_versions.simulator.state import Program, here


class Order(NamedTuple):
    """Seed of what is drawn, and the probabilities that a product or a load is late: that no
    partition can go on without it, or waits for it, when it happens.
    """

    seed: int
    late_products: float
    late_loads: float


ORDERS = {
    "late products": Order(0, 1.0, 0.0),
    "late loads": Order(1, 0.0, 1.0),
    "any order": Order(2, 0.5, 0.5),
}


class Options(NamedTuple):
    """How grids run: see `using`.

    Attributes:
        watcher: called with (partition, what, tile, barrier, cycle) at each event, see `note`.
        loads_need_fences: whether TMA must not fill what was read to registers without a fence
            behind it. None is needed where a product that had those registers was waited for.
        begun: of a number of programs: in which order they begin.
        resident: programs of a grid that run at once.
    """

    order: Order = ORDERS["any order"]
    watcher: Any = None
    loads_need_fences: bool = True
    begun: Any = range
    resident: int = 3


DEFAULT = Options()
options: ContextVar[Options] = ContextVar("options", default=DEFAULT)


@contextmanager
def using(**changed):
    """Inside, grids that this thread runs have other `Options`: using(order=...)."""
    token = options.set(options.get()._replace(**changed))
    try:
        yield
    finally:
        options.reset(token)


def note(what, tile=None, barrier=None, partition=None):
    """Tell the watcher of an event: "wait", "resume" or "arrive" at a barrier; "copy" and "landed"
    of a Load, "store" of a tile in shared memory, "stored" of a Store; "product" and "done" of a
    Product of Hopper's. What lands has the partition that asked.
    """
    partition = partition or here.partition
    if (watcher := partition.machine.options.watcher) is not None:
        watcher(partition, what, tile, barrier, partition.machine.tick())


class Stopped(BaseException):
    """Another partition failed."""


class Machine:
    """The partitions of the programs that are resident, and what is on its way.

    Attributes:
        partitions: those that have not ended.
        file: that the kernel is in.
        able: partitions, and loads and products on their way, that can go on; patient: those that
            do when none of these is left; late: those that do only then when nobody else can.
        polling: (function, partition that waits until it is true).
    """

    def __init__(self, file=""):
        self.options, self.file = options.get(), file
        self.random = random.Random(self.options.order.seed).random
        self.partitions, self.able, self.patient, self.late, self.polling = [], [], [], [], []
        self.threads, self.error, self.turns = [], None, 0
        self.tick = itertools.count(1).__next__  # the next cycle: no two events are of one
        self.memory, self.checking = here.memory, here.checking

    def able_or_late(self, probability):
        """Draw among which something is that is late so often."""
        return self.late if self.random() < probability else self.able

    def run(self, partitions):
        """Run partitions, and those that they start, to their end."""
        self.partitions += partitions
        self.able += partitions
        try:
            work(self, self.choose())
            self.join()
        except BaseException as error:  # such as Ctrl-C
            self.fail(error)
            self.join()
        if self.error:
            raise self.error
        if self.able or self.late:
            raise AccessError("programs end with loads in flight that no partition has waited for")

    def join(self):
        for thread in self.threads:  # grows meanwhile
            thread.join()

    def choose(self):
        """Draw who goes on; what is drawn before and is no partition lands."""
        self.turns += 1
        while True:
            for x in [x for x in self.polling if x[0]()]:
                self.polling.remove(x)
                self.able.append(x[1])
            among = self.able or self.patient or self.late
            if not among:
                self.fail(Deadlock(report.deadlock(self.partitions)))
                raise Stopped
            place = int(self.random() * len(among))
            among[place], chosen = among[-1], among[place]
            among.pop()
            if type(chosen) is not Partition:
                try:
                    chosen.land()
                except AccessError as error:  # not of the partition whose thread this is
                    error.add_note(f"in {chosen.partition.name}")
                    self.fail(error.with_traceback(None))
                    raise Stopped from None
            elif chosen.barrier is None or chosen.barrier.phase != chosen.phase:
                return chosen
            else:  # it has missed a phase
                chosen.barrier.waiting.append(chosen)

    def wake(self, chosen):
        """Let a partition go on, in its thread; if it has none, in a new one."""
        if chosen.thread is None:
            thread = threading.Thread(target=work, args=(self, chosen), daemon=True)
            thread.start()
            self.threads.append(thread)
        else:
            chosen.turn.put(None)

    def fail(self, error):
        """Stop all partitions."""
        if self.error is None:
            self.error = error
            for x in list(self.partitions):
                x.turn.put(None)


def work(machine, partition):
    """What a thread does: run a partition, and then others that have not begun."""
    with as_on_a_gpu():
        while True:
            partition.run()
            if machine.error or not machine.partitions:
                return
            try:
                partition = machine.choose()
            except Stopped:
                return
            if partition.thread is not None:
                partition.turn.put(None)
                return


class GluonProgram(Program):
    """What the partitions of a program share.

    Attributes:
        partitions: all that there ever were.
        named_barriers: those with arrivals, by number.
        queue: products of Blackwell's tensor cores that are not computed yet, in order.
        columns: of tensor memory that are allocated.
        fills: what is in tiles of shared memory, see `hazards`; None if that is not watched.
    """

    def __init__(self, machine, number, grid):
        super().__init__(number, grid)
        self.machine = machine
        self.partitions, self.named_barriers, self.queue = [], {}, []
        self.columns, self.tensor_memory = 0, None
        self.fills = None if machine.memory is None else []

    def read(self, tile, who, *until):
        """TMA or tensor cores read a tile that must not have been written from registers without a
        fence behind it. Returns what `hazards.read` does.
        """
        if any(overlap(tile, x) for partition in self.partitions for x in partition.written):
            raise AccessError(f"{who} reads {tile} without fence_async_shared")
        return hazards.read(tile, *until)

    def check_fill(self, tile, by_tma=False, filler=None):
        """Refuse to write a tile that a product of Blackwell's is to use, or to fill by TMA one
        that was read to registers without a fence: TMA is another proxy, and may be earlier than
        reads that no fence says are done. A product of Hopper's that still reads it is torn: its
        result must not be used. filler: whose load lands; else the partition that runs writes it.
        """
        if by_tma and self.machine.options.loads_need_fences:
            if any(overlap(tile, x) for partition in self.partitions for x in partition.read):
                raise AccessError(f"TMA fills {tile}, which was read without a fence")
        for product in (x for partition in self.partitions for x in partition.products):
            if not product.torn and any(overlap(tile, x) for x in product.operands):
                product.torn = (
                    f"{tile} is filled by {filler or report.where(here.partition)} while a product "
                    f"of {product.partition.name} that no warpgroup_mma_wait has waited for still "
                    "reads it"
                )
        self.check_queue(tile, "written while a product is to use it")

    def check_queue(self, tile, what, reads=False):
        """Refuse to touch what a product of Blackwell's that is not computed yet is to use."""
        for product in self.queue:
            used = product.written if reads else product.operands + product.written
            if any(overlap(tile, x) for x in used):
                raise AccessError(f"{tile} in {tile.kind} is {what}")


class Partition:
    """Warps that run a function: a program's kernel, or what that gives to `warp_specialize`.

    Attributes:
        barrier, phase: at which barrier it waits, for the end of which phase.
        turn: gets something when its thread may go on; clock: see `hazards`.
        waited: the mbarrier of its last wait; stale: the phase of that, if it had waited for it
            before, or the barrier is new; ended: of each barrier, how many phases it has seen end.
        waits: the mbarriers it has waited for since its last load by TMA.
        products, stores: that it has not waited for; leaving: stores whose tile was read, and that
            are not in memory yet.
        initialised: mbarriers, written, read: tiles in shared memory, since its last fence.
        before_tma, before_count: fences that are missing: between what was read of other programs
            and TMA, and between what TMA has written and what tells other programs of it.
    """

    def __init__(self, program, name, function, arguments, threads, parent=None):
        self.program, self.machine, self.threads = program, program.machine, threads
        self.name, self.parent, self.children = f"program {program.number}, {name}", parent, 0
        self.function, self.arguments, self.thread = function, arguments, None
        self.turn, self.barrier, self.phase = SimpleQueue(), None, 0
        self.products, self.stores, self.leaving, self.initialised = [], [], [], set()
        self.written, self.read, self.before_tma, self.before_count = set(), set(), set(), set()
        self.clock = {self: 1} if parent is None else released(parent) | {self: 1}
        self.waited, self.stale, self.ended, self.waits = None, None, {}, []
        self.index = len(program.partitions)
        program.partitions.append(self)

    def run(self, pauses=False):
        """Run the function to its end; returns what it does."""
        machine, before, result = self.machine, (here.program, here.partition), None
        here.program, here.partition = self.program, self
        here.memory, here.checking = machine.memory, machine.checking
        self.thread, self.base = threading.get_ident(), sys._getframe()
        try:
            if pauses:
                self.pause()
            result = self.function(*self.arguments)
            if self.products or self.stores:
                what = "products" if self.products else "stores"
                raise AccessError(f"{self.name} ends with {what} in flight")
            for x in self.leaving:
                x.land()
        except Stopped:
            pass
        except BaseException as error:
            error.add_note(f"in {self.name}")
            machine.fail(error)
        here.program, here.partition = before
        machine.partitions.remove(self)
        if self.parent is not None:
            join(self.parent.clock, self.clock)
            self.parent.children -= 1
            if self.parent.children == 0 and self.parent.thread != self.thread:
                machine.able.append(self.parent)
        return result

    def pause(self, among=None):
        """Let others run, and go on as one of these; if not given, perhaps, as an able one."""
        if among is None and self.machine.random() < 0.5:
            return
        (self.machine.able if among is None else among).append(self)
        self.wait()

    def wait(self):
        """Let others run, until one of them says that this partition can go on."""
        if not self.machine.error and (chosen := self.machine.choose()) is not self:
            self.machine.wake(chosen)
            self.turn.get()
        if self.machine.error:
            raise Stopped

    def __str__(self):
        """Its name, in a grid of one program without that."""
        return self.name.partition(", ")[2] if self.program.grid == (1, 1, 1) else self.name


def run_grid(function, grid, arguments, num_warps=4):
    """Run a kernel's programs, a few at once.

    Raises:
        CompileError, AccessError: a program does what it must not.
        Deadlock: no partition can go on.
    """
    chosen = options.get()
    numbers = list(chosen.begun(grid[0] * grid[1] * grid[2]))
    file = getattr(getattr(function, "func", None), "file", "")
    for first in range(0, len(numbers), chosen.resident):
        machine = Machine(file)
        some = numbers[first : first + chosen.resident]
        programs = [GluonProgram(machine, i, grid) for i in some]
        machine.run([Partition(x, "kernel", function, arguments, 32 * num_warps) for x in programs])


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Run each (function, arguments) in a partition of its own, to the end of all. The first one
    has the warps of the kernel, and so its thread.
    """
    parent, machine = here.partition, here.partition.machine
    warps = [parent.threads // 32, *worker_num_warps]
    if not len(warps) == len(functions_and_args) == 1 + len(worker_num_regs or warps[1:]):
        raise CompileError("warp_specialize needs warps and registers for all functions but one")
    children = [
        Partition(parent.program, f"{function.__name__} {i}", function, arguments, 32 * n, parent)
        for i, ((function, arguments), n) in enumerate(zip(functions_and_args, warps))
    ]
    parent.children = len(children)
    machine.partitions += children
    machine.able += children[1:]
    result = children[0].run(pauses=True)
    if machine.error:
        raise Stopped
    if parent.children:
        parent.wait()
    return result


def barrier(*, cluster=False):
    """Of the threads of a partition, which are one here: others come as far as they can."""
    here.partition.pause(here.partition.machine.late)
