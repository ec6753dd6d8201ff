"""Who works when: FA3's producer and consumers, simulated and as traced on an H200.

    gantt.schedules()        no overlap, overlap, ping-pong and both, on one axis of time
    gantt.against_measured() what the simulator says of them, beside the measured ablation

`simulator.py` has the rules. The durations are of the committed trace, see `measured_durations`.
"""

import statistics
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flash_versions.bench.results import read_results, shapes
from flash_versions.plot.figures import EXP2_PER_TENSOR_FLOP
from lessons.pictures.pipeline.simulator import TENSOR_CORE, Durations, Task, simulate, total
from lessons.pictures.style import BLUE, GREEN, INK, ORANGE, SKY, VERMILION, styled

ROWS, KEYS = 64, 128  # of a consumer, of a block
EXP2_PER_CYCLE = 16
# name -> (overlap, ping_pong), and the row of the measured ablation with the same switches
VARIANTS = {
    "neither": (False, False),
    "ping-pong only": (False, True),
    "overlap only": (True, False),
    "both": (True, True),
}
ABLATED = {
    "neither": "neither",
    "ping-pong only": "no overlap",
    "overlap only": "no ping-pong",
    "both": "",
}
APART = 1200.0  # cycles: about half a block
CONSUMER_COLOURS = (BLUE, ORANGE)
NAMED = 300  # cycles of a product that is wide enough for its name
WORK_COLOURS = {"softmax": SKY, "exp": GREEN, "correct": VERMILION}
TRACED = ("score", "softmax", "correct")  # the states of a traced consumer that are shown


@cache
def measured_durations() -> Durations:
    """Cycles for one block and one consumer, from docs/results/forward/h200-trace.json.

    The trace has the states of roles, not of units. So a product and the exponentials are what the
    hardware needs at its peak (4096 FLOP and 16 exponentials a cycle); the rest is traced:

    answer: the shortest first `score`, in which nothing but S runs, less the product;
    scores: the median first `softmax`, less the exponentials;
    correct: the median `correct`;
    load: the shortest time from asking for a K to the product with it, an upper bound.
    """
    trace = read_results()["trace"]
    head_dim = trace["what"]["D"]
    product = ROWS * KEYS * 2 * head_dim * EXP2_PER_TENSOR_FLOP / EXP2_PER_CYCLE
    exponentials = ROWS * KEYS / EXP2_PER_CYCLE
    first: dict[str, list[float]] = {}
    later: dict[str, list[float]] = {}
    loads = []
    for program in trace["programs"]:
        asked = by_block(program["roles"]["loader"], ("load",), "claim")
        for role, intervals in program["roles"].items():
            if not role.startswith("consumer"):
                continue
            for (_, block, state), (start, end) in by_block(intervals, TRACED, "await").items():
                (later if block else first).setdefault(state, []).append(end - start)
            loads += [
                start - asked[tile, block, "load"][0]
                for (tile, block, state), (start, _) in by_block(
                    intervals, ("score",), "await"
                ).items()
                if block > 2  # slots were free: what was asked for was loaded at once
            ]
    return Durations(
        load=min(loads),
        product=product,
        answer=min(first["score"]) - product,
        scores=statistics.median(first["softmax"]) - exponentials,
        exponentials=exponentials,
        correct=statistics.median(later["correct"]),
    )


def by_block(
    intervals: list[Any], states: Any, begins: str
) -> dict[tuple[int, int, str], tuple[float, float]]:
    """{(tile, block, state): (start, end)} of a traced role; a tile begins with `begins`."""
    found: dict[tuple[int, int, str], tuple[float, float]] = {}
    tile, seen = -1, dict.fromkeys(states, 0)
    for state, start, end in sorted(intervals, key=lambda interval: interval[1]):
        if state == begins:
            tile, seen = tile + 1, dict.fromkeys(states, 0)
        if state in seen:
            found[tile, seen[state], state] = (start, end)
            seen[state] += 1
    return found


def totals(
    durations: Durations | None = None, blocks: int = 16, apart: float = 0.0
) -> dict[str, float]:
    """Cycles of a tile of so many blocks, from its first product on: {variant: cycles}."""
    durations = durations or measured_durations()
    return {
        name: total(simulate(durations, blocks, *switches, apart=apart))
        for name, switches in VARIANTS.items()
    }


@styled
def schedules(durations: Durations | None = None, blocks: int = 4) -> Figure:
    """The four variants on one axis of time: the tensor core in the colours of the consumers, the
    consumers in the colours of their work.
    """
    durations = durations or measured_durations()
    runs = {name: simulate(durations, blocks, *s) for name, s in VARIANTS.items()}
    figure = Figure(figsize=(9.5, 7.2), layout="constrained")
    axes = figure.subplots(len(runs), 1, sharex=True)
    longest = max(map(total, runs.values()))
    for ax, (name, tasks) in zip(axes, runs.items()):
        zero = min(t.start for t in tasks if t.unit == TENSOR_CORE)
        draw_program(ax, tasks, blocks - 1, zero)
        busy = sum(t.end - t.start for t in tasks if t.unit == TENSOR_CORE) / total(tasks)
        ax.axvline(total(tasks), color=INK, linewidth=1)
        ax.set_title(
            f"{name}: {total(tasks):.0f} cycles, tensor core busy {100 * busy:.0f} %", loc="left"
        )
        ax.set_xlim(-longest * 0.01, longest * 1.01)
    axes[-1].set_xlabel("cycles since the first product")
    legend(figure)
    return figure


def draw_program(ax: Axes, tasks: list[Task], last: int, zero: float = 0.0) -> None:
    """Three rows: the tensor core, and the two consumers. `last` is the number of the last block of
    keys, with which the kernel begins.
    """
    rows = [TENSOR_CORE, "consumer 0", "consumer 1"]
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for task in tasks:
        start, length = task.start - zero, task.end - task.start
        consumer = task.consumer or 0
        if task.unit == TENSOR_CORE:
            bars.setdefault((0, CONSUMER_COLOURS[consumer]), []).append((start, length))
            if length > NAMED:
                middle = start + length / 2
                ax.text(
                    middle,
                    0,
                    f"{task.what}{last - task.block}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                )
        elif task.what in WORK_COLOURS:
            bars.setdefault((1 + consumer, WORK_COLOURS[task.what]), []).append((start, length))
    for (row, colour), found in bars.items():
        named = row == 0 and found[0][1] > NAMED
        edge = {"edgecolor": "white", "linewidth": 1.0} if named else {"linewidth": 0.0}
        ax.broken_barh(found, (row - 0.4, 0.8), facecolor=colour, **edge)
    ax.set_yticks(range(3), rows)
    ax.set_ylim(2.6, -0.6)
    ax.grid(visible=False, axis="y")


def legend(figure: Figure) -> None:
    """What the colours say."""
    labels = {
        CONSUMER_COLOURS[0]: "products of consumer 0",
        CONSUMER_COLOURS[1]: "products of consumer 1",
        WORK_COLOURS["softmax"]: "maxima, sums",
        WORK_COLOURS["exp"]: "exponentials",
        WORK_COLOURS["correct"]: "rescale, round P",
    }
    handles = [Patch(color=colour, label=label) for colour, label in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)


@cache
def speeds(blocks: int = 16) -> dict[str, dict[str, float]]:
    """Speed of each variant relative to `both`: simulated, twice, and measured at the shape of the
    trace: {series: {variant: ratio}}.
    """
    found = {}
    for series, apart in (("simulated, in step", 0.0), ("simulated, half a block apart", APART)):
        cycles = totals(blocks=blocks, apart=apart)
        found[series] = {name: cycles["both"] / cycles[name] for name in VARIANTS}
    document = read_results()
    what = document["trace"]["what"]
    rates = next(
        {row["variant"]: row["tflops"] for row in group.values() if row.get("of") == "fa3"}
        for shape, group in shapes(document, "ablation").items()
        if (shape[4], shape[5], shape[6]) == (what["S"], what["D"], what["causal"])
    )
    own = rates[""]
    found["measured on an H200"] = {name: rates[ABLATED[name]] / own for name in VARIANTS}
    return found


@styled
def against_measured() -> Figure:
    """Speed of each variant relative to `both`: simulated and measured."""
    found = speeds()
    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    ax = figure.subplots()
    colours, hatches = (SKY, BLUE, VERMILION), ("//", "", "..")
    for number, (series, bars) in enumerate(found.items()):
        places = [place + (number - 1) * 0.27 for place in range(len(bars))]
        drawn = ax.bar(
            places,
            list(bars.values()),
            0.25,
            color=colours[number],
            hatch=hatches[number],
            edgecolor="white",
            label=series,
        )
        ax.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
    ax.set_xticks(range(len(VARIANTS)), list(VARIANTS))
    ax.set_ylabel("speed, both = 1")
    ax.set_ylim(0, 1.15)
    ax.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    ax.set_title("What overlap and ping-pong are worth", loc="left")
    return figure


def data() -> dict[str, object]:
    """What the committed figures of this module are drawn from."""
    durations = measured_durations()
    return {
        "durations": durations,
        "runs": {name: simulate(durations, 4, *s) for name, s in VARIANTS.items()},
    }
