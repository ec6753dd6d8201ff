"""Tables of attention: the suites of `flash_versions.bench`, and those of tests/benchmarks."""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import product

from docs.report.tables import Group, markdown, pivot, provenance, rate, source, spread, where
from flash_versions.bench.peers import PEERS
from flash_versions.bench.results import (
    Document,
    Row,
    ablated,
    any_row,
    label,
    lines,
    mask,
    names,
    rate_of,
    ratio,
    rows_of,
    shapes,
)

LONG = 2048  # lengths from here on are what the means are over; below them launches weigh, too
SHOWN = 8192  # the length of which a table of many head dims has the rates
BEST = ("cudnn", "flash-attn-4")
READ = (8192, 131072)  # numbers of keys that the table of decoding has
SERVED = (("fa3", "forward"), ("fa4", "forward"), ("fa3", "backward"))


def rates(
    document: Document,
    suite: str,
    wanted: Callable[[Row], bool] = lambda row: True,
    base: str = "torch fa2",
) -> str:
    """TFLOP/s of all competitors, and the ratio of each version to a peer of the same rounds."""
    groups = {w: x for w, x in lines(document, suite, where).items() if wanted(any_row(x))}

    def cell(group: Group, name: str) -> str | None:
        return rate(group, name, None if name in PEERS else base)

    title = f"TFLOP/s (ratio to {label(base)})"
    return pivot(title, groups, names(document, suite), cell, provenance(document, suite))


def is_headline(row: Row) -> bool:
    """Whether a row has the shape of the project's bar: (B, H, S, D) = (2, 16, 8192, 128)."""
    return (row["N"], row["D"]) == (8192, 128)


def is_shown(row: Row) -> bool:
    """Whether a table has a row; the figures have all lengths."""
    return row["N"] in (1024, 16384)


def summary(document: Document, suite: str = "table") -> str:
    """The versions' speed in one number for each head dim: the geometric mean of the ratios to
    cuDNN and to flash-attn-4 over all long shapes, and over the short ones. A mean says over how
    many shapes it is if these are not all.
    """
    groups = list(lines(document, suite, where).values())
    versions = [name for name in names(document, suite) if name not in PEERS]
    parts = {}
    dims = dict.fromkeys(any_row(group)["D"] for group in groups)
    for head_dim, base, short in product(dims, BEST, (False, True)):
        chosen = [x for x in groups if any_row(x)["D"] == head_dim]
        chosen = [x for x in chosen if (any_row(x)["N"] < LONG) == short]
        means = {}
        for version in versions:
            if ratios := [x for group in chosen if (x := ratio(group, version, base))]:
                few = f" ({len(ratios)} of {len(chosen)})" * (len(ratios) < len(chosen))
                means[version] = f"{statistics.geometric_mean(ratios):.2f}{few}"
        if means:
            length = f"S {'<' if short else '>='} {LONG}"
            parts[f"D={head_dim}, {length}, to {label(base)}"] = means
    title = "ratio of rates, geometric mean over full and causal"
    return pivot(title, parts, versions, dict.get, provenance(document, suite))


def worth(document: Document, version: str) -> str:
    """The speed of a version with one thing changed, and cuDNN's, at the longest length of head
    dims 128 and 256 and each mask; the version itself is 1. The figure has other head dims.
    """
    groups = shapes(document, "ablation").values()
    longest = {
        (any_row(group)["D"], any_row(group)["causal"]): group
        for group in sorted(groups, key=lambda group: any_row(group)["N"])
        if any_row(group)["D"] in (128, 256)
    }
    columns = {where(any_row(group)): group for group in longest.values()}
    members = ablated(columns.values())[version] | {"cudnn": label("cudnn")}

    def cell(name: str, column: str) -> str | None:
        times = ratio(columns[column], name, version)
        return times and f"{times:.2f}"

    versions, about = {members[x]: x for x in members}, provenance(document, "ablation")
    return pivot(f"speed; {version} = 1", versions, [*columns], cell, about)


def fp8(document: Document) -> str:
    """TFLOP/s of the FP8 kernels alone, and their ratio to the same version in bf16 and to cuDNN's
    FP8 kernel.
    """

    def cell(group: Group, name: str) -> str | None:
        if not rate_of(group, name) or not group[name].get("variant"):
            return rate(group, name)
        found = [ratio(group, name, other) for other in (group[name]["of"], "cudnn fp8")]
        ratios = ", ".join(f"{times:.2f} x" if times else "-" for times in found)
        return f"{rate(group, name)} ({ratios})"

    title = "TFLOP/s (ratio to its own bf16, to cuDNN FP8)"
    groups = {w: x for w, x in lines(document, "fp8", where).items() if is_shown(any_row(x))}
    return pivot(title, groups, names(document, "fp8"), cell, provenance(document, "fp8"))


def bandwidth(group: Group, name: str, copy: float | None) -> str | None:
    """TB/s, and its share of the rate of a copy if that is known."""
    found = group.get(name, {}).get("tb_per_s")
    return found and f"{found:.2f}" + (f" ({found / copy:.0%})" if copy else "")


def fp8_accuracy(document: Document) -> str:
    """Errors of attention in FP8 against exact attention of what was quantised."""
    about = document["suites"]["accuracy"]["what"]
    groups = lines(
        document, "accuracy", lambda row: f"{row['distribution']}, D={row['D']}", "scheme"
    )
    schemes = list(dict.fromkeys(scheme for rows in groups.values() for scheme in rows))

    def cell(group: Group, scheme: str) -> str | None:
        return f"{group[scheme]['rmse']:.2g}" if scheme in group else None

    note = f"{about['version'].upper()}'s kernel, {about['S']} tokens, no mask."
    title, where_from = "relative RMSE, to exact attention", source(document, "accuracy")
    return pivot(title, groups, schemes, cell, note, where_from)


def several_gpus(document: Document) -> str:
    """One long sequence on several GPUs: the rate of all together, and how many times one GPU's."""
    groups = {}
    for suite, way in (("", "forward"), (" backward", "with backward")):
        groups |= lines(
            document,
            f"context parallel{suite}",
            lambda row, way=way: f"{way}, H={row['H']}, Hkv={row['Hkv']} {mask(row)}, S={row['N']}",
        )
    many = max(row["gpus"] for group in groups.values() for row in group.values())

    def cell(group: Group, name: str) -> str | None:
        times = group.get(name, {}).get("ratio")
        return rate(group, name) and f"{rate(group, name)}{f' ({times:.2f} x)' if times else ''}"

    title = f"TFLOP/s of {many} GPUs together (times one)"
    called = {"1 GPU": "1 GPU", "ring": "ring", "all_to_all": "all-to-all"}
    note, about = (
        "bf16, D=128; the slowest GPU's time, median.",
        source(document, "context parallel"),
    )
    return pivot(title, groups, called, cell, note, about)


def decode(document: Document) -> str:
    """Bandwidth of reading K and V with one query, as a share of a device copy's."""
    found = sorted(shapes(document, "decode").items())
    groups = {"B={B} N={N}".format(**any_row(group)): group for _, group in found}
    groups = {name: group for name, group in groups.items() if any_row(group)["N"] in READ}
    copy = document["suites"]["decode"]["copy_tb_per_s"]
    measured = names(document, "decode")
    # A version without splits comes before the version that it is held against.
    columns = sorted(measured, key=lambda x: (measured.index(x.removesuffix(" unsplit")), -len(x)))
    titles = {name: label(name.replace(" unsplit", ", 1 split")) for name in columns}
    note = f"One query, 32 query and 8 key heads, D=128; a device copy moves {copy:.2f} TB/s."
    cell, about = partial(bandwidth, copy=copy), provenance(document, "decode")
    return pivot("TB/s (share of a copy)", groups, titles, cell, note, about)


def head_dims(document: Document, suite: str, own: tuple[str, ...]) -> str:
    """Rates by head dims and mask at one length, and over all lengths the ratio of the best of our
    `own` to the better peer.
    """
    found = {
        (row["version"], *row["dims"], row["causal"], row["length"]): row["tflops"]
        for row in rows_of(document, suite)
        if "tflops" in row and row.get("default", row["name"] in ("", "default"))
    }
    lengths = sorted({key[-1] for key in found})
    body = []
    for kind in sorted({key[1:4] for key in found}):
        name = f"{kind[0]}" if kind[0] == kind[1] else f"{kind[0]}, {kind[1]} of v"
        cells = [f"{name}, {'causal' if kind[2] else 'full'}"]
        speeds = [found.get((x, *kind, SHOWN)) for x in BEST + own]
        cells += [f"{x:.0f}" if x else "-" for x in speeds]
        ratios = []
        for n in lengths:
            ours, theirs = ([found.get((x, *kind, n), 0) for x in group] for group in (own, BEST))
            if any(ours) and any(theirs):
                ratios.append(max(ours) / max(theirs))
        body.append([*cells, f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"])
    header = [f"head_dim, S={SHOWN}", *BEST, *own, "ratio"]
    called = f"the better of {' and '.join(own)}" if len(own) > 1 else own[0]
    note = f"TFLOP/s; ratio: {called} to the better peer, geometric mean over "
    note += f"{', '.join(map(str, lengths))} tokens."
    return markdown(header, body, note, source(document, suite, "flash-attn-4"))


def in_turns(document: Document) -> str:
    """The deterministic backward: its rate, its share of the rate in any order, and its ratio to a
    peer's, at a few head dims and lengths.
    """
    suite, peer, ours = "deterministic backward", "flash-attn-4", "fa3 deterministic"
    groups = lines(
        document, suite, lambda row: (row["head_dim"], row["causal"], row["group"], row["S"])
    )
    found: dict[str, dict[int, Group]] = {}
    for (head_dim, causal, heads, length), group in sorted(groups.items()):
        if head_dim not in (64, 128, 256):
            continue
        line = f"D={head_dim}, {'causal' if causal else 'full'}, {heads} to a key head"
        found.setdefault(line, {})[length] = group
    lengths = (1024, 8192)

    def cell(line: dict[int, Group], length: int) -> str | None:
        if not (group := line.get(length)):
            return None
        times = ratio(group, ours, f"{peer} deterministic")
        theirs = f"; {times:.2f} x" if times else ""
        return f"{rate(group, ours)} ({ratio(group, ours, 'fa3'):.2f}{theirs})"

    title = f"TFLOP/s (share of the rate in any order; ratio to {peer}'s deterministic call)"
    columns = {n: f"S={n}" for n in lengths}
    return pivot(title, found, columns, cell, source(document, suite, peer))


def on_the_host(document: Document) -> str:
    """The host's time for a call beside others', and a layer's."""
    timed = document | {"rows": [row for row in document["rows"] if "us" in row]}

    def called(row: Row) -> str:
        shape = ", ".join(map(str, row["shape"]))
        return f"{row['what']}{', packed' * row['packed']}, ({shape}), {row['measured']}"

    groups = lines(timed, "host", called, by="contestant")
    columns = dict.fromkeys(row["contestant"] for row in rows_of(timed, "host"))
    columns = [name for name in columns if name not in ("fa2", "fa3", "fa4")]  # as long as auto

    def cell(group: Group, name: str) -> str | None:
        return f"{group[name]['us']:.0f}" if name in group else None

    return pivot("microseconds", groups, columns, cell, source(document, "host"))


def random_lengths(document: Document) -> str:
    """FA3 on packed sequences against others, over all shapes and by head_dim: geometric mean of
    the ratios of rates, and the least and largest.
    """
    suite, body = "packed, random", []
    groups = lines(document, suite, lambda row: (row["shape"], row["pass"]))
    called = {"portable": "its portable kernel", "dense": "equal rows, as long as the mean"}
    for way, name in product(
        ("forward", "backward"), ("flash-attn-4", "torch varlen_attn", "portable", "dense")
    ):
        of_way = [group for (_, one), group in groups.items() if one == way]
        cells = [f"{way}, to {called.get(name, name)}"]
        for head_dim in (64, 128, 256, None):
            chosen = [x for x in of_way if head_dim in (None, any_row(x)["head_dim"])]
            cells.append(spread(x for group in chosen if (x := ratio(group, "fa3", name))))
        body.append(cells)
    header = ["fa3, ratio of rates", "D=64", "D=128", "D=256", f"all {len(of_way)} shapes"]
    about = source(document, suite, "flash-attn-4")
    return markdown(header, body, "Geometric mean (least to largest).", about)


def asked_for(document: Document) -> str:
    """FA3 with lengths, a sink and slopes: TFLOP/s, and times its portable kernel."""
    groups = lines(
        document, "asked for", lambda row: (row["head_dim"], row["pass"], row["asked"] or "neither")
    )
    found: dict[str, dict[str, str]] = {}
    for (head_dim, way, asked), group in groups.items():
        found.setdefault(f"D={head_dim}, {way}", {})[asked] = rate(group, "fa3", "portable")
    columns = list(dict.fromkeys(name for line in found.values() for name in line))
    title, about = "TFLOP/s of fa3 (times its portable kernel)", source(document, "asked for")
    return pivot(title, found, columns, dict.get, about)


def intervals(document: Document, which: str, other: str) -> dict[int, tuple[Row, list[float]]]:
    """{shape: (a row, times as fast as another form of what SERVED has)} of a kind of masks."""
    keys = ("mask", "shape", "pass", "form")
    found = lines(document, "interval masks", lambda row: tuple(row[key] for key in keys))
    made = {}
    for shape in sorted({shape for kind, shape, *_ in found if kind == which}):
        pairs = (
            [found[which, shape, way, form][version]["ms_p50"] for form in (other, "intervals")]
            for version, way in SERVED
        )
        row = found[which, shape, "forward", "intervals"]["fa3"]
        made[shape] = row, [theirs / ours for theirs, ours in pairs]
    return made


def of_documents(document: Document) -> str:
    """Interval masks against the same documents as packed sequences, by their mean length."""
    found = intervals(document, "documents", "packed").values()
    body = []
    for mean in (*sorted({row["mean"] for row, _ in found}), None):
        chosen = [ratios for row, ratios in found if mean in (None, row["mean"])]
        name = f"mean {mean}" if mean else f"all {len(chosen)} shapes"
        body.append([name, *map(spread, zip(*chosen))])
    header = ["documents", *(f"{version}, {way}" for version, way in SERVED)]
    about = source(document, "interval masks")
    return markdown(header, body, "Geometric mean (least to largest).", about)


def of_prompts(document: Document) -> str:
    """Answers that share a prompt, against rows that each have a copy of it."""
    body = []
    for row, times in intervals(document, "shared prompt", "copies").values():
        count = f"{row['batch']} prompt{'s' if row['batch'] > 1 else ''}"
        body.append([f"{count}, D={row['head_dim']}", *(f"{x:.1f} x" for x in times)])
    header = ["prompts", *(f"{version}, {way}" for version, way in SERVED)]
    return markdown(header, body, source(document, "interval masks"))


def uneven_decoding(document: Document) -> str:
    """Decoding over pages and rows of different lengths: shares of a copy's rate of FA2's kernels,
    and of FA3's, which serves these on Hopper. Of the batches, those that the page explains.
    """
    suite, body = "decode by TMA", []
    for name, group in lines(document, suite, "name").items():
        row = group.get("fa3", {}) if name.startswith(("16x8k", "32x16k")) else {}
        # Without pages, FA3's kernel takes what `fa3.hopper.decode.host.pays` says.
        if "of_copy" in row and (
            row["page"] is not None
            or (row["lengths"] != "full" and row["batch"] > 1 and row["length"] >= 1024)
        ):
            shares = [f"{group[version]['of_copy']:.2f}" for version in ("fa2", "fa3")]
            body.append([name, f"{row['tb_per_s'] / row['of_copy']:.2f}", *shares])
    header = ["shares of a copy's rate", "copy, TB/s", "fa2", "fa3"]
    return markdown(header, body, source(document, suite))


def random_dense(document: Document) -> str:
    """Dense calls of random shapes: the better of fa3 and fa4, as a ratio to the better peer's."""
    suite = "dense, random"
    groups = lines(document, suite, lambda row: (row["number"], row["pass"]))
    dims = sorted({any_row(group)["head_dim"] for group in groups.values()})
    body = []
    for way in ("forward", "backward"):
        found = []
        for group in (group for (_, one), group in groups.items() if one == way):
            best = [max(rate_of(group, x) or 0 for x in who) for who in (("fa3", "fa4"), BEST)]
            found.append((any_row(group)["head_dim"], best[0] / best[1]))
        cells = [spread(x for dim, x in found if dim == one) for one in dims]
        body.append([way, *cells, spread(x for _, x in found)])
    shapes = len({number for number, _ in groups})
    header = ["ratio of rates", *(f"D={dim}" for dim in dims), f"all {shapes} shapes"]
    about = source(document, suite, "flash-attn-4")
    return markdown(header, body, "Geometric mean (least to largest).", about)


TABLES: dict[str, Callable[[Document], str]] = {
    "headline": partial(rates, suite="table", wanted=is_headline),
    "backward": partial(rates, suite="backward", wanted=is_shown),
    "against peers backward": partial(summary, suite="backward"),
    "summary": summary,
    "worth fa3": partial(worth, version="fa3"),
    "worth fa4": partial(worth, version="fa4"),
    "fp8": fp8,
    "fp8 accuracy": fp8_accuracy,
    "decode": decode,
    "several gpus": several_gpus,
    "head dims": partial(head_dims, suite="head dims", own=("fa3", "fa4")),
    "head dims backward": partial(head_dims, suite="head dims, backward", own=("fa3",)),
    "deterministic backward": in_turns,
    "host": on_the_host,
    "random lengths": random_lengths,
    "asked for": asked_for,
    "masked documents": of_documents,
    "shared prompts": of_prompts,
    "uneven decoding": uneven_decoding,
    "random dense": random_dense,
}
