"""What is said of partitions: where they are, how the kernel names a tile or a barrier, and what a
dead-lock is made of.
"""

import linecache
import operator
import sys
import threading
from pathlib import Path

from flash_versions.simulator.errors import AccessError
from flash_versions.simulator.state import here

OWN = str(Path(__file__).parents[1]), threading.__file__
MOST_FIELDS = 4  # of aggregates in aggregates


def frames(partition):
    """The frames of a kernel's functions that a partition has come to, the outermost first. Its
    thread may also run the first of the partitions that it waits for.
    """
    frame, found = sys._current_frames().get(partition.thread), []
    while frame is not None and frame is not partition.base:
        if frame.f_code is partition.base.f_code:
            found = []
        elif not frame.f_code.co_filename.startswith(OWN) and frame.f_code.co_name[0] != "<":
            found.insert(0, frame)
        frame = frame.f_back
    return found


def where(partition):
    """A partition, and the lines of the kernel that it has come to."""
    found = frames(partition)
    if not found:
        return f"{partition} in its begin"
    text = linecache.getline(found[-1].f_code.co_filename, found[-1].f_lineno).strip()
    lines = " > ".join(f"{x.f_code.co_name}:{x.f_lineno}" for x in found)
    return f"{partition} in {lines}: {text}"


def line(partition):
    """The innermost of them; of those in the kernel's file, if there is one."""
    found = frames(partition)
    own = [x for x in found if x.f_code.co_filename == partition.machine.file] or found
    return f"line {own[-1].f_lineno} of {own[-1].f_code.co_name}" if own else "its begin"


def fields(name, value, depth=MOST_FIELDS):
    """A value with its name, and if it is an aggregate, its fields."""
    yield name, value
    if depth:
        for field in getattr(value, "fields", ()):
            path = field if name == "self" else f"{name}.{field}"
            yield from fields(path, getattr(value, field, None), depth - 1)


class Named:
    """What a kernel names: a tile, a barrier, or a row of barriers, of the program that runs."""

    def __init__(self):
        self.program = here.program

    def __str__(self):
        """Its name, "slot 0 of `full`": sought among the variables of the partition that runs, then
        of the others of its program, the outermost function's first.
        """
        program = self.program or here.program
        others = [x for x in program.machine.partitions if x.program is program and x.thread]
        for partition in sorted(others, key=lambda x: x is not here.partition):
            for frame in frames(partition):
                for variable, content in frame.f_locals.items():
                    for name, value in fields(variable, content):
                        if (part := part_of(value, self)) is not None:
                            return f"{part}`{name}`"
        return "a tile" if hasattr(self, "low") else "a barrier"

    def slot(self, index):
        """The number of a slot that a row has."""
        i, n = operator.index(index), self.shape[0]
        if not 0 <= i < n:
            raise AccessError(f"slot {i} of {self} does not exist: it has {n}")
        return i


def part_of(value, thing):
    """Which slot of a value a tile or a barrier is, as the begin of its name; or None."""
    if value is thing:
        return ""
    if isinstance(value, list):  # of barriers
        return next((f"slot {i} of " for i, slot in enumerate(value) if slot is thing), None)
    if not hasattr(value, "low") or not hasattr(thing, "low"):
        return None
    if not value.low <= thing.low < thing.high <= value.high:
        return None
    slots = value.shape[0] if len(value.shape) > 2 else 1
    size = (value.high - value.low) // slots
    return f"slot {(thing.low - value.low) // size} of " if slots > 1 else ""


# ------------------------------------------------------------------------------- dead-locks
FILLS = {"expect", "fill", "load_tile", "async_load", "async_copy_global_to_shared"}


def number(n, noun):
    """So many of something."""
    return f"{n} {noun}{'s' * (n != 1)}"


def explain(partition, waiting):
    """Where a partition waits and what would release it; waiting: the names of all that do."""
    barrier, text = partition.barrier, where(partition)
    if barrier is None:
        return text
    lacks, missing = [], barrier.missing_bytes
    if barrier.pending or not missing:
        lacks.append(number(barrier.pending, "more arrival"))
    if missing > 0:
        lacks.append(f"{missing} more bytes from a load")
    elif missing < 0:
        lacks.append(f"an `expect` of the {-missing} bytes that have landed")
    history = "No partition has arrived there and no load has landed there."
    for name, turn in barrier.arrived.items():  # the latest is the last
        history = f"The last arrival came from {name}, at turn {turn}."
    for name in barrier.arrived:
        history += f" {name} {'waits too' if name in waiting else 'has ended'}."
    return (
        f"{text}\n    It waits for the end of phase {partition.phase} of {barrier}, which needs "
        f"{' and '.join(lacks)} (it counts {barrier.count}).\n    {history}"
    )


def mistake(who):
    """What may be wrong where a partition waits: how unsure that is, and a sentence."""
    barrier, phase, others = who.barrier, who.phase, who.program.partitions[1:]
    if barrier is None:
        return 9, "all partitions wait"
    name, came, arrived = f"{barrier}", barrier.count - barrier.pending, barrier.arrived
    seen, landed = who.ended.get(barrier), barrier.expected - barrier.missing_bytes
    behind = barrier.ended - (seen or 0)
    alive = {x.name for x in who.machine.partitions}
    ended = [f"{x}" for x in others if x.thread and x.name not in alive]
    fills = any(FILLS & set(x.f_code.co_names) for x in frames(who))
    cases = (
        (barrier.number is not None, 2,
         f"{who} waits at {name} for {barrier.count} threads, of which {came} have arrived; no "
         "other partition arrives there"),
        (barrier.missing_bytes and not barrier.pending, 0,
         f"{name} expects {barrier.expected} bytes in a phase, and {landed} bytes land there"),
        (behind == 1, 1,
         f"{who} waits for the wrong phase of {name}: phase {1 - phase} has ended, which it has "
         f"not waited for; it should wait for phase {1 - phase}, and waits for {phase}"),
        (behind, 1,
         f"{behind} phases of {name} have ended that {who} has not waited for; it counts "
         f"{number(barrier.count, 'arrival')}, and {number(len(arrived), 'partition')} arrived "
         "there: too often, or a tile was filled again before it was read"),
        (arrived and came, 2,
         f"{name} counts {barrier.count} arrivals, and {came} came in this phase"),
        (ended and alive.isdisjoint(arrived), 4,
         f"{who} waits for {name}, and {', '.join(ended)} has ended: no partition fills it or "
         "arrives there any more"),
        (seen is None and not arrived and (fills or phase == 0), 2 if fills else 6,
         f"the first wait of {who} for {name} does not end: of a new barrier phase 1 counts as "
         "ended, so who begins, and fills a tile, should wait for phase 1 first, and it waits "
         f"for phase {phase}"),
        (True, 3 if arrived else 2,
         f"{who} waits for phase {phase} of {name}, and no partition arrives there: who fills "
         "a tile, or has read it, has to"),
    )  # fmt: skip
    return next((unsure, said) for holds, unsure, said in cases if holds)


def deadlock(partitions):
    """What all partitions wait for, behind what is most likely wrong."""
    waiting = {x.name for x in partitions}
    _, first = min((mistake(x) for x in partitions), key=lambda found: found[0])
    lines = (f"\n  {explain(x, waiting)}" for x in partitions)
    return f"dead-lock: {first}. All partitions wait:{''.join(lines)}"
