"""The parts of tables: cells, rows, and the sentence about where and when they were measured."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from flash_versions.bench.results import Document, Row, any_row, label, mask, rate_of, shapes


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pivot(
    title: str,
    groups: Mapping[str, Any],
    columns: Iterable[str],
    cell: Callable[[Any, str], str | None],
    titles: Mapping[str, str] | None = None,
) -> str:
    """A table with a line for each group and a column for each name; a cell that is None or empty
    is a dash. `titles` names columns that have another title than `label` gives them.
    """
    columns = list(columns)
    body = [[name, *(cell(group, x) or "-" for x in columns)] for name, group in groups.items()]
    return markdown([title, *((titles or {}).get(x) or label(x) for x in columns)], body)


def grouped(document: Document, suite: str, *keys: str, by: str) -> dict[Any, dict[Any, Row]]:
    """The rows of a suite as {values of the keys: {value of `by`: row}}; of one key its value."""
    found: dict[Hashable, dict[Any, Row]] = {}
    for row in document["rows"]:
        if row["suite"] == suite:
            place = tuple(row.get(key) for key in keys)
            found.setdefault(place if len(keys) > 1 else place[0], {})[row[by]] = row
    return found


def by_shape(document: Document, suite: str) -> dict[str, dict[str, Row]]:
    """The groups of a suite, by the name of their shape in a table."""
    return {where(any_row(group)): group for group in shapes(document, suite).values()}


def where(row: Row) -> str:
    """The name of a shape in a table; in the suite "seeds" batch and heads belong to it."""
    few = f"B={row['B']}, H={row['H']}, " if row["suite"] == "seeds" else ""
    return f"{few}D={row['D']} {mask(row)}, S={row['N']}"


def rate(group: dict[str, Row], name: str, base: str | None = None) -> str | None:
    """A rate, and its ratio to that of `base` if that is known; None if it was not measured."""
    own, other = rate_of(group, name), rate_of(group, base) if base else None
    if not own:
        return None
    return f"{own:.0f} ({own / other:.2f} x)" if other else f"{own:.0f}"


def provenance(document: Document, suite: str) -> str:
    """One sentence on where, when and how the numbers of a suite were measured."""
    protocol = document["suites"][suite]["protocol"]
    rows = [row for row in document["rows"] if row["suite"] == suite]
    precisions = " and ".join(dict.fromkeys(row.get("precision", "bf16") for row in rows))
    libraries = ("flash-attn-4", "cudnn-frontend") if "fp8" in precisions else ("flash-attn-4",)
    return (
        f"{where_and_when(document, suite, libraries)}; {precisions}, median of "
        f"{protocol['rounds']} rounds in which the competitors take turns, cold L2."
    )


def where_and_when(document: Document, suite: str, libraries: Iterable[str] = ()) -> str:
    """GPU, versions, date and commit of a suite; of other libraries those that were installed."""
    about = document["suites"][suite]
    machine = about["machine"]
    parts = [machine["gpu"]]
    for name in ("torch", "triton", "cudnn", *libraries):
        if (which := machine.get(name, "not installed")) != "not installed":
            parts.append(f"{'cuDNN' if name == 'cudnn' else name} {which}")
    return ", ".join([*parts, about["date"], f"commit {about['commit'][:7]}"])
