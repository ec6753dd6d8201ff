"""Turn measured results into the tables of the documents: `python -m flash_versions.report`.

Every figure in README.md and docs/ stands between two markers that name its table:

    <!-- results: prefill -->  ...  <!-- end -->

and is written by this module from docs/results/*.json, so that prose cannot drift from what was
measured; a test holds the documents against the JSON.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "h200.json"
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("design.md", "progression.md")),
]
BLOCK = re.compile(r"(<!-- results: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OTHERS = ("torch fa2", "cudnn")
SHAPE = ("B", "H", "Hkv", "M", "N", "D", "causal")

Document = dict[str, Any]


def shapes(document: Document, suite: str) -> dict[tuple, dict[str, dict[str, Any]]]:
    """Rows of a suite as {shape: {version: row}}, in the order of measurement."""
    found: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        if row["suite"] == suite:
            found.setdefault(tuple(row[key] for key in SHAPE), {})[row["version"]] = row
    return found


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(document: Document) -> str:
    """One sentence on where, when and how the numbers were measured."""
    machine, protocol = document["machine"], document["protocol"]
    return (
        f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, cuDNN "
        f"{machine['cudnn']}, {document['date']}, commit {document['commit']}; bf16, median of "
        f"{protocol['rounds']} rounds in which the competitors take turns, cold L2."
    )


def rates(
    document: Document, suite: str, wanted: Callable[[dict[str, Any]], bool] = lambda row: True
) -> str:
    """TFLOP/s of every version, and its ratio to torch's FlashAttention-2 in the same rounds."""
    body = []
    for versions in shapes(document, suite).values():
        row = versions["fa2"]
        if not wanted(row):
            continue
        found = {name: row.get("tflops") for name, row in versions.items()}
        base = found["torch fa2"]
        mask = "causal" if row["causal"] else "full"
        cells = [f"D={row['D']} {mask}, S={row['N']}"]
        for name in ("fa1", "fa2"):
            rate = found[name]
            cells.append(f"{rate:.0f} ({rate / base:.2f} x)" if rate and base else "-")
        cells += ["-" if found[name] is None else f"{found[name]:.0f}" for name in OTHERS]
        body.append(cells)
    header = ["TFLOP/s (ratio to torch FA2)", "fa1", "fa2", "torch FA2", "cuDNN"]
    return f"{markdown(header, body)}\n\n{provenance(document)}\n"


def is_headline(row: dict[str, Any]) -> bool:
    """Whether a row has the shape of the project's bar: (B, H, S, D) = (2, 16, 8192, 128)."""
    return (row["N"], row["D"]) == (8192, 128)


def packed(document: Document) -> str:
    """FA2 on packed sequences of 64 lengths, against a rectangle with as many rows."""
    body = []
    for suite in ("packed", "packed backward"):
        for versions in shapes(document, suite).values():
            row = versions["fa2"]
            dense, ragged = row["tflops"], versions["fa2 packed"]["tflops"]
            mask = "causal" if row["causal"] else "full"
            way = "backward" if "backward" in suite else "forward"
            body.append(
                [f"{way}, {mask}", f"{dense:.0f}", f"{ragged:.0f}", f"{ragged / dense:.2f}"]
            )
    header = ["TFLOP/s", "64 x 1024 tokens", "packed", "ratio"]
    note = "64 sequences of 130 to 1900 tokens, 65536 in all; 16 heads, D=128."
    return f"{markdown(header, body)}\n\n{note} {provenance(document)}\n"


def launch(document: Document) -> str:
    """Microseconds of host time for each path."""
    found: dict[str, dict[str, float | None]] = {}
    for row in document["rows"]:
        if row["suite"] == "launch":
            found.setdefault(row["call"], {})[row["version"]] = row.get("host_us")
    body = [
        [call, *("-" if value is None else f"{value:.0f}" for value in times.values())]
        for call, times in found.items()
    ]
    versions = list(next(iter(found.values())))
    return f"{markdown(['microseconds on the host', *versions], body)}\n"


def decode(document: Document) -> str:
    """Bandwidth of reading K and V with one query, as a share of a device copy's."""
    copy = document["copy_tb_per_s"]
    body = []
    for versions in shapes(document, "decode").values():
        cells = [f"N={versions['fa2']['N']}"]
        for name in ("fa1", "fa2 unsplit", "fa2", "torch fa2", "cudnn"):
            rate = versions[name].get("tb_per_s") if name in versions else None
            cells.append("-" if rate is None else f"{rate:.2f} ({rate / copy:.0%})")
        body.append(cells)
    header = ["TB/s (share of a copy)", "fa1", "fa2, 1 split", "fa2", "torch FA2", "cuDNN"]
    note = f"One query, 32 query and 8 key heads, D=128; a device copy moves {copy:.2f} TB/s."
    return f"{markdown(header, body)}\n\n{note} {provenance(document)}\n"


TABLES: dict[str, Callable[[Document], str]] = {
    "headline": lambda document: rates(document, "table", is_headline),
    "headline backward": lambda document: rates(document, "backward", is_headline),
    "prefill": lambda document: rates(document, "table"),
    "backward": lambda document: rates(document, "backward"),
    "decode": decode,
    "packed": packed,
    "launch": launch,
}


def filled(text: str, document: Document) -> str:
    """The text with the content of every marked block rewritten from the results."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]](document) + m[3], text)


def main() -> int:
    """Rewrite the marked blocks of all documents; returns the exit code."""
    document = json.loads(RESULTS.read_text())
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(), document))
        sys.stderr.write(f"{path.relative_to(ROOT)}: up to date with {RESULTS.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
