"""Draw the timeline of a launch from a trace: the states of every role of one program over time.

A trace is a JSON document in docs/results with, for some programs, the intervals of each role:

    {"schema": 1, "commit": ..., "source": ..., "machine": ..., "what": {the shape, ...},
     "programs": [{"program": 0, "roles": {"loader": [[state, start, end], ...], ...}}]}

start and end are cycles of the program's multiprocessor. The figure shows the first program twice:
from its start until it has stored a few tiles, and a close-up of where it first changes tiles.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

TILES = 3  # that the first panel shows
CLOSE_UP = 0.1  # of the first panel, in the second one
STORER = "storer"  # the role whose intervals are the ends of tiles
WAITING = ("await", "idle")  # how the names of states begin in which a role does nothing
WAIT_COLOUR = "#dddddd"
# Okabe and Ito's colours, and three that go with them.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#332288"]
COLOURS += ["#882255", "#44AA99"]

Interval = tuple[str, float, float]  # state, start, end
Roles = dict[str, list[Interval]]
Window = tuple[float, float]  # the part of the time axis that a panel shows


def timeline_data(trace: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the figure shows of a trace: roles by panel, in cycles from the program's start; None
    without one.
    """
    if trace is None or not trace["programs"]:
        return None
    program = trace["programs"][0]
    roles = {role: merged(found) for role, found in program["roles"].items()}
    first = min(start for found in roles.values() for _, start, _ in found)
    roles = {
        role: [(state, float(a - first), float(b - first)) for state, a, b in found]
        for role, found in roles.items()
    }
    whole, close = windows(roles)
    what = ", ".join(f"{key}={value}" for key, value in trace["what"].items())
    return {
        "title": f"Program {program['program']}: {what}",
        "unit": "cycles",
        "states": list(dict.fromkeys(s for found in roles.values() for s, _, _ in found)),
        "panels": {
            "a few tiles": {"window": whole, "roles": clipped(roles, whole)},
            "where the first tile ends": {"window": close, "roles": clipped(roles, close)},
        },
    }


def merged(intervals: list[list[Any]]) -> list[Interval]:
    """Intervals in their order, those of one state without a gap between them as one."""
    found: list[Interval] = []
    for state, start, end in sorted(intervals, key=lambda interval: interval[1]):
        if found and found[-1][0] == state and found[-1][2] == start:
            found[-1] = (state, found[-1][1], end)
        else:
            found.append((state, start, end))
    return found


def windows(roles: Roles) -> tuple[Window, Window]:
    """From the start to the end of the last tile that is shown; and a part of that around the end
    of the first one.
    """
    stored = [end for state, _, end in roles[STORER] if not state.startswith(WAITING)]
    end, half = stored[:TILES][-1], CLOSE_UP * stored[:TILES][-1] / 2
    return (0.0, end), (max(stored[0] - half, 0.0), stored[0] + half)


def clipped(roles: Roles, window: Window) -> Roles:
    """What is to be seen of roles in a window."""
    first, last = window
    return {
        role: [
            (state, round(max(start, first), 4), round(min(end, last), 4))
            for state, start, end in intervals
            if start < last and end > first
        ]
        for role, intervals in roles.items()
    }


def draw_timeline(data: dict[str, Any]) -> Figure:
    """A row for each role, a bar for each interval in the colour of its state."""
    panels = data["panels"]
    rows = max(len(panel["roles"]) for panel in panels.values())
    figure = Figure(figsize=(10.5, len(panels) * (0.42 * rows + 0.9) + 0.8), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False).flatten()
    colours = colours_of(data["states"])
    for ax, (name, panel) in zip(axes, panels.items()):
        draw_panel(ax, panel, colours)
        ax.set_title(name, loc="left")
        ax.set_xlabel(f"{data['unit']} since the program began")
    labels = {c: "waiting" if c == WAIT_COLOUR else state for state, c in colours.items()}
    handles = [Patch(color=colour, label=state) for colour, state in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(data["title"], x=0.01, ha="left")
    return figure


def draw_panel(ax: Axes, panel: dict[str, Any], colours: dict[str, str]) -> None:
    """The roles of one window, the first on top."""
    for row, intervals in enumerate(panel["roles"].values()):
        for state, colour in colours.items():
            bars = [(start, end - start) for s, start, end in intervals if s == state]
            if bars:
                ax.broken_barh(bars, (row - 0.38, 0.76), color=colour, linewidth=0, gid=state)
    roles = list(panel["roles"])
    ax.set_yticks(range(len(roles)), roles)
    ax.invert_yaxis()
    ax.set_xlim(*panel["window"])
    ax.grid(visible=False, axis="y")


def colours_of(states: list[str]) -> dict[str, str]:
    """A colour for each state; all in which nothing is done have the same."""
    active = [state for state in states if not state.startswith(WAITING)]
    found = {state: COLOURS[i % len(COLOURS)] for i, state in enumerate(active)}
    return {state: found.get(state, WAIT_COLOUR) for state in states}
