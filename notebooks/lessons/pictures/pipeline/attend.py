"""The loop of FA3's consumer on Hopper, line by line: what each line does, and when.

    attend.beside_time()  the lines beside two iterations of one consumer, simulated
    attend.explained()    the lines and what each of them does, as a table

The lines are those of `fold_block` in flash_versions/lessons/fa3_hopper.py. A line that is not in
`LINES` is an error.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lessons.kernels.source import find_plain
from lessons.pictures.pipeline.gantt import CONSUMER_COLOURS, WORK_COLOURS, measured_durations
from lessons.pictures.pipeline.simulator import TENSOR_CORE, Logged, Task, simulate
from lessons.pictures.style import GREY, INK, styled

BLOCKS, FIRST = 8, 3  # of the simulated tile; the first of the two iterations that are shown
ITERATIONS = 2
CONSUMER = 0
WAITS = "waits"


class Line(NamedTuple):
    """A line of the loop.

    Attributes:
        does: in words.
        event: that it waits for, or how that event of the simulator begins.
        work: of the simulator's tasks that this line is.
        product: that it issues.
    """

    does: str
    event: tuple[str, ...] = ()
    work: tuple[str, ...] = ()
    product: str = ""


LINES = {
    "before, stage = stage, stage.next()": Line(
        "`stage` says in which slot of a ring a block is. `before` keeps the slot of the previous "
        "block, whose V is still needed. After the last slot comes the first one again, with the "
        "other phase."
    ),
    "rings.k.wait(stage)": Line("Waits until the copy of this block's K has landed.", ("is", "K")),
    "pipeline.named_barrier_sync(CONSUMER)  # wait for the turn": Line(
        "Ping-pong: waits until the other consumer has issued its products.", ("turn",)
    ),
    "s_token = multiply_qk(q_tile, rings.k.tile(stage))": Line(
        "Issues S = Q Kᵀ and goes on at once. The **token** says which product has been "
        "issued; the product may not be finished.",
        product="S",
    ),
    "rings.v.wait(before)": Line(
        "Waits until the copy of the previous block's V has landed.", ("is", "V")
    ),
    "acc_token = multiply_pv(p, rings.v.tile(before), acc)": Line(
        "Issues acc + P V of the previous block, and goes on at once.", product="PV"
    ),
    "pipeline.named_barrier_arrive(CONSUMER, 2)  # give the turn away": Line(
        "Ping-pong: now the other consumer may issue its products."
    ),
    "s = hopper.warpgroup_mma_wait(1, deps=[s_token])": Line(
        "Waits until at most **one** issued product is unfinished. Products finish in the order in "
        "which they were issued, so S is there, and P V may still be running.",
        ("done", "S"),
    ),
    "rings.k.release(stage)": Line(
        "Arrives at the slot's `empty` barrier: this consumer has read K."
    ),
    "if block >= tile.full_end:": Line("Only a block that the causal mask cuts is masked."),
    "s = masked(s, block, last_key)": Line(""),
    "p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale)": Line(
        "The online softmax of this block, as in FA2.", work=("softmax", "exp")
    ),
    "acc = hopper.warpgroup_mma_wait(0, deps=[acc_token])": Line(
        "Waits until **no** issued product is unfinished: acc has P V of the previous block.",
        ("done", "PV"),
    ),
    "rings.v.release(before)": Line("This consumer has read the previous block's V."),
    "p = rounded(p, rings.v.tile(stage), acc)": Line(
        "`rounded` rounds P to V's type. P V reads P from registers, and each thread has the "
        "numbers that it has to contribute, so nothing moves.",
        work=("correct",),
    ),
    "return p, acc * per_row(alpha, acc)[:, None], row_max, row_sum, stage": Line(
        "Rescales acc. `alpha` has one number for each row. S and acc differ in width, so the "
        "compiler has a layout for the rows of each, and `per_row` changes alpha's from one to the "
        "other. Each thread has the same rows in both, so no data moves.",
        work=("correct",),
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


class Bar(NamedTuple):
    """When a line works, waits, or has a product at the tensor cores."""

    line: int
    kind: str  # WAITS, a product ("S", "PV"), or a key of WORK_COLOURS
    block: int  # as the simulator counts them
    start: float
    end: float


@cache
def bars() -> tuple[tuple[Bar, ...], tuple[Task, ...], tuple[float, ...]]:
    """(bars of the lines, the tensor core's tasks, where iterations begin) of one consumer, in
    cycles from the start of the first iteration that is shown.
    """
    log: list[Logged] = []
    tasks = simulate(measured_durations(), BLOCKS, log=log)
    mine = [entry for entry in log if entry.consumer == CONSUMER]
    waits = [x for x in mine if x.request[0] == "wait"]
    begins = [x.start for x in waits if x.request[1][:2] == ("is", "K")]
    zero, end = begins[FIRST], begins[FIRST + ITERATIONS]
    found = [
        bar._replace(start=bar.start - zero, end=min(bar.end, end) - zero)
        for bar in every_bar(mine, tasks)
        if zero <= bar.start < end and bar.end > bar.start
    ]
    core = [
        t._replace(start=max(t.start, zero) - zero, end=min(t.end, end) - zero)
        for t in tasks
        if t.unit == TENSOR_CORE and t.end > zero and t.start < end
    ]
    starts = [begin - zero for begin in begins[FIRST : FIRST + ITERATIONS + 1]]
    return tuple(found), tuple(core), tuple(starts)


def every_bar(mine: list[Logged], tasks: list[Task]) -> Iterator[Bar]:
    """The bars of all iterations of a consumer."""
    for number, text in enumerate(loop()):
        line = LINES[text.strip()]
        for task in tasks:
            product = task.unit == TENSOR_CORE and task.what == line.product
            if task.consumer == CONSUMER and (product or task.what in line.work):
                yield Bar(number, task.what, task.block, task.start, task.end)
        for entry in mine:
            event = entry.request[1]
            if line.event and entry.request[0] == "wait" and event[: len(line.event)] == line.event:
                yield Bar(number, WAITS, event[-1], entry.start, entry.end)


@styled
def beside_time() -> Figure:
    """The lines beside a time axis: two iterations of a consumer, with the tensor cores above."""
    found, core, starts = bars()
    lines = loop()
    figure = Figure(figsize=(11.0, 5.9), layout="constrained")
    ax = figure.subplots()
    for task in core:
        name = named(task.what, task.block)
        draw_bar(ax, -1.3, CONSUMER_COLOURS[task.consumer or 0], task.start, task.end, name)
    colours = {"S": CONSUMER_COLOURS[CONSUMER], "PV": CONSUMER_COLOURS[CONSUMER], **WORK_COLOURS}
    for bar in found:
        if bar.kind == WAITS:
            ax.broken_barh(
                [(bar.start, bar.end - bar.start)],
                (bar.line - 0.36, 0.72),
                facecolor="white",
                edgecolor=GREY,
                hatch="////",
                linewidth=0.6,
            )
        else:
            name = "" if bar.kind in WORK_COLOURS else named(bar.kind, bar.block)
            draw_bar(ax, bar.line, colours[bar.kind], bar.start, bar.end, name)
    for start in starts[:-1]:
        ax.axvline(start, color=INK, linewidth=1, linestyle=":")
    labels = [f"{number:2}  {line}" for number, line in enumerate(lines, 1)]
    width = max(map(len, labels))
    labels = ["    tensor cores, of both consumers", *labels]
    ax.set_yticks([-1.3, *range(len(lines))], [label.ljust(width) for label in labels])
    for label in ax.get_yticklabels():
        label.set(family="monospace", fontsize=7.5)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(lines) - 0.4, -1.9)
    ax.set_xlim(0, starts[-1])
    ax.set_xlabel("cycles, two iterations of consumer 0")
    kinds = {
        "product of consumer 0": CONSUMER_COLOURS[0],
        "product of consumer 1": CONSUMER_COLOURS[1],
        "maxima, sums": WORK_COLOURS["softmax"],
        "exponentials": WORK_COLOURS["exp"],
        "rescale, round P": WORK_COLOURS["correct"],
    }
    handles = [Patch(color=colour, label=label) for label, colour in kinds.items()]
    waits = Patch(facecolor="white", edgecolor=GREY, hatch="////", label="the line waits")
    figure.legend(
        handles=[*handles, waits], loc="outside lower center", ncols=6, fontsize=8, frameon=False
    )
    return figure


def named(product: str, block: int) -> str:
    """A product with the number that the kernel gives its block: it begins with the last one."""
    return f"{product}{BLOCKS - 1 - block}"


def draw_bar(ax: Axes, row: float, colour: str, start: float, end: float, name: str = "") -> None:
    """A stretch of time in a row, with a name in its middle."""
    ax.broken_barh([(start, end - start)], (row - 0.36, 0.72), facecolor=colour, edgecolor="white")
    middle = (start + end) / 2
    ax.text(middle, row, name, ha="center", va="center", fontsize=7, color="white")
