"""Turn measured results into the tables of the documents: `python -m flash_versions.report`.

Every figure in README.md and docs/ stands between two markers that name its table:

    <!-- results: prefill -->  ...  <!-- end -->

and is written by this module from docs/results/*.json, so that prose cannot drift from what was
measured; a test holds the documents against the JSON. Columns are the versions and peers that the
JSON has; a table of which nothing was measured says so.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flash_versions.peers import PEERS
from flash_versions.watch import write

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("design.md", "measuring.md", "progression.md")),
]
BLOCK = re.compile(r"(<!-- results: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHAPE = ("B", "H", "Hkv", "M", "N", "D", "causal")
LONG = 2048  # lengths from here on are what the means are over; below them launches weigh, too

Row = dict[str, Any]
# {"rows": all rows, "suites": {suite: when, where and how it was measured}}
Document = dict[str, Any]


def merged(measured: Iterable[dict[str, Any]]) -> Document:
    """What `bench` has written at several times as one document.

    Raises:
        ValueError: a suite is in two of them, and there is no telling which one counts.
    """
    rows: list[Row] = []
    about: dict[str, dict[str, Any]] = {}
    for document in measured:
        for suite in dict.fromkeys(row["suite"] for row in document["rows"]):
            if suite in about:
                raise ValueError(
                    f"suite {suite!r} is in two files of results, of commits "
                    f"{about[suite]['commit']} and {document['commit']}; remove its rows from one."
                )
            about[suite] = {key: value for key, value in document.items() if key != "rows"}
        rows += document["rows"]
    return {"rows": rows, "suites": about}


def read_results() -> Document:
    """Everything in docs/results."""
    return merged(json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json")))


def shapes(document: Document, suite: str) -> dict[tuple, dict[str, Row]]:
    """Rows of a suite as {shape: {name: row}}, in the order of measurement."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in document["rows"]:
        if row["suite"] == suite:
            found.setdefault(tuple(row[key] for key in SHAPE), {})[row["version"]] = row
    return found


def names(document: Document, suite: str) -> list[str]:
    """Who took part in a suite: the versions in the order of measurement, then the peers."""
    found = dict.fromkeys(row["version"] for row in document["rows"] if row["suite"] == suite)
    return [n for n in found if n not in PEERS] + [n for n in PEERS if n in found]


def label(name: str) -> str:
    """What a column is called."""
    return PEERS[name].label if name in PEERS else name


def mask(row: Row) -> str:
    """Causal or full."""
    return "causal" if row["causal"] else "full"


def any_row(group: dict[str, Row]) -> Row:
    """A row, for what all of a shape have in common."""
    return next(iter(group.values()))


def not_measured(suite: str) -> str:
    """What stands where a table would be."""
    return f'Not measured yet: `python -m flash_versions.bench --suite "{suite}"`.\n'


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(document: Document, suite: str) -> str:
    """One sentence on where, when and how the numbers of a suite were measured."""
    about = document["suites"][suite]
    machine, protocol = about["machine"], about["protocol"]
    others = machine.get("flash-attn-4", "not installed")
    also = "" if others == "not installed" else f"flash-attn-4 {others}, "
    return (
        f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, cuDNN "
        f"{machine['cudnn']}, {also}{about['date']}, commit {about['commit']}; bf16, median "
        f"of {protocol['rounds']} rounds in which the competitors take turns, cold L2."
    )


def rates(
    document: Document,
    suite: str,
    wanted: Callable[[Row], bool] = lambda row: True,
    base: str = "torch fa2",
) -> str:
    """TFLOP/s of everything, and the versions' ratio to a peer in the same rounds."""
    groups = [group for group in shapes(document, suite).values() if wanted(any_row(group))]
    if not groups:
        return not_measured(suite)
    everyone = names(document, suite)
    body = []
    for group in groups:
        row = any_row(group)
        where = f"D={row['D']} {mask(row)}, S={row['N']}"
        if suite == "seeds":
            where = f"B={row['B']}, H={row['H']}, {where}"
        cells = [where]
        for name in everyone:
            rate, other = rate_of(group, name), rate_of(group, base)
            ratio = f" ({rate / other:.2f} x)" if rate and other and name not in PEERS else ""
            cells.append(f"{rate:.0f}{ratio}" if rate else "-")
        body.append(cells)
    header = [f"TFLOP/s (ratio to {label(base)})", *map(label, everyone)]
    return f"{markdown(header, body)}\n\n{provenance(document, suite)}\n"


def rate_of(group: dict[str, Row], name: str) -> float | None:
    """TFLOP/s of one competitor on one shape; None if it was not measured there."""
    return group[name].get("tflops") if name in group else None


def is_headline(row: Row) -> bool:
    """Whether a row has the shape of the project's bar: (B, H, S, D) = (2, 16, 8192, 128)."""
    return (row["N"], row["D"]) == (8192, 128)


def mean_ratio(groups: list[dict[str, Row]], name: str, base: str) -> str:
    """The geometric mean of the ratios of two rates over the shapes that have both; "-" for none,
    and how many of how many if it is not all.
    """
    pairs = [(rate_of(group, name), rate_of(group, base)) for group in groups]
    ratios = [rate / other for rate, other in pairs if rate and other]
    if not ratios:
        return "-"
    share = "" if len(ratios) == len(groups) else f" ({len(ratios)} of {len(groups)})"
    return f"{statistics.geometric_mean(ratios):.2f}{share}"


def summary(document: Document) -> str:
    """The versions' speed in one number for each head dim: the geometric mean of the ratios to
    cuDNN and to flash-attn-4 over all long shapes, and over the short ones.
    """
    groups = list(shapes(document, "table").values())
    versions = [name for name in names(document, "table") if name not in PEERS]
    body = []
    for head_dim in dict.fromkeys(any_row(group)["D"] for group in groups):
        for base in ("cudnn", "flash-attn-4"):
            for short in (False, True):
                chosen = [
                    group
                    for group in groups
                    if any_row(group)["D"] == head_dim and (any_row(group)["N"] < LONG) == short
                ]
                cells = [mean_ratio(chosen, version, base) for version in versions]
                if any(cell != "-" for cell in cells):
                    length = f"S {'<' if short else '>='} {LONG}"
                    body.append([f"D={head_dim}, {length}, to {label(base)}", *cells])
    if not body:
        return not_measured("table")
    header = ["ratio of rates, geometric mean over full and causal", *versions]
    return f"{markdown(header, body)}\n\n{provenance(document, 'table')}\n"


def ablation(document: Document) -> str:
    """A table for each version that has variants: its rate, and the variants' and cuDNN's ratio to
    it.
    """
    groups = shapes(document, "ablation").values()
    tables = []
    for version in dict.fromkeys(row["of"] for g in groups for row in g.values() if "of" in row):
        members = {
            row["version"]: row["variant"]
            for group in groups
            for row in group.values()
            if row.get("of") == version and row["variant"]
        }
        body = []
        for group in groups:
            row, rate = any_row(group), rate_of(group, version)
            cells = [f"D={row['D']} {mask(row)}, S={row['N']}", f"{rate:.0f}" if rate else "-"]
            for name in (*members, "cudnn"):
                other = rate_of(group, name)
                cells.append(f"{other / rate:.2f}" if rate and other else "-")
            body.append(cells)
        header = ["TFLOP/s, then ratios to it", version, *members.values(), "cuDNN"]
        tables.append(markdown(header, body))
    if not tables:
        return not_measured("ablation")
    return "\n\n".join([*tables, provenance(document, "ablation")]) + "\n"


def packed(document: Document) -> str:
    """Versions on packed sequences of 64 lengths, against a rectangle with as many rows."""
    body = []
    for suite in ("packed", "packed backward"):
        way = "backward" if suite.endswith("backward") else "forward"
        for group in shapes(document, suite).values():
            for name in group:
                dense, ragged = rate_of(group, name), rate_of(group, f"{name} packed")
                if dense and ragged:
                    rate = [f"{dense:.0f}", f"{ragged:.0f}", f"{ragged / dense:.2f}"]
                    body.append([f"{name} {way}, {mask(any_row(group))}", *rate])
    if not body:
        return not_measured("packed")
    header = ["TFLOP/s", "64 x 1024 tokens", "packed", "ratio"]
    note = "64 sequences of 130 to 1900 tokens, 65536 in all; 16 heads, D=128."
    return f"{markdown(header, body)}\n\n{note} {provenance(document, 'packed')}\n"


def launch(document: Document) -> str:
    """Microseconds of host time for each path."""
    found: dict[str, dict[str, float | None]] = {}
    versions = names(document, "launch")
    for row in document["rows"]:
        if row["suite"] == "launch" and "call" in row:
            found.setdefault(row["call"], {})[row["version"]] = row.get("host_us")
    if not found:
        return not_measured("launch")
    body = []
    for call, times in found.items():
        cells = [times.get(name) for name in versions]
        body.append([call, *("-" if value is None else f"{value:.0f}" for value in cells)])
    return f"{markdown(['microseconds on the host', *versions], body)}\n"


def decode(document: Document) -> str:
    """Bandwidth of reading K and V with one query, as a share of a device copy's."""
    groups = shapes(document, "decode")
    if not groups:
        return not_measured("decode")
    copy = document["suites"]["decode"]["copy_tb_per_s"]
    everyone = names(document, "decode")
    unsplit = [name for name in everyone if name.endswith(" unsplit")]
    for name in unsplit:  # before what it is held against
        everyone.remove(name)
        everyone.insert(everyone.index(name.removesuffix(" unsplit")), name)
    body = []
    for group in groups.values():
        cells = [f"N={any_row(group)['N']}"]
        for name in everyone:
            rate = group[name].get("tb_per_s") if name in group else None
            cells.append("-" if rate is None else f"{rate:.2f} ({rate / copy:.0%})")
        body.append(cells)
    columns = [label(name).replace(" unsplit", ", 1 split") for name in everyone]
    note = f"One query, 32 query and 8 key heads, D=128; a device copy moves {copy:.2f} TB/s."
    table = markdown(["TB/s (share of a copy)", *columns], body)
    return f"{table}\n\n{note} {provenance(document, 'decode')}\n"


TABLES: dict[str, Callable[[Document], str]] = {
    "headline": lambda document: rates(document, "table", is_headline),
    "headline backward": lambda document: rates(document, "backward", is_headline),
    "prefill": lambda document: rates(document, "table"),
    "backward": lambda document: rates(document, "backward"),
    "seeds": lambda document: rates(document, "seeds", base="cudnn"),
    "summary": summary,
    "ablation": ablation,
    "decode": decode,
    "packed": packed,
    "launch": launch,
}


def filled(text: str, document: Document) -> str:
    """The text with the content of every marked block rewritten from the results."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]](document) + m[3], text)


def main() -> int:
    """Rewrite the marked blocks of all documents; returns the exit code."""
    document = read_results()
    for path in DOCUMENTS:
        text = path.read_text()
        if (new := filled(text, document)) != text:
            write(path, new)
        sys.stderr.write(f"{path.relative_to(ROOT)}: up to date with docs/{RESULTS.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
