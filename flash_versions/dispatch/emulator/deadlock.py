"""What a dead-lock of emulated partitions is made of: who waits where, and for which arrival."""

import sys


def frames(partition):
    """The frames of a partition's thread, the innermost first."""
    frame = sys._current_frames().get(partition.thread.ident)
    while frame is not None:
        yield frame
        frame = frame.f_back


def name_of(barrier, partition):
    """A barrier as its kernel names it, "slot 0 of `full`": sought in the variables of the
    functions that wait, and in the aggregates among them.
    """
    for frame in frames(partition):
        values = dict(frame.f_locals)
        for value in frame.f_locals.values():
            values |= getattr(value, "__dict__", {})
        for name, value in values.items():
            if type(value).__name__ == "Barriers":
                for i, slot in enumerate(value):
                    if slot is barrier:
                        return f"slot {i} of `{name}`"
    return "a barrier"


def missing(barrier):
    """What the current phase of a barrier lacks."""
    lacks = [f"{barrier.pending} more arrival{'s' * (barrier.pending != 1)}"]
    if barrier.missing_bytes > 0:
        lacks.append(f"{barrier.missing_bytes} more bytes from a load")
    elif barrier.missing_bytes < 0:
        lacks.append(f"an `expect` of the {-barrier.missing_bytes} bytes that have landed")
    return " and ".join(lacks if barrier.pending else lacks[1:] or lacks)


def history(barrier, partitions):
    """Who arrived at a barrier, and where each of those is now."""
    if not barrier.arrived:
        return "No partition has arrived there and no load has landed there."
    name, turn = list(barrier.arrived.items())[-1]
    text = f"The last arrival came from {name}, at turn {turn}."
    waiting = {x.name for x in partitions}
    for other in barrier.arrived:
        text += f" {other} {'waits too' if other in waiting else 'has ended'}."
    return text


def explain(partition, partitions):
    """Where a partition waits and what would release it; partitions are those that wait."""
    text = f"{partition.name} in {partition.where()}"
    if partition.waits is None:
        return text
    barrier, phase = partition.waits
    name = name_of(barrier, partition)
    return (
        f"{text}\n    It waits for the end of phase {phase} of {name}, which needs"
        f" {missing(barrier)} (it counts {barrier.count})."
        f"\n    {history(barrier, partitions)}"
    )
