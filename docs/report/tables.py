"""The parts of tables: lines, cells, and the sentence about where and when they were measured."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flash_versions.bench.results import Document, Row, label, mask, rate_of, ratio, rows_of

Group = dict[Any, Row]  # the rows of a line, by what tells its columns apart


def markdown(header: Iterable[str], body: Iterable[Iterable[str]], *notes: str) -> str:
    """A table, whose first column is text and the others are numbers; and sentences below it."""
    header = [*header]
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *body]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{' '.join(note for note in notes if note)}\n"


def pivot(
    title: str,
    groups: Mapping[str, Any],
    columns: Iterable,
    cell: Callable[[Any, Any], str | None],
    *notes: str,
) -> str:
    """A table with a line for each group and a column for each name; a cell that is None or empty
    is a dash. Columns are names, of which `label` makes titles, or {name: title}.
    """
    titles = columns if isinstance(columns, Mapping) else {x: label(x) for x in columns}
    body = [[name, *(cell(group, x) or "-" for x in titles)] for name, group in groups.items()]
    return markdown([title, *titles.values()], body, *notes)


def where(row: Row) -> str:
    """The name of a shape in a table."""
    return f"D={row['D']} {mask(row)}, S={row['N']}"


def rate(group: Group, name: str, base: str | None = None, of: str = "") -> str | None:
    """A rate, and its ratio to that of `base` if that is known, followed by `of`; None if it was
    not measured.
    """
    if not (own := rate_of(group, name)):
        return None
    times = ratio(group, name, base) if base else None
    return f"{own:.0f} ({times:.2f} x{of})" if times else f"{own:.0f}"


def spread(values: Iterable[float]) -> str:
    """Geometric mean, least and largest."""
    if not (found := [*values]):
        return "-"
    return f"{statistics.geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def provenance(document: Document, suite: str) -> str:
    """One sentence on where, when and how the numbers of a suite were measured."""
    rounds = document["suites"][suite]["protocol"]["rounds"]
    rows = rows_of(document, suite)
    precisions = " and ".join(dict.fromkeys(row.get("precision", "bf16") for row in rows))
    libraries = ("flash-attn-4", "cudnn-frontend") if "fp8" in precisions else ("flash-attn-4",)
    about = source(document, suite, *libraries)[:-1]
    return f"{about}; {precisions}, median of {rounds} rounds, cold L2."


def source(document: Document, suite: str, *libraries: str) -> str:
    """GPU, versions, date and commit of a suite; of other libraries those that were installed."""
    about = document["suites"][suite]
    machine = about["machine"]
    parts = [machine["gpu"]]
    for name in ("torch", "triton", "cudnn", *libraries):
        if (which := machine.get(name, "not installed")) != "not installed":
            parts.append(f"{'cuDNN' if name == 'cudnn' else name} {which}")
    return ", ".join([*parts, about["date"], f"commit {about['commit'][:7]}."])
