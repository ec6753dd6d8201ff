"""Read the committed results, and look up rows in them.

The folders of docs/results say what was measured. They hold JSON documents of `bench`, of
tests/benchmarks and of a trace; `report` makes tables of them, `plot` figures.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from flash_versions.bench.peers import PEERS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
SHAPE = ("B", "H", "Hkv", "M", "N", "D", "causal")

Row = dict[str, Any]
# {"rows": all rows, "suites": {suite: when, where and how it was measured}, "trace": of roles}
Document = dict[str, Any]


def merged(measured: Iterable[dict[str, Any]]) -> Document:
    """What was measured at several times as one document: rows, which name their suite, and a
    trace, which has programs in the place of rows.

    Raises:
        ValueError: a suite, or the trace, is in two of them, and there is no telling which counts.
    """
    rows: list[Row] = []
    about: dict[str, dict[str, Any]] = {}
    traces = []
    for document in measured:
        if "programs" in document:
            traces.append(document)
            continue
        for suite in dict.fromkeys(row["suite"] for row in document["rows"]):
            if suite in about:
                raise ValueError(
                    f"suite {suite!r} is in two files of results, of commits "
                    f"{about[suite]['commit']} and {document['commit']}; remove its rows from one."
                )
            about[suite] = {key: value for key, value in document.items() if key != "rows"}
        rows += document["rows"]
    if len(traces) > 1:
        commits = " and ".join(str(trace.get("commit")) for trace in traces)
        raise ValueError(f"there are {len(traces)} traces, of commits {commits}; keep one.")
    return {"rows": rows, "suites": about, "trace": traces[0] if traces else None}


def read_results() -> Document:
    """Everything in the folders of docs/results."""
    return merged(json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json")))


def rows_of(document: Document, suite: str) -> list[Row]:
    """The rows of a suite."""
    return [row for row in document["rows"] if row["suite"] == suite]


def lines(
    document: Document, suite: str, line: str | Callable[[Row], Any], by: str = "version"
) -> dict[Any, dict[Any, Row]]:
    """The rows of a suite by the line of a table that they belong to, a field or a function of a
    row, and by the field that tells the columns apart; in the order of measurement.
    """
    found: dict[Any, dict[Any, Row]] = {}
    for row in rows_of(document, suite):
        place = row.get(line) if isinstance(line, str) else line(row)
        found.setdefault(place, {})[row[by]] = row
    return found


def shapes(document: Document, suite: str) -> dict[tuple, dict[str, Row]]:
    """Rows of a suite as {shape: {name: row}}, in the order of measurement."""
    return lines(document, suite, lambda row: tuple(row[key] for key in SHAPE))


def names(document: Document, suite: str) -> list[str]:
    """The competitors of a suite: the versions in the order of measurement, then the peers."""
    found = dict.fromkeys(row["version"] for row in rows_of(document, suite))
    return [n for n in found if n not in PEERS] + [n for n in PEERS if n in found]


def label(name: str) -> str:
    """The title of a competitor's column."""
    return PEERS[name].label if name in PEERS else name


def mask(row: Row) -> str:
    """A row's mask: "causal" or "full"."""
    return "causal" if row["causal"] else "full"


def any_row(group: dict[str, Row]) -> Row:
    """Any row of a group, for the fields that all of them share."""
    return next(iter(group.values()))


def rate_of(group: dict[Any, Row], name: str) -> float | None:
    """TFLOP/s of one competitor on one shape; None if it was not measured there."""
    return group[name].get("tflops") if name in group else None


def ratio(group: dict[Any, Row], name: str, base: str) -> float | None:
    """How many times another's rate; None if one of them was not measured."""
    own, other = rate_of(group, name), rate_of(group, base)
    return own / other if own and other else None


def ablated(groups: Iterable[dict[str, Row]]) -> dict[str, dict[str, str]]:
    """{version: {name of a competitor: what is changed in it}}, of an ablation's rows."""
    found: dict[str, dict[str, str]] = {}
    for group in groups:
        for row in group.values():
            if "of" in row:
                members = found.setdefault(row["of"], {})
                if row["variant"]:
                    members[row["version"]] = row["variant"]
    return found


def ablation_ratios(
    document: Document, suite: str = "ablation", peer: str = "cudnn"
) -> dict[str, dict[str, dict[str, float]]] | None:
    """{version: {panel: {variant: ratio}}}: geometric means over the lengths of the ratio to the
    version's own rate of the variants', of the versions' before it and of a peer's.
    """
    groups = list(shapes(document, suite).values())
    variants = ablated(groups)
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}
    for group, (number, (version, members)) in product(groups, enumerate(variants.items())):
        row = any_row(group)
        for name in (*members, *list(variants)[:number], peer) if members else ():
            if times := ratio(group, name, version):
                panel = ratios.setdefault(version, {}).setdefault(f"D={row['D']} {mask(row)}", {})
                panel.setdefault(members.get(name, label(name)), []).append(times)
    return {
        version: {
            panel: {what: statistics.geometric_mean(x) for what, x in found.items()}
            for panel, found in panels.items()
        }
        for version, panels in ratios.items()
    } or None
