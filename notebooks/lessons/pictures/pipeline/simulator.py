"""A small simulator of FA3's program: a producer that loads, two consumers that compute.

Time goes on in ticks. In each tick every program goes on until it has to wait, and every unit works
for one of its jobs. The rules:

* Without ping-pong the tensor core works for the two consumers in turns, a tick for each, if both
  have issued products. With ping-pong it works on one product after the other.
* The exponential unit (16 numbers a cycle) works for the two consumers in turns.
* Each consumer has warps of its own for the rest of the softmax and for rescaling.
* K and V have rings of two slots. A load begins when both consumers have read what was in its slot;
  loads do not slow each other down.
* Blocks are counted in the order in which they are visited: the kernel's last one is block 0 here.

The simulator leaves out the issue slots that the warps share, bank conflicts, clocks that change
and the end of a tile, so its times are good to ten percent and no more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TENSOR_CORE, EXP_UNIT = "tensor core", "exp unit"
CONSUMERS, STAGES = 2, 2
TICK = 32.0  # cycles
NOTED = ("K", "V", "S", "PV", "turn")  # events that a line of the kernel waits for

Event = tuple[str, int, int | None]  # what, block, consumer


class Durations(NamedTuple):
    """Cycles of what is done for one block of keys and the rows of one consumer."""

    load: float  # from asking for a tile of K or V until it has landed
    product: float  # of the tensor core, for S or for P V
    answer: float  # from the end of a product until the consumer has its result
    scores: float  # maxima, differences and sums: the softmax without exponentials
    exponentials: float  # of the exponential unit
    correct: float  # rescale the accumulator, round P


class Task(NamedTuple):
    """Something that was done, or waited for ("wait K"): where, what, for whom, for which block."""

    unit: str
    what: str
    consumer: int | None
    block: int
    start: float
    end: float


@dataclass(eq=False)
class Job:
    """What a unit has to do; `latency` cycles after the last tick, the event happens."""

    event: Event
    left: float
    latency: float


class Simulation:
    """One tile of two consumers: `run` gives its tasks.

    Args:
        durations: cycles of each kind of work.
        blocks: of keys.
        overlap: S of a block is issued before P V of the block before; else one by one.
        ping_pong: the consumers take turns at issuing products.
        apart: cycles by which the second consumer begins later.
    """

    def __init__(
        self,
        durations: Durations,
        blocks: int,
        overlap: bool = True,
        ping_pong: bool = True,
        apart: float = 0.0,
    ) -> None:
        self.durations, self.blocks, self.apart = durations, blocks, apart
        self.overlap, self.ping_pong = overlap, ping_pong
        self.now = 0.0
        self.happens: dict[Event, float] = {}  # when an event happens
        self.queues: dict[str, list[Job]] = {}  # of each unit
        self.latest: dict[str, Task] = {}  # of each unit, to which the next tick may belong
        self.tasks: list[Task] = []

    def run(self) -> list[Task]:
        """Run the programs to their ends: tasks in the order of their start."""
        programs: dict[int | None, Iterator[Event]] = {None: self.produce()}
        programs |= {consumer: self.consume(consumer) for consumer in range(CONSUMERS)}
        waits = {who: (next(program), 0.0) for who, program in programs.items()}
        while waits:
            for who, program in programs.items():
                while who in waits and self.happens.get(waits[who][0], self.now + 1) <= self.now:
                    (what, block, _), since = waits.pop(who)
                    if who is not None and what in NOTED and since < self.now:
                        unit, what = f"consumer {who}", f"wait {what}"
                        self.tasks.append(Task(unit, what, who, block, since, self.now))
                    following = next(program, None)
                    if following is not None:
                        waits[who] = following, self.now
            for unit, queue in self.queues.items():
                if queue:
                    self.work(unit, queue)
            self.now += TICK
        return sorted([*self.tasks, *self.latest.values()], key=lambda task: task.start)

    def work(self, unit: str, queue: list[Job]) -> None:
        """One tick of a unit."""
        latest = self.latest.get(unit)
        others = [job for job in queue if latest and job.event[2] != latest.consumer]
        in_turns = unit == EXP_UNIT or not self.ping_pong
        job = others[0] if others and in_turns else queue[0]
        what, block, consumer = job.event
        task = Task(unit, what, consumer, block, self.now, self.now + TICK)
        if latest and latest[:4] == task[:4] and latest.end == self.now:
            task = task._replace(start=latest.start)
        elif latest:
            self.tasks.append(latest)
        self.latest[unit] = task
        job.left -= TICK
        if job.left <= 0:
            queue.remove(job)
            self.happens[job.event] = self.now + TICK + job.latency

    def issue(
        self, unit: str, what: str, block: int, me: int | None, cycles: float, latency: float = 0.0
    ) -> Event:
        """Give a unit something to do; what happens when it is done."""
        event = what, block, me
        self.queues.setdefault(unit, []).append(Job(event, cycles, latency))
        return event

    # The programs. Each yields what it waits for.

    def produce(self) -> Iterator[Event]:
        """K and V of each block into the rings, when a slot is empty."""
        for block in range(self.blocks):
            for what in ("K", "V"):
                if block >= STAGES:
                    for consumer in range(CONSUMERS):
                        yield f"read {what}", block - STAGES, consumer
                slot = f"slot {block % STAGES} of {what}"
                self.issue(slot, what, block, None, self.durations.load)
        yield "V", self.blocks - 1, None

    def consume(self, me: int) -> Iterator[Event]:
        """A consumer."""
        yield "K", 0, None
        if me and self.apart:
            yield self.issue(f"consumer {me}", "idle", 0, me, self.apart)
        yield from self.overlapped(me) if self.overlap else self.in_order(me)

    def in_order(self, me: int) -> Iterator[Event]:
        """Each product is waited for."""
        for j in range(self.blocks):
            yield "K", j, None
            yield from self.named_barrier_sync(me, j)
            product = self.product("S", j, me)
            self.named_barrier_arrive(me, j)
            yield product
            self.happens["read K", j, me] = self.now
            yield from self.softmax(j, me)
            yield from self.last_product(j, me)

    def overlapped(self, me: int) -> Iterator[Event]:
        """S of one block is at the tensor core together with P V of the one before."""
        yield self.product("S", 0, me)
        self.happens["read K", 0, me] = self.now
        yield from self.softmax(0, me)
        for j in range(1, self.blocks):
            yield "K", j, None
            yield from self.named_barrier_sync(me, j - 1)
            scores = self.product("S", j, me)
            yield "V", j - 1, None
            values = self.product("PV", j - 1, me)
            self.named_barrier_arrive(me, j - 1)
            yield scores
            self.happens["read K", j, me] = self.now
            yield from self.softmax(j, me, then=values)
            self.happens["read V", j - 1, me] = self.now
        yield from self.last_product(self.blocks - 1, me)

    def product(self, what: str, block: int, me: int) -> Event:
        """Issue a product."""
        answer = self.durations.answer
        return self.issue(TENSOR_CORE, what, block, me, self.durations.product, answer)

    def softmax(self, block: int, me: int, then: Event | None = None) -> Iterator[Event]:
        """Maxima and sums on the consumer's own warps, exponentials on the unit for them; when also
        `then` has happened, rescale the accumulator and round P.
        """
        own = f"consumer {me}"
        yield self.issue(own, "softmax", block, me, self.durations.scores)
        yield self.issue(EXP_UNIT, "exp", block, me, self.durations.exponentials)
        if then is not None:
            yield then
        yield self.issue(own, "correct", block, me, self.durations.correct)

    def last_product(self, block: int, me: int) -> Iterator[Event]:
        """P V of a block, waited for."""
        yield "V", block, None
        yield self.product("PV", block, me)
        self.happens["read V", block, me] = self.now

    def named_barrier_sync(self, me: int, number: int) -> Iterator[Event]:
        """Wait until the other consumer has issued its products; consumer 0 begins."""
        if self.ping_pong and (me > 0 or number > 0):
            yield "turn", number, me

    def named_barrier_arrive(self, me: int, number: int) -> None:
        """The other consumer's turn."""
        other = 1 - me
        self.happens["turn", number + (other == 0), other] = self.now


def total(tasks: list[Task]) -> float:
    """Cycles from the first product to the end: loading the first tiles is the same for all."""
    return max(t.end for t in tasks) - min(t.start for t in tasks if t.unit == TENSOR_CORE)
