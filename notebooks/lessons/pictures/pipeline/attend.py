"""The loop of FA3's consumer on Hopper, line by line: what each line does, and when.

    attend.beside_time()  the lines beside two iterations of one consumer, simulated
    attend.explained()    the lines and what each of them does, as a table

The lines are those of `fold_block` in flash_versions/lessons/fa3_hopper.py. A line that is not in
`LINES` is an error.
"""

from functools import cache
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lessons.kernels.source import find_plain
from lessons.pictures.pipeline.gantt import draw_tasks, legend, simulate
from lessons.pictures.pipeline.simulator import TENSOR_CORE, Task
from lessons.pictures.style import GREY, INK, styled

BLOCKS, FIRST = 8, 3  # of the simulated tile; the first of the two iterations that are shown
ITERATIONS = 2
CONSUMER = 0
WAITS: dict[str, Any] = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.6}


class Line(NamedTuple):
    """A line of the loop: what it does, in words, and the simulator's tasks that it is."""

    does: str
    tasks: tuple[str, ...] = ()


LINES = {
    "before, stage = stage, stage.next()": Line(
        "`stage` says in which slot of a ring a block is. `before` keeps the slot of the previous "
        "block, whose V is still needed. After the last slot comes the first one again, with the "
        "other phase."
    ),
    "rings.k.wait(stage)": Line("Waits until the copy of this block's K has landed.", ("wait K",)),
    "pipeline.named_barrier_sync(CONSUMER)  # wait for the turn": Line(
        "Ping-pong: waits until the other consumer has issued its products.", ("wait turn",)
    ),
    "s_token = multiply_qk(q_tile, rings.k.tile(stage))": Line(
        "Issues S = Q Kᵀ and goes on at once. The **token** says which product has been "
        "issued; the product may not be finished.",
        ("S",),
    ),
    "rings.v.wait(before)": Line(
        "Waits until the copy of the previous block's V has landed.", ("wait V",)
    ),
    "acc_token = multiply_pv(p, rings.v.tile(before), acc)": Line(
        "Issues acc + P V of the previous block, and goes on at once.", ("PV",)
    ),
    "pipeline.named_barrier_arrive(CONSUMER, 2)  # give the turn away": Line(
        "Ping-pong: now the other consumer may issue its products."
    ),
    "s = hopper.warpgroup_mma_wait(1, deps=[s_token])": Line(
        "Waits until at most **one** issued product is unfinished. Products finish in the order in "
        "which they were issued, so S is there, and P V may still be running.",
        ("wait S",),
    ),
    "rings.k.release(stage)": Line(
        "Arrives at the slot's `empty` barrier: this consumer has read K."
    ),
    "if block >= tile.full_end:": Line("Only a block that the causal mask cuts is masked."),
    "s = masked(s, block, last_key)": Line(""),
    "p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale)": Line(
        "The online softmax of this block, as in FA2.", ("softmax", "exp")
    ),
    "acc = hopper.warpgroup_mma_wait(0, deps=[acc_token])": Line(
        "Waits until **no** issued product is unfinished: acc has P V of the previous block.",
        ("wait PV",),
    ),
    "rings.v.release(before)": Line("This consumer has read the previous block's V."),
    "p = rounded(p, rings.v.tile(stage), acc)": Line(
        "`rounded` rounds P to V's type. P V reads P from registers, and each thread has the "
        "numbers that it has to contribute, so nothing moves.",
        ("correct",),
    ),
    "return p, acc * per_row(alpha, acc)[:, None], row_max, row_sum, stage": Line(
        "Rescales acc. `alpha` has one number for each row. S and acc differ in width, so the "
        "compiler has a layout for the rows of each, and `per_row` changes alpha's from one to the "
        "other. Each thread has the same rows in both, so no data moves.",
        ("correct",),
    ),
}


@cache
def loop() -> tuple[str, ...]:
    """The lines of `fold_block`, the body of the loop, without their indentation.

    Raises:
        ValueError: a line has no explanation here.
    """
    _, text = find_plain("fa3-hopper", "forward.py", "fold_block")
    start = next(i for i, line in enumerate(text) if line.startswith("):")) + 1
    found = tuple(line[indent(text[start]) :] for line in text[start:])
    if unknown := [line for line in found if line.strip() not in LINES]:
        raise ValueError(f"fold_block has a line that LINES does not have: {unknown[0]}")
    return found


def indent(line: str) -> int:
    """Spaces at the start of a line."""
    return len(line) - len(line.lstrip())


def explained() -> str:
    """A table of the lines, as Markdown."""
    rows = ["| | line | what it does |", "| --: | --- | --- |"]
    for number, line in enumerate(loop(), 1):
        spaces = "\u2003" * (indent(line) // 4)
        code = line.strip().replace("|", "\\|")
        rows.append(f"| {number} | {spaces}`{code}` | {LINES[line.strip()].does} |")
    return "\n".join(rows)


@cache
def tasks() -> tuple[tuple[Task, ...], tuple[float, ...]]:
    """(tasks, where iterations begin) of the iterations that are shown, of consumer 0 and of the
    tensor core, in cycles from the start of the first one.
    """
    found = simulate("both", BLOCKS)
    begins = [
        t.start for t in found if (t.unit, t.what, t.consumer) == (TENSOR_CORE, "S", CONSUMER)
    ]
    begins = begins[FIRST : FIRST + ITERATIONS + 1]
    shown = [
        task._replace(start=max(task.start, begins[0]), end=min(task.end, begins[-1]))
        for task in found
        if task.end > begins[0] and task.start < begins[-1]
        if task.unit == TENSOR_CORE or task.consumer == CONSUMER
    ]
    zero = begins[0]
    return (
        tuple(t._replace(start=t.start - zero, end=t.end - zero) for t in shown),
        tuple(begin - zero for begin in begins),
    )


@styled
def beside_time() -> Figure:
    """The lines beside a time axis: two iterations of a consumer, with the tensor core above."""
    found, begins = tasks()
    lines = loop()
    figure = Figure(figsize=(11.0, 5.9), layout="constrained")
    ax = figure.subplots()
    draw_tasks(ax, -1, [t for t in found if t.unit == TENSOR_CORE], 0, BLOCKS)
    for number, line in enumerate(lines):
        mine = [t for t in found if t.consumer == CONSUMER and t.what in LINES[line.strip()].tasks]
        waits = [t for t in mine if t.what.startswith("wait")]
        spans = [(task.start, task.end - task.start) for task in waits]
        ax.broken_barh(spans, (number - 0.36, 0.72), **WAITS)
        draw_tasks(ax, number, [t for t in mine if t not in waits], 0, BLOCKS)
    for begin in begins[:-1]:
        ax.axvline(begin, color=INK, linewidth=1, linestyle=":")
    labels = [f"{number:2}  {line}" for number, line in enumerate(lines, 1)]
    width = max(map(len, labels))
    labels = ["    tensor core, of both consumers", *labels]
    ax.set_yticks(range(-1, len(lines)), [label.ljust(width) for label in labels])
    for label in ax.get_yticklabels():
        label.set(family="monospace", fontsize=7.5)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(lines) - 0.4, -1.6)
    ax.set_xlim(0, begins[-1])
    ax.set_xlabel("cycles, two iterations of consumer 0")
    legend(figure, Patch(**WAITS, label="the line waits"))
    return figure
