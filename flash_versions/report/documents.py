"""Turn measured results into the tables of the documents: `python -m flash_versions.report`.

Every figure in README.md and docs/ stands between two markers that name its table:

    <!-- results: prefill -->  ...  <!-- end -->

and is written by this module from docs/results/*.json, so that prose cannot drift from what was
measured; a test holds the documents against the JSON. Columns are the versions and peers that the
JSON has; a table of which nothing was measured says so.
"""

import re
import statistics
import sys
from collections.abc import Callable

from flash_versions.bench.peers import PEERS
from flash_versions.bench.results import (
    RESULTS,
    ROOT,
    Document,
    Row,
    ablated,
    any_row,
    label,
    mask,
    names,
    rate_of,
    read_results,
    shapes,
)
from flash_versions.bench.watch import write
from flash_versions.report import profile as report_profile
from flash_versions.report import transformer as report_transformer
from flash_versions.report.tables import markdown, not_measured, provenance, where_and_when

BLOCK = re.compile(r"(<!-- results: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.exists() and BLOCK.search(path.read_text())
]
TORCHRUN = "torchrun --nproc-per-node 2"
LONG = 2048  # lengths from here on are what the means are over; below them launches weigh, too


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


def summary(document: Document, suite: str = "table") -> str:
    """The versions' speed in one number for each head dim: the geometric mean of the ratios to
    cuDNN and to flash-attn-4 over all long shapes, and over the short ones.
    """
    groups = list(shapes(document, suite).values())
    versions = [name for name in names(document, suite) if name not in PEERS]
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
        return not_measured(suite)
    header = ["ratio of rates, geometric mean over full and causal", *versions]
    return f"{markdown(header, body)}\n\n{provenance(document, suite)}\n"


def ablation(document: Document, suite: str = "ablation", peer: str = "cudnn") -> str:
    """A table for each version that has variants: its rate, and the ratio to it of its variants, of
    the versions before it and of a peer.
    """
    groups = shapes(document, suite).values()
    bases = dict.fromkeys(row["of"] for g in groups for row in g.values() if "of" in row)
    tables = []
    for version, members in ablated(groups).items():
        if not members:
            continue
        earlier = list(bases)[: list(bases).index(version)]
        body = []
        for group in groups:
            row, rate = any_row(group), rate_of(group, version)
            cells = [f"D={row['D']} {mask(row)}, S={row['N']}", f"{rate:.0f}" if rate else "-"]
            for name in (*members, *earlier, peer):
                other = rate_of(group, name)
                cells.append(f"{other / rate:.2f}" if rate and other else "-")
            body.append(cells)
        header = ["TFLOP/s, then ratios to it", version, *members.values(), *earlier, label(peer)]
        tables.append(markdown(header, body))
    if not tables:
        return not_measured(suite)
    return "\n\n".join([*tables, provenance(document, suite)]) + "\n"


def fp8(document: Document) -> str:
    """TFLOP/s of the FP8 kernels alone, and their ratio to the same version in bf16 and to cuDNN's
    FP8 kernel.
    """
    groups = list(shapes(document, "fp8").values())
    if not groups:
        return not_measured("fp8")
    everyone = names(document, "fp8")
    body = []
    for group in groups:
        row = any_row(group)
        cells = [f"D={row['D']} {mask(row)}, S={row['N']}"]
        for name in everyone:
            rate = rate_of(group, name)
            ratios = ""
            if rate and group[name].get("variant"):
                others = (rate_of(group, other) for other in (group[name]["of"], "cudnn fp8"))
                ratios = ", ".join(f"{rate / other:.2f} x" if other else "-" for other in others)
            cells.append("-" if not rate else f"{rate:.0f} ({ratios})" if ratios else f"{rate:.0f}")
        body.append(cells)
    header = ["TFLOP/s (ratio to its own bf16, to cuDNN FP8)", *map(label, everyone)]
    return f"{markdown(header, body)}\n\n{provenance(document, 'fp8')}\n"


def quantization(document: Document) -> str:
    """Bandwidth of quantising q, k and v, as a share of a copy's in the same rounds."""
    groups = shapes(document, "quantize").values()
    if not groups:
        return not_measured("quantize")
    ways = [name for name in names(document, "quantize") if name != "copy"]
    body = []
    for group in groups:
        row = any_row(group)
        rates = {name: group[name].get("tb_per_s") for name in group}
        copy = rates.get("copy")
        cells = [
            f"({row['B']}, {row['H']}, {row['N']}, {row['D']})",
            f"{copy:.2f}" if copy else "-",
        ]
        for name in ways:
            rate = rates.get(name)
            share = f" ({rate / copy:.0%})" if rate and copy else ""
            cells.append(f"{rate:.2f}{share}" if rate else "-")
        body.append(cells)
    header = ["TB/s (share of a copy) at (B, H, S, D)", "copy", *ways]
    note = (
        "Bytes are those of q, k and v and of what is written, each once; scales of heads and "
        "tensors need a second pass over the inputs."
    )
    return f"{markdown(header, body)}\n\n{note} {provenance(document, 'quantize')}\n"


def fp8_accuracy(document: Document) -> str:
    """Errors of attention in FP8 against exact attention of what was quantised."""
    rows = [row for row in document["rows"] if row["suite"] == "accuracy"]
    if not rows:
        return "Not measured yet: `python -m flash_versions.bench.accuracy`.\n"
    schemes = dict.fromkeys(row["scheme"] for row in rows)
    found = {(row["distribution"], row["D"], row["scheme"]): row for row in rows}
    measures = {"rmse": "relative RMSE", "mean": "mean error", "row": "mean error of a row"}
    body = []
    for distribution, head_dim in dict.fromkeys((row["distribution"], row["D"]) for row in rows):
        for key, measure in measures.items():
            cells = [f"{distribution}, D={head_dim}: {measure}"]
            for scheme in schemes:
                row = found.get((distribution, head_dim, scheme), {})
                cells.append(f"{row[key]:.2g}" if row.get(key) is not None else "-")
            body.append(cells)
    header = ["error, relative to exact attention", *schemes]
    return f"{markdown(header, body)}\n\n{where_and_when(document, 'accuracy')}.\n"


def packed(document: Document) -> str:
    """Versions on packed sequences of 64 lengths, against a rectangle with as many rows."""
    body, sources = [], []
    for way, suite in (("forward", "packed"), ("backward", "packed backward")):
        if suite in document["suites"]:
            sources.append(f"{way.capitalize()}: {provenance(document, suite)}")
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
    return f"{markdown(header, body)}\n\n{note} {' '.join(sources)}\n"


def several_gpus(document: Document) -> str:
    """One long sequence on several GPUs: the rate of all together, and how many times one GPU's."""
    suites = {"context parallel": "forward", "context parallel backward": "with backward"}
    body, many = [], 1
    for suite, way in suites.items():
        for group in shapes(document, suite).values():
            row = any_row(group)
            many = max(x["gpus"] for x in group.values())
            cells = [f"{way}, H={row['H']}, Hkv={row['Hkv']} {mask(row)}, S={row['N']}"]
            for name in ("1 GPU", "ring", "all_to_all"):
                rate, ratio = rate_of(group, name), group.get(name, {}).get("ratio")
                times = f" ({ratio:.2f} x)" if ratio else ""
                cells.append(f"{rate:.0f}{times}" if rate else "-")
            body.append(cells)
    if not body:
        return (
            f"Not measured yet: `{TORCHRUN} tests/benchmarks/context_parallel_gpu.py --out FILE`.\n"
        )
    header = [f"TFLOP/s of {many} GPUs together (times one)", "1 GPU", "ring", "all-to-all"]
    note = "bf16, D=128; the slowest GPU's time, median. "
    about = where_and_when(document, "context parallel")
    return f"{markdown(header, body)}\n\n{note}{about}.\n"


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
    for _, group in sorted(groups.items()):
        cells = [f"B={any_row(group)['B']} N={any_row(group)['N']}"]
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
    "backward peer": lambda document: summary(document, "backward peer"),
    "seeds": lambda document: rates(document, "seeds", base="cudnn"),
    "summary": summary,
    "ablation": ablation,
    "ablation fp8": lambda document: ablation(document, "ablation fp8", "cudnn fp8"),
    "fp8": fp8,
    "quantize": quantization,
    "fp8 accuracy": fp8_accuracy,
    "decode": decode,
    "packed": packed,
    "launch": launch,
    "several gpus": several_gpus,
    "ablation backward": lambda document: ablation(document, "ablation backward"),
    **report_profile.TABLES,
    **report_transformer.TABLES,
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
