"""A small simulator of FA3's program: a producer that loads, two consumers that compute.

Its rules:

* The tensor core works on one product at a time, instruction by instruction. If products of both
  consumers wait, it alternates between them. With ping-pong, it serves them in the order in which
  they were issued.
* The exponential unit (16 numbers a cycle) works for one consumer at a time, and alternates.
* Each consumer has warps of its own for the rest of the softmax and for rescaling.
* K and V have pipelines of slots. A load begins when both consumers have read what was in its slot,
  and ends `load` cycles later; loads do not slow each other down.
* Blocks are counted in the order in which they are visited. The kernel walks from the last block of
  keys to the first, so block 0 here is its last one.

The consumers' programs are those of flash_versions/versions/fa3/hopper/forward.py: `attend` with
overlap, `attend_in_order` without. The simulator leaves out the issue slots that the two consumers'
warps share, bank conflicts, clocks that change and the end of a tile, so its times are good to ten
percent and no more.
"""

import heapq
import itertools
from collections.abc import Callable, Generator, Hashable, Iterator
from functools import partial
from typing import NamedTuple

TENSOR_CORE, EXP_UNIT = "tensor core", "exp unit"
CONSUMERS = 2
INSTRUCTION = 64.0  # cycles: one of the instructions that a product consists of
TURN = 32.0  # cycles that the exponential unit works for one consumer before it looks at the other

Event = Hashable
Request = tuple
Program = Generator[Request, None, None]


class Durations(NamedTuple):
    """Cycles of what is done for one block of keys and the rows of one consumer."""

    load: float  # from asking for a tile of K or V until it has landed
    product: float  # of the tensor core, for S or for P V
    answer: float  # from the end of a product until the consumer has its result
    scores: float  # maxima, differences and sums: the softmax without exponentials
    exponentials: float  # of the exponential unit
    correct: float  # rescale the accumulator, round P


class Task(NamedTuple):
    """Something that was done: by whom or where, what, for whom (None: all), for which block."""

    unit: str
    what: str
    consumer: int | None
    block: int
    start: float
    end: float


class Logged(NamedTuple):
    """A request of a consumer, and how long it kept the consumer."""

    consumer: int
    request: Request
    start: float
    end: float


class Job(NamedTuple):
    """A request at a unit that consumers share."""

    what: str
    consumer: int
    block: int
    done: Event


class Unit:
    """A unit that does one thing at a time, in slices; requests of a consumer in their order."""

    def __init__(self, name: str, slice_: float, in_order: bool, answer: float) -> None:
        self.name, self.slice, self.in_order, self.answer = name, slice_, in_order, answer
        self.jobs: list[tuple[Job, float]] = []  # with the cycles that are left
        self.busy = False
        self.last: int | None = None  # the consumer that was served

    def take(self) -> tuple[Job, float]:
        """The next slice: (its job, its cycles)."""
        place = 0
        if not self.in_order:
            others = (i for i, (job, _) in enumerate(self.jobs) if job.consumer != self.last)
            place = next(others, 0)
        job, left = self.jobs.pop(place)
        cycles = min(left, self.slice)
        self.last = job.consumer
        if left > cycles:
            self.jobs.insert(place, (job, left - cycles))
        return job, cycles

    def finished(self, job: Job) -> bool:
        """Whether nothing of a job is left."""
        return all(other != job for other, _ in self.jobs)


class Machine:
    """Programs, what they wait for, and what they did: `tasks`."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = {unit.name: unit for unit in units}
        self.now = 0.0
        self.tasks: list[Task] = []
        self.last: dict[str, int] = {}  # of a shared unit, the number of its last task
        self.happened: set[Event] = set()
        self.waiting: dict[Event, list[Program]] = {}
        self.calendar: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()

    def run(self, programs: list[Program]) -> list[Task]:
        """Run programs to their ends."""
        for program in programs:
            self.after(0.0, partial(self.resume, program))
        while self.calendar:
            self.now, _, action = heapq.heappop(self.calendar)
            action()
        if self.waiting:
            raise RuntimeError(f"programs wait for ever for {sorted(map(str, self.waiting))}.")
        return sorted(self.tasks, key=lambda task: (task.start, task.unit))

    def after(self, cycles: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self.calendar, (self.now + cycles, next(self.order), action))

    def signal(self, event: Event) -> None:
        """An event happens: what waits for it goes on."""
        self.happened.add(event)
        for program in self.waiting.pop(event, []):
            self.after(0.0, partial(self.resume, program))

    def resume(self, program: Program) -> None:
        """Let a program go on until it has to wait."""
        for request in program:
            match request:
                case ("wait", event):
                    if event not in self.happened:
                        self.waiting.setdefault(event, []).append(program)
                        return
                case ("signal", event):
                    self.signal(event)
                case ("ask", name, cycles, job):
                    self.units[name].jobs.append((job, cycles))
                    self.serve(self.units[name])
                case ("start", task, event):
                    self.note(task)
                    self.after(task.end - task.start, partial(self.signal, event))
                case ("spend", task):
                    self.note(task)
                    self.after(task.end - task.start, partial(self.resume, program))
                    return

    def note(self, task: Task) -> None:
        """Write down what takes from now on so long; its own times are relative."""
        self.tasks.append(task._replace(start=self.now, end=self.now + task.end - task.start))

    def serve(self, unit: Unit) -> None:
        """If a unit is free and something waits for it, the next slice."""
        if unit.busy or not unit.jobs:
            return
        job, cycles = unit.take()
        unit.busy = True
        self.join(Task(unit.name, job.what, job.consumer, job.block, self.now, self.now + cycles))

        def done() -> None:
            unit.busy = False
            if unit.finished(job):
                self.after(unit.answer, partial(self.signal, job.done))
            self.serve(unit)

        self.after(cycles, done)

    def join(self, task: Task) -> None:
        """Write down a slice; one that goes on without a gap is part of the slice before."""
        place = self.last.get(task.unit)
        if place is not None:
            before = self.tasks[place]
            if before[:4] == task[:4] and before.end == task.start:
                self.tasks[place] = before._replace(end=task.end)
                return
        self.last[task.unit] = len(self.tasks)
        self.tasks.append(task)


def simulate(
    durations: Durations,
    blocks: int = 4,
    overlap: bool = True,
    ping_pong: bool = True,
    stages: int = 2,
    apart: float = 0.0,
    log: list[Logged] | None = None,
) -> list[Task]:
    """One tile of two consumers over so many blocks of keys, as tasks in the order of their start.

    Args:
        durations: cycles of each kind of work.
        blocks: of keys.
        overlap: S of a block is asked for before P V of the block before; else one by one.
        ping_pong: the consumers take turns at the tensor core.
        stages: slots of each ring.
        apart: cycles by which the second consumer begins later.
        log: gets every request of the consumers.
    """
    units = [
        Unit(TENSOR_CORE, float("inf") if ping_pong else INSTRUCTION, ping_pong, durations.answer),
        Unit(EXP_UNIT, TURN, False, 0.0),
    ]
    consume = overlapped if overlap else in_order
    machine, programs = Machine(units), [produce(durations, blocks, stages)]
    for c in range(CONSUMERS):
        program = consume(durations, blocks, ping_pong, c, apart * c)
        programs.append(program if log is None else logged(program, machine, c, log))
    return machine.run(programs)


def logged(program: Program, machine: Machine, consumer: int, log: list[Logged]) -> Program:
    """A program whose requests are written down."""
    for request in program:
        start = machine.now
        yield request
        log.append(Logged(consumer, request, start, machine.now))


def total(tasks: list[Task]) -> float:
    """Cycles from the first product to the end: loading the first tiles is the same for all."""
    return max(t.end for t in tasks) - min(t.start for t in tasks if t.unit == TENSOR_CORE)


def produce(d: Durations, blocks: int, stages: int) -> Program:
    """The producer: K and V of each block into the rings, when a slot is empty."""
    for block in range(blocks):
        for what in ("K", "V"):
            if block >= stages:
                for c in range(CONSUMERS):
                    yield "wait", ("read", what, block - stages, c)
            unit = f"{what} slot {block % stages}"
            yield "start", Task(unit, f"load {what}", None, block, 0.0, d.load), ("is", what, block)


def in_order(d: Durations, blocks: int, ping_pong: bool, me: int, late: float) -> Program:
    """A consumer without overlap: each product is waited for."""
    for j in range(blocks):
        yield "wait", ("is", "K", j)
        if j == 0:
            yield from idle(me, late)
        yield from named_barrier_sync(ping_pong, me, j)
        yield ask("S", d, me, j)
        yield from named_barrier_arrive(ping_pong, me, j)
        yield "wait", ("done", "S", me, j)
        yield "signal", ("read", "K", j, me)
        yield from softmax(d, me, j)
        yield from correct(d, me, j)
        yield from last_product(d, me, j)


def overlapped(d: Durations, blocks: int, ping_pong: bool, me: int, late: float) -> Program:
    """A consumer with S of one block at the tensor core together with P V of the one before."""
    yield "wait", ("is", "K", 0)
    yield from idle(me, late)
    yield ask("S", d, me, 0)
    yield "wait", ("done", "S", me, 0)
    yield "signal", ("read", "K", 0, me)
    yield from softmax(d, me, 0)
    yield from correct(d, me, 0)
    for j in range(1, blocks):
        yield "wait", ("is", "K", j)
        yield from named_barrier_sync(ping_pong, me, j - 1)
        yield ask("S", d, me, j)
        yield "wait", ("is", "V", j - 1)
        yield ask("PV", d, me, j - 1)
        yield from named_barrier_arrive(ping_pong, me, j - 1)
        yield "wait", ("done", "S", me, j)
        yield "signal", ("read", "K", j, me)
        yield from softmax(d, me, j)
        yield "wait", ("done", "PV", me, j - 1)
        yield "signal", ("read", "V", j - 1, me)
        yield from correct(d, me, j)
    yield from last_product(d, me, blocks - 1)


def idle(me: int, cycles: float) -> Iterator[Request]:
    """Do nothing, for a while."""
    if cycles:
        yield "spend", Task(f"consumer {me}", "idle", me, 0, 0.0, cycles)


def ask(what: str, d: Durations, me: int, block: int) -> Request:
    """Ask the tensor core for a product."""
    return "ask", TENSOR_CORE, d.product, Job(what, me, block, ("done", what, me, block))


def last_product(d: Durations, me: int, block: int) -> Iterator[Request]:
    """P V of a block, waited for."""
    yield "wait", ("is", "V", block)
    yield ask("PV", d, me, block)
    yield "wait", ("done", "PV", me, block)
    yield "signal", ("read", "V", block, me)


def softmax(d: Durations, me: int, block: int) -> Iterator[Request]:
    """Maxima and sums on the consumer's own warps, exponentials on the unit for them."""
    done = ("done", "exp", me, block)
    yield "spend", Task(f"consumer {me}", "softmax", me, block, 0.0, d.scores)
    yield "ask", EXP_UNIT, d.exponentials, Job("exp", me, block, done)
    yield "wait", done


def correct(d: Durations, me: int, block: int) -> Iterator[Request]:
    """Rescale the accumulator and round P, on the consumer's own warps."""
    yield "spend", Task(f"consumer {me}", "correct", me, block, 0.0, d.correct)


def named_barrier_sync(ping_pong: bool, me: int, number: int) -> Iterator[Request]:
    """Wait until the other consumer has asked for its products; consumer 0 begins."""
    if ping_pong and (me > 0 or number > 0):
        yield "wait", ("turn", me, number)


def named_barrier_arrive(ping_pong: bool, me: int, number: int) -> Iterator[Request]:
    """The next consumer's turn."""
    if ping_pong:
        after = (me + 1) % CONSUMERS
        yield "signal", ("turn", after, number + (after == 0))
