"""Replay a trace with the rates of an SM's units: modelled, never measured.

Its rules:

* A role does one thing after the other, and waits at barriers for the others. Products and copies
  go on by themselves; their ends arrive at barriers.
* The tensor cores compute one product at a time, in the order in which they were issued, at their
  own rate or at that of shared memory, whichever is lower.
* Copies are served in order, at a fixed rate, after a fixed latency.
* The warps of all roles share the special function unit, the arithmetic units, the units for other
  instructions, the slots in which instructions are issued, and the ports of tensor memory. A unit
  is shared equally by the roles that need it in that moment. A piece of work takes as long as the
  unit that it keeps longest: inside of a piece the units overlap.
* Waking up after a wait takes a fixed time.

Not modelled: bank conflicts, dependencies between instructions, clocks that change, the scheduler
of warps, the store of O to memory, other programs.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from lessons.modelled import counts, trace
from lessons.modelled.rates import B200, Rates

THREADS, QUARTERS = 32, 4  # of a warp; of an SM, each with one warp of a role
TENSOR, EXPONENTIALS, COPIES = "tensor cores", "exponentials", "copies"
ARITHMETIC, OTHER, ISSUE, PORTS = "arithmetic", "other", "issue slots", "tensor memory"
UNITS = (EXPONENTIALS, ARITHMETIC, OTHER, ISSUE, PORTS)


class Span(NamedTuple):
    """Something that was done.

    Attributes:
        lane: a role, "tensor cores" or "copies".
        what: of the trace's operation.
        start: in cycles.
        end: in cycles.
        tile: 0 or 1, of a product; else None.
        touched: columns of tensor memory that it uses, as (first, the one behind the last).
    """

    lane: str
    what: str
    start: float
    end: float
    tile: int | None = None
    touched: tuple[tuple[int, int], ...] = ()


class Run(NamedTuple):
    """A replayed trace.

    Attributes:
        spans: what was done, in the order of their ends.
        cycles: of the program.
        busy: cycles that each unit was busy.
    """

    spans: list[Span]
    cycles: float
    busy: dict[str, float]


@dataclass
class Barrier:
    """A barrier of the trace, and how often its phase has ended."""

    count: int
    pending: int = field(init=False)
    bytes: int = 0
    phases: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int, bytes: int) -> None:
        """Count arrivals, and bytes that are expected (positive) or have landed (negative)."""
        self.pending -= count
        self.bytes += bytes
        if self.pending == self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.count


@dataclass
class Role:
    """A role on its way through its operations."""

    name: str
    operations: deque[trace.Operation]
    left: dict[str, float] = field(default_factory=dict)  # cycles of each unit
    doing: str = ""
    touched: tuple[tuple[int, int], ...] = ()
    started: float = 0.0
    wakes: float = 0.0  # not before this cycle


def replay(found: trace.Trace, softmax: counts.Counts, rates: Rates = B200) -> Run:
    """Replay a trace.

    Args:
        found: of a program.
        softmax: what a block costs a warp of the softmax.
        rates: of the units.

    Raises:
        RuntimeError: no role can go on.
    """
    return Replay(found, softmax, rates).run()


class Replay:
    """The state of a replay."""

    def __init__(self, found: trace.Trace, softmax: counts.Counts, rates: Rates) -> None:
        self.rates, self.softmax = rates, softmax
        self.barriers = [Barrier(count) for count in found.counts]
        self.roles = [Role(name, deque(done)) for name, done in found.roles.items()]
        self.events: list[tuple[float, int, tuple[tuple[int, int, int], ...]]] = []
        self.now = self.tensor_free = self.copies_free = 0.0
        self.busy = dict.fromkeys((TENSOR, COPIES, *UNITS), 0.0)
        self.spans: list[Span] = []

    def run(self) -> Run:
        """From the first operation to the last."""
        while True:
            while sum(self.advance(role) for role in self.roles):
                pass
            working = [role for role in self.roles if role.left]
            if not (working or self.events or any(role.operations for role in self.roles)):
                break
            self.let_time_pass(working)
        end = max(self.now, self.tensor_free)
        return Run(sorted(self.spans, key=lambda x: x.end), end, self.busy)

    def advance(self, role: Role) -> bool:
        """Let a role do its next operation, if it can; whether it did."""
        if role.left or not role.operations or self.now < role.wakes:
            return False
        match operation := role.operations[0]:
            case trace.Wait():
                if self.barriers[operation.barrier].phases < operation.phases:
                    role.started = -1.0
                    return False
                if role.started < 0:  # it had to wait
                    role.started, role.wakes = 0.0, self.now + self.rates.signal
                    heapq.heappush(self.events, (role.wakes, len(self.spans), ()))
                    return True
            case trace.Arrive():
                self.barriers[operation.barrier].arrive(operation.arrivals, operation.bytes)
            case trace.Copy():
                self.copy(operation)
            case trace.Product():
                self.multiply(operation)
            case _:
                role.left = self.cost(operation, role.name)
                role.doing, role.started = operation.what, self.now
                role.touched = getattr(operation, "touched", ())
                if not role.left:
                    raise ValueError(f"{operation} costs nothing")
        role.operations.popleft()
        return True

    def copy(self, operation: trace.Copy) -> None:
        """Put a copy behind those that were asked for before."""
        start = max(self.now, self.copies_free)
        self.copies_free = start + operation.bytes / self.rates.copies
        self.busy[COPIES] += self.copies_free - start
        end = self.copies_free + self.rates.latency
        self.at(end, ((operation.barrier, 0, -operation.bytes),))
        self.spans.append(Span(COPIES, "copy", start, end))

    def multiply(self, operation: trace.Product) -> None:
        """Put a product behind those that were issued before."""
        start = max(self.now, self.tensor_free)
        operations = 2 * operation.rows * operation.inner * operation.columns
        cycles = max(
            operations / self.rates.tensor, operation.shared_bytes / self.rates.shared_memory
        )
        self.tensor_free = start + cycles
        self.busy[TENSOR] += operations / self.rates.tensor
        self.at(self.tensor_free, tuple((barrier, 1, 0) for barrier in operation.barriers))
        if operations:
            tile, touched = operation.tile, operation.touched
            self.spans.append(Span(TENSOR, operation.what, start, self.tensor_free, tile, touched))

    def at(self, time: float, arrivals: tuple[tuple[int, int, int], ...]) -> None:
        """Arrive at barriers later."""
        heapq.heappush(self.events, (time, len(self.spans), arrivals))

    def cost(self, operation: trace.Moved | trace.Work, role: str) -> dict[str, float]:
        """Cycles of each unit that an operation of a role takes."""
        rates = self.rates
        if isinstance(operation, trace.Moved):
            registers = operation.bytes / 4 / THREADS / QUARTERS  # of a thread
            rescaled = registers if (role, operation.what) == ("correction", "store") else 0.0
            return {PORTS: operation.bytes / rates.tensor_memory, ISSUE: 1 + rescaled}
        made = self.softmax
        if operation.what == "maximum":
            return {OTHER: self.cycles(made.maxima, rates.other), ISSUE: made.maxima}
        other = max(made.issued - made.exponentials - made.maxima - made.arithmetic, 0)
        return {
            EXPONENTIALS: operation.share * self.cycles(made.exponentials, rates.exponentials),
            ARITHMETIC: operation.share * self.cycles(made.arithmetic, rates.arithmetic),
            OTHER: operation.share * self.cycles(other, rates.other),
            ISSUE: operation.share * (made.issued - made.maxima),
        }

    def cycles(self, instructions: float, rate: float) -> float:
        """Of a unit, for instructions of one warp in each quarter of an SM."""
        return instructions * THREADS * QUARTERS / rate

    def let_time_pass(self, working: list[Role]) -> None:
        """Until something ends: a unit's part of a piece of work, a product, a copy, a wait."""
        users = {unit: sum(unit in role.left for role in working) for unit in UNITS}
        steps = [left * users[unit] for role in working for unit, left in role.left.items()]
        if self.events:
            steps.append(self.events[0][0] - self.now)
        if not steps:
            stuck = {x.name: x.operations[0] for x in self.roles if x.operations}
            raise RuntimeError(f"no role can go on: {stuck}")
        step = min(steps)
        self.now += step
        for unit in UNITS:
            self.busy[unit] += step if users[unit] else 0.0
        for role in working:
            role.left = {
                unit: left - step / users[unit]
                for unit, left in role.left.items()
                if left - step / users[unit] > 1e-6
            }
            if not role.left:
                self.finish(role)
        while self.events and self.events[0][0] <= self.now + 1e-9:
            for barrier, count, bytes in heapq.heappop(self.events)[2]:
                self.barriers[barrier].arrive(count, bytes)

    def finish(self, role: Role) -> None:
        """Note a piece of work that a role has done."""
        self.spans.append(Span(role.name, role.doing, role.started, self.now, touched=role.touched))
        role.started = 0.0
