"""Turn measured results into the tables of the documents: `python -m docs.report`.

Every table of measurements in README.md and docs/ stands between two markers that name it:

    <!-- results: prefill -->  ...  <!-- end -->

This module writes the table from docs/results/*/*.json, and a test compares the documents with the
JSON. The columns are the versions and peers that the JSON has.
"""

import re
import statistics
import sys
from collections.abc import Callable
from functools import partial

from docs.report import others as report_others
from docs.report import ragged as report_ragged
from docs.report import tiles as report_tiles
from docs.report import transformer as report_transformer
from docs.report import versions as report_versions
from docs.report.tables import (
    by_shape,
    grouped,
    markdown,
    pivot,
    provenance,
    rate,
    where,
    where_and_when,
)
from flash_versions.bench.files import write
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

BLOCK = re.compile(r"(<!-- results: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("[a-z]*/*.md")))
    if path.exists() and BLOCK.search(path.read_text())
]
LONG = 2048  # lengths from here on are what the means are over; below them launches weigh, too


def rates(
    document: Document,
    suite: str,
    wanted: Callable[[Row], bool] = lambda row: True,
    base: str = "torch fa2",
) -> str:
    """TFLOP/s of all competitors, and the ratio of each version to a peer of the same rounds."""
    groups = {w: group for w, group in by_shape(document, suite).items() if wanted(any_row(group))}

    def cell(group: dict[str, Row], name: str) -> str | None:
        return rate(group, name, None if name in PEERS else base)

    title = f"TFLOP/s (ratio to {label(base)})"
    table = pivot(title, groups, names(document, suite), cell)
    return f"{table}\n\n{provenance(document, suite)}\n"


def is_headline(row: Row) -> bool:
    """Whether a row has the shape of the project's bar: (B, H, S, D) = (2, 16, 8192, 128)."""
    return (row["N"], row["D"]) == (8192, 128)


def mean_ratio(groups: list[dict[str, Row]], name: str, base: str) -> str | None:
    """The geometric mean of the ratios of two rates over the shapes that have both; it says how
    many these are if they are not all. None if no shape has both.
    """
    pairs = [(rate_of(group, name), rate_of(group, base)) for group in groups]
    ratios = [own / other for own, other in pairs if own and other]
    if not ratios:
        return None
    share = "" if len(ratios) == len(groups) else f" ({len(ratios)} of {len(groups)})"
    return f"{statistics.geometric_mean(ratios):.2f}{share}"


def summary(document: Document, suite: str = "table") -> str:
    """The versions' speed in one number for each head dim: the geometric mean of the ratios to
    cuDNN and to flash-attn-4 over all long shapes, and over the short ones.
    """
    groups = list(shapes(document, suite).values())
    versions = [name for name in names(document, suite) if name not in PEERS]
    parts = {}
    for head_dim in dict.fromkeys(any_row(group)["D"] for group in groups):
        for base in ("cudnn", "flash-attn-4"):
            for short in (False, True):
                chosen = [
                    group
                    for group in groups
                    if any_row(group)["D"] == head_dim and (any_row(group)["N"] < LONG) == short
                ]
                means = {version: mean_ratio(chosen, version, base) for version in versions}
                if any(means.values()):
                    length = f"S {'<' if short else '>='} {LONG}"
                    parts[f"D={head_dim}, {length}, to {label(base)}"] = means
    title = "ratio of rates, geometric mean over full and causal"
    return f"{pivot(title, parts, versions, dict.get)}\n\n{provenance(document, suite)}\n"


def ablation(document: Document, suite: str = "ablation", peer: str = "cudnn") -> str:
    """A table for each version that has variants: its rate, and the ratio to it of its variants, of
    the versions before it and of a peer.
    """
    groups = by_shape(document, suite)
    bases = list(dict.fromkeys(r["of"] for g in groups.values() for r in g.values() if "of" in r))
    tables = []
    for version, members in ablated(groups.values()).items():

        def cell(group: dict[str, Row], name: str, version: str = version) -> str | None:
            own, other = rate_of(group, version), rate_of(group, name)
            if name == version or not (own and other):
                return rate(group, version) if name == version else None
            return f"{other / own:.2f}"

        if members:
            columns = [version, *members, *bases[: bases.index(version)], peer]
            tables.append(pivot("TFLOP/s, then ratios to it", groups, columns, cell, members))
    return "\n\n".join([*tables, provenance(document, suite)]) + "\n"


def worth(document: Document, version: str) -> str:
    """The speed of a version with one thing changed, and cuDNN's, at the longest length of each
    head dim and mask; the version itself is 1.
    """
    longest: dict[tuple[int, bool], dict[str, Row]] = {}
    for group in sorted(
        shapes(document, "ablation").values(), key=lambda group: any_row(group)["N"]
    ):
        longest[any_row(group)["D"], any_row(group)["causal"]] = group
    members = ablated(longest.values())[version]
    body = []
    for name in (*members, "cudnn"):
        cells = []
        for group in longest.values():
            own, other = rate_of(group, version), rate_of(group, name)
            cells.append(f"{other / own:.2f}" if own and other else "-")
        body.append([members.get(name) or label(name), *cells])
    header = [f"speed; {version} = 1", *(where(any_row(group)) for group in longest.values())]
    return f"{markdown(header, body)}\n\n{provenance(document, 'ablation')}\n"


def fp8(document: Document) -> str:
    """TFLOP/s of the FP8 kernels alone, and their ratio to the same version in bf16 and to cuDNN's
    FP8 kernel.
    """
    groups = by_shape(document, "fp8")

    def cell(group: dict[str, Row], name: str) -> str | None:
        own = rate_of(group, name)
        if not own or not group[name].get("variant"):
            return rate(group, name)
        others = (rate_of(group, other) for other in (group[name]["of"], "cudnn fp8"))
        ratios = ", ".join(f"{own / other:.2f} x" if other else "-" for other in others)
        return f"{own:.0f} ({ratios})"

    title = "TFLOP/s (ratio to its own bf16, to cuDNN FP8)"
    table = pivot(title, groups, names(document, "fp8"), cell)
    return f"{table}\n\n{provenance(document, 'fp8')}\n"


def bandwidth(group: dict[str, Row], name: str, copy: float | None) -> str | None:
    """TB/s, and its share of the rate of a copy if that is known."""
    found = group.get(name, {}).get("tb_per_s")
    if not found:
        return None
    return f"{found:.2f} ({found / copy:.0%})" if copy else f"{found:.2f}"


def quantization(document: Document) -> str:
    """Bandwidth of quantising q, k and v, as a share of a copy's in the same rounds."""
    groups = {}
    for group in shapes(document, "quantize").values():
        row = any_row(group)
        groups[f"({row['B']}, {row['H']}, {row['N']}, {row['D']})"] = group

    def cell(group: dict[str, Row], name: str) -> str | None:
        copy = group.get("copy", {}).get("tb_per_s")
        return bandwidth(group, name, None if name == "copy" else copy)

    ways = [name for name in names(document, "quantize") if name != "copy"]
    table = pivot("TB/s (share of a copy) at (B, H, S, D)", groups, ["copy", *ways], cell)
    note = (
        "Bytes are those of q, k and v and of what is written, each once; scales of heads and "
        "tensors need a second pass over the inputs."
    )
    return f"{table}\n\n{note} {provenance(document, 'quantize')}\n"


def fp8_accuracy(document: Document) -> str:
    """Errors of attention in FP8 against exact attention of what was quantised."""
    found = grouped(document, "accuracy", "distribution", "D", by="scheme")
    measures = {"rmse": "relative RMSE", "mean": "mean error", "row": "mean error of a row"}
    groups = {
        f"{distribution}, D={head_dim}: {called}": {s: row[key] for s, row in rows.items()}
        for (distribution, head_dim), rows in found.items()
        for key, called in measures.items()
    }
    schemes = dict.fromkeys(scheme for rows in found.values() for scheme in rows)
    table = pivot(
        "error, relative to exact attention",
        groups,
        schemes,
        lambda group, scheme: f"{group[scheme]:.2g}" if scheme in group else None,
    )
    what = document["suites"]["accuracy"]["what"]
    about = f"{what['version'].upper()}'s kernel, {what['S']} tokens, no mask"
    return f"{table}\n\n{about}. {where_and_when(document, 'accuracy')}.\n"


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
                    cells = [f"{dense:.0f}", f"{ragged:.0f}", f"{ragged / dense:.2f}"]
                    body.append([f"{name} {way}, {mask(any_row(group))}", *cells])
    header = ["TFLOP/s", "64 x 1024 tokens", "packed", "ratio"]
    note = "64 sequences of 130 to 1900 tokens, 65536 in all; 16 heads, D=128."
    return f"{markdown(header, body)}\n\n{note} {' '.join(sources)}\n"


def several_gpus(document: Document) -> str:
    """One long sequence on several GPUs: the rate of all together, and how many times one GPU's."""
    groups = {}
    for suite, way in {
        "context parallel": "forward",
        "context parallel backward": "with backward",
    }.items():
        for group in shapes(document, suite).values():
            row = any_row(group)
            name = f"{way}, H={row['H']}, Hkv={row['Hkv']} {mask(row)}, S={row['N']}"
            groups[name] = group
    many = max(row["gpus"] for group in groups.values() for row in group.values())

    def cell(group: dict[str, Row], name: str) -> str | None:
        ratio = group.get(name, {}).get("ratio")
        return rate(group, name) and f"{rate(group, name)}{f' ({ratio:.2f} x)' if ratio else ''}"

    title = f"TFLOP/s of {many} GPUs together (times one)"
    called = {"all_to_all": "all-to-all"}
    table = pivot(title, groups, ("1 GPU", "ring", "all_to_all"), cell, called)
    about = where_and_when(document, "context parallel")
    return f"{table}\n\nbf16, D=128; the slowest GPU's time, median. {about}.\n"


def launch(document: Document) -> str:
    """Microseconds of host time for each path."""
    groups = grouped(document, "launch", "call", by="version")
    groups.pop(None, None)  # of a version that ended the measuring process

    def cell(group: dict[str, Row], name: str) -> str | None:
        found = group.get(name, {}).get("host_us")
        return f"{found:.0f}" if found is not None else None

    return pivot("microseconds on the host", groups, names(document, "launch"), cell) + "\n"


def decode(document: Document) -> str:
    """Bandwidth of reading K and V with one query, as a share of a device copy's."""
    found = sorted(shapes(document, "decode").items())
    groups = {f"B={any_row(group)['B']} N={any_row(group)['N']}": group for _, group in found}
    copy = document["suites"]["decode"]["copy_tb_per_s"]
    measured = names(document, "decode")
    # A version without splits comes before the version that it is held against.
    columns = sorted(measured, key=lambda x: (measured.index(x.removesuffix(" unsplit")), -len(x)))
    table = pivot(
        "TB/s (share of a copy)",
        groups,
        columns,
        lambda group, name: bandwidth(group, name, copy),
        {name: name.replace(" unsplit", ", 1 split") for name in columns if "unsplit" in name},
    )
    note = f"One query, 32 query and 8 key heads, D=128; a device copy moves {copy:.2f} TB/s."
    return f"{table}\n\n{note} {provenance(document, 'decode')}\n"


TABLES: dict[str, Callable[[Document], str]] = {
    "headline": partial(rates, suite="table", wanted=is_headline),
    "headline backward": partial(rates, suite="backward", wanted=is_headline),
    "prefill": partial(rates, suite="table"),
    "backward": partial(rates, suite="backward"),
    "against peers backward": partial(summary, suite="backward"),
    "seeds": partial(rates, suite="seeds", base="cudnn"),
    "summary": summary,
    "ablation": ablation,
    "ablation fp8": partial(ablation, suite="ablation fp8", peer="cudnn fp8"),
    "worth fa3": partial(worth, version="fa3"),
    "worth fa4": partial(worth, version="fa4"),
    "fp8": fp8,
    "quantize": quantization,
    "fp8 accuracy": fp8_accuracy,
    "decode": decode,
    "packed": packed,
    "launch": launch,
    "several gpus": several_gpus,
    "ablation backward": partial(ablation, suite="ablation backward"),
    **report_others.TABLES,
    **report_ragged.TABLES,
    **report_tiles.TABLES,
    **report_versions.TABLES,
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
