"""Who works when in FA3: schedules on one axis of time, simulated, and how they were measured.

`simulator.py` has the rules. The durations are of the committed trace, see `measured_durations`.
"""

import statistics
from collections import Counter, defaultdict
from functools import cache

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flash_versions.bench.results import read_results, shapes
from flash_versions.plot.figures import EXP2_PER_TENSOR_FLOP
from lessons.pictures.pipeline.simulator import TENSOR_CORE, Durations, Simulation, Task, total
from lessons.pictures.style import BLUE, GREEN, INK, ORANGE, SKY, VERMILION, styled

ROWS, KEYS = 64, 128  # of a consumer, of a block
EXP2_PER_CYCLE = 16
LOAD = 1570.0  # cycles from asking for a tile to its first product: the shortest of the trace
# name -> (overlap, ping_pong), and the row of the measured ablation with the same switches
VARIANTS = {
    "neither": (False, False),
    "ping-pong only": (False, True),
    "overlap only": (True, False),
    "both": (True, True),
}
ABLATED = {"neither": "neither", "ping-pong only": "no overlap", "overlap only": "no ping-pong"}
APART = 1200.0  # cycles: about half a block
CONSUMER_COLOURS = (BLUE, ORANGE)
NAMED = 300  # cycles of a product that is wide enough for its name
WORK_COLOURS = {"softmax": SKY, "exp": GREEN, "correct": VERMILION}
MEANING = {
    "product of consumer 0": CONSUMER_COLOURS[0],
    "product of consumer 1": CONSUMER_COLOURS[1],
    "maxima, sums": WORK_COLOURS["softmax"],
    "exponentials": WORK_COLOURS["exp"],
    "rescale, round P": WORK_COLOURS["correct"],
}


@cache
def measured_durations() -> Durations:
    """Cycles for one block and one consumer, from docs/results/forward/h200-trace.json.

    The trace has the states of roles, not of units. So a product and the exponentials are what the
    hardware needs at its peak (4096 FLOP and 16 exponentials a cycle); the rest is traced:

    answer: the shortest `score` of a tile's first block, where only S runs, less the product;
    scores: the median `softmax` of a tile's first block, less the exponentials;
    correct: the median `correct` of the later blocks.
    """
    trace = read_results()["trace"]
    product = ROWS * KEYS * 2 * trace["what"]["D"] * EXP2_PER_TENSOR_FLOP / EXP2_PER_CYCLE
    exponentials = ROWS * KEYS / EXP2_PER_CYCLE
    first: defaultdict[str, list[float]] = defaultdict(list)  # of a tile's first block
    later: defaultdict[str, list[float]] = defaultdict(list)
    for program in trace["programs"]:
        for role, intervals in program["roles"].items():
            seen: Counter[str] = Counter()  # of this tile
            for state, start, end in intervals if role.startswith("consumer") else ():
                if state == "await":
                    seen.clear()
                (later if seen[state] else first)[state].append(end - start)
                seen[state] += 1
    return Durations(
        load=LOAD,
        product=product,
        answer=min(first["score"]) - product,
        scores=statistics.median(first["softmax"]) - exponentials,
        exponentials=exponentials,
        correct=statistics.median(later["correct"]),
    )


def simulate(variant: str, blocks: int, apart: float = 0.0) -> list[Task]:
    """The tasks of a variant over so many blocks, with the measured durations."""
    return Simulation(measured_durations(), blocks, *VARIANTS[variant], apart).run()


@styled
def schedules(blocks: int = 4) -> Figure:
    """The four variants on one axis of time: the tensor core in the colours of the consumers, the
    consumers in the colours of their work.
    """
    runs = {name: simulate(name, blocks) for name in VARIANTS}
    figure = Figure(figsize=(9.5, 7.2), layout="constrained")
    longest = max(map(total, runs.values()))
    axes = figure.subplots(len(runs), 1, sharex=True)
    for ax, (name, tasks) in zip(axes, runs.items()):
        zero = min(t.start for t in tasks if t.unit == TENSOR_CORE)
        draw_tasks(ax, 0, [t for t in tasks if t.unit == TENSOR_CORE], zero, blocks)
        for consumer in (0, 1):
            work = [t for t in tasks if t.consumer == consumer and t.what in WORK_COLOURS]
            draw_tasks(ax, 1 + consumer, work, zero, blocks)
        busy = sum(t.end - t.start for t in tasks if t.unit == TENSOR_CORE) / total(tasks)
        ax.axvline(total(tasks), color=INK, linewidth=1)
        ax.set_title(
            f"{name}: {total(tasks):.0f} cycles, tensor core busy {100 * busy:.0f} %", loc="left"
        )
        ax.set_yticks(range(3), [TENSOR_CORE, "consumer 0", "consumer 1"])
        ax.set_ylim(2.6, -0.6)
        ax.set_xlim(-longest * 0.01, longest * 1.01)
        ax.grid(visible=False, axis="y")
    axes[-1].set_xlabel("cycles since the first product")
    legend(figure)
    return figure


def draw_tasks(ax: Axes, row: float, tasks: list[Task], zero: float, blocks: int) -> None:
    """Stretches of time in a row; a product that is wide enough has its name in the middle."""
    spans = [(task.start - zero, task.end - task.start) for task in tasks]
    colours = [WORK_COLOURS.get(t.what) or CONSUMER_COLOURS[t.consumer or 0] for t in tasks]
    ax.broken_barh(spans, (row - 0.38, 0.76), facecolors=colours)
    for task, (start, length) in zip(tasks, spans):
        if task.unit == TENSOR_CORE and length > NAMED:
            name = f"{task.what}{blocks - 1 - task.block}"  # the kernel begins with the last block
            middle = start + length / 2
            ax.text(middle, row, name, ha="center", va="center", fontsize=7, color="white")
            ax.vlines(start, row - 0.38, row + 0.38, color="white", linewidth=1)


def legend(figure: Figure, *more: Patch) -> None:
    """What the colours say."""
    handles = [*(Patch(color=colour, label=label) for label, colour in MEANING.items()), *more]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)


@cache
def speeds(blocks: int = 16) -> dict[str, dict[str, float]]:
    """Speed of each variant relative to `both`: simulated, twice, and measured at the shape of the
    trace: {series: {variant: ratio}}.
    """
    found = {}
    for series, apart in (("simulated, in step", 0.0), ("simulated, half a block apart", APART)):
        cycles = {name: total(simulate(name, blocks, apart)) for name in VARIANTS}
        found[series] = {name: cycles["both"] / cycles[name] for name in VARIANTS}
    document = read_results()
    what = document["trace"]["what"]
    rates = next(
        {row["variant"]: row["tflops"] for row in group.values() if row.get("of") == "fa3"}
        for shape, group in shapes(document, "ablation").items()
        if (shape[4], shape[5], shape[6]) == (what["S"], what["D"], what["causal"])
    )
    measured = {name: rates[ABLATED.get(name, "")] / rates[""] for name in VARIANTS}
    return found | {"measured on an H200": measured}


def data() -> dict[str, object]:
    """What the committed figure of this module is drawn from."""
    return {name: simulate(name, 4) for name in VARIANTS}
