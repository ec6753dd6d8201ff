"""Tables of ragged work and of shapes drawn at random: packed sequences, interval masks, decoding
over lengths and pages, dense calls, and what else can be asked for.
"""

import statistics
from collections.abc import Callable, Iterator

from docs.report.tables import grouped, markdown, pivot, where_and_when
from flash_versions.bench.results import Document, Row

HEADS = 16
PASSES = ("forward", "backward")
SERVED = (("fa3", "forward"), ("fa4", "forward"), ("fa3", "backward"))
UNEVEN, DENSE = "decode by TMA", "dense, random"
LONG = 1024  # that of `fa3.hopper.decode.host`


def random_lengths(document: Document) -> str:
    """FA3 on packed sequences against others, over all shapes and by head_dim: geometric mean of
    the ratios of rates, and the least and largest.
    """
    body = []
    for way in PASSES:
        shapes = [
            group
            for group in grouped(document, "packed, random", "shape", "pass", by="version").values()
            if next(iter(group.values()))["pass"] == way
        ]
        for name in ("flash-attn-4", "torch varlen_attn", "portable", "dense"):
            by_dim = [spread(ratios(shapes, name, head_dim)) for head_dim in (64, 128, 256, None)]
            title = {"portable": "its portable kernel", "dense": "equal rows, as long as the mean"}
            body.append([f"{way}, to {title.get(name, name)}", *by_dim])
    header = ["fa3, ratio of rates", "D=64", "D=128", "D=256", f"all {len(shapes)} shapes"]
    about = where_and_when(document, "packed, random", ["flash-attn-4"])
    return f"{markdown(header, body)}\n\nGeometric mean (least to largest). {about}.\n"


def ratios(shapes: list[dict[str, Row]], name: str, head_dim: int | None) -> Iterator[float]:
    """FA3's rate as a share of another's, of each shape of a head_dim, or of all."""
    for group in shapes:
        if head_dim in (None, group["fa3"]["head_dim"]) and "tflops" in group.get(name, {}):
            yield group["fa3"]["tflops"] / group[name]["tflops"]


def spread(found: Iterator[float]) -> str:
    """Geometric mean, least and largest."""
    values = list(found)
    if not values:
        return "-"
    return f"{statistics.geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def asked_for(document: Document) -> str:
    """FA3 with lengths, a sink and slopes: TFLOP/s, and times its portable kernel."""
    groups = grouped(document, "asked for", "head_dim", "pass", "asked", by="version")
    lines: dict[str, dict[str, str]] = {}
    for group in groups.values():
        row, portable = group["fa3"], group["portable"]
        times = row["tflops"] / portable["tflops"]
        line = lines.setdefault(f"D={row['head_dim']}, {row['pass']}", {})
        line[row["asked"] or "neither"] = f"{row['tflops']:.0f} ({times:.2f} x)"
    columns = list(dict.fromkeys(name for line in lines.values() for name in line))
    about = where_and_when(document, "asked for")
    title = "TFLOP/s of fa3 (times its portable kernel)"
    return f"{pivot(title, lines, columns, dict.get)}\n\n{about}.\n"


def of_documents(document: Document) -> str:
    """Interval masks against the same documents as packed sequences, a line for each shape."""
    found = grouped(document, "interval masks", "mask", "shape", "pass", by="version")
    forms = grouped(document, "interval masks", "mask", "shape", "pass", "form", by="version")
    shapes = sorted({shape for mask, shape, _ in found if mask == "documents"})
    body: list[list[str]] = []
    all_ratios: dict[tuple[str, str], list[float]] = {}
    for shape in shapes:
        row = found["documents", shape, "forward"]["fa3"]
        cells = []
        for version, way in SERVED:
            intervals = forms["documents", shape, way, "intervals"][version]
            packed = forms["documents", shape, way, "packed"][version]
            all_ratios.setdefault((version, way), []).append(packed["ms_p50"] / intervals["ms_p50"])
            cells.append(f"{all_ratios[version, way][-1]:.2f}")
        kind = "causal" if row["causal"] else "not causal"
        about = f"D={row['head_dim']}, {kind}, {HEADS // row['group']} key heads"
        body.append([f"mean {row['mean']}, {about}", *cells])
    body.sort(key=lambda line: int(line[0].split()[1].rstrip(",")))
    body.append(
        ["geometric mean", *(f"{statistics.geometric_mean(all_ratios[x]):.2f}" for x in SERVED)]
    )
    header = ["documents", *(f"{version}, {way}" for version, way in SERVED)]
    return f"{markdown(header, body)}\n\n{where_and_when(document, 'interval masks')}.\n"


def of_prompts(document: Document) -> str:
    """Answers that share a prompt, against rows that each have a copy of it."""
    forms = grouped(document, "interval masks", "mask", "shape", "pass", "form", by="version")
    shapes = sorted({shape for mask, shape, *_ in forms if mask == "shared prompt"})
    body = []
    for shape in shapes:
        row = forms["shared prompt", shape, "forward", "intervals"]["fa3"]
        times = [
            forms["shared prompt", shape, way, "copies"][version]["ms_p50"]
            / forms["shared prompt", shape, way, "intervals"][version]["ms_p50"]
            for version, way in SERVED
        ]
        count = f"{row['batch']} prompt{'s' if row['batch'] > 1 else ''}"
        body.append([f"{count}, D={row['head_dim']}", *(f"{x:.1f} x" for x in times)])
    header = ["prompts", *(f"{version}, {way}" for version, way in SERVED)]
    return f"{markdown(header, body)}\n\n{where_and_when(document, 'interval masks')}.\n"


def uneven_decoding(document: Document) -> str:
    """Decoding over pages and rows of different lengths: shares of a copy's rate of FA2's kernels,
    and of FA3's, which serves these on Hopper.
    """
    groups = grouped(document, UNEVEN, "name", by="version")
    body = []
    for name, group in groups.items():
        row = group.get("fa3", {})
        if "of_copy" not in row or row["page"] is None and not uneven(row):
            continue
        shares = [group[version]["of_copy"] for version in ("fa2", "fa3")]
        copy = row["tb_per_s"] / row["of_copy"]
        body.append([name, f"{copy:.2f}", *(f"{share:.2f}" for share in shares)])
    header = ["shares of a copy's rate", "copy, TB/s", "fa2", "fa3"]
    return f"{markdown(header, body)}\n\n{where_and_when(document, UNEVEN)}.\n"


def uneven(row: Row) -> bool:
    """Whether a call without pages goes to FA3's kernel (`fa3.hopper.decode.host.pays`)."""
    return row["lengths"] != "full" and row["batch"] > 1 and row["length"] >= LONG


def random_dense(document: Document) -> str:
    """Dense calls of random shapes: the better version's rate, as a ratio to the better peer's."""
    groups = grouped(document, DENSE, "number", "pass", by="version")
    body = []
    for way in PASSES:
        by_dim: dict[int, list[float]] = {}
        for group in groups.values():
            row = group["fa3"]
            if row["pass"] == way:
                by_dim.setdefault(row["head_dim"], []).append(better(group))
        found = [x for ratios in by_dim.values() for x in ratios]
        cells = [spread(iter(ratios)) for _, ratios in sorted(by_dim.items())]
        body.append([way, *cells, spread(iter(found))])
    dims = sorted({group["fa3"]["head_dim"] for group in groups.values()})
    shapes = len({number for number, _ in groups})
    header = ["ratio of rates", *(f"D={dim}" for dim in dims), f"all {shapes} shapes"]
    about = where_and_when(document, DENSE, ["flash-attn-4"])
    return f"{markdown(header, body)}\n\nGeometric mean (least to largest). {about}.\n"


def better(group: dict[str, Row]) -> float:
    """The better of fa3 and fa4 to the better of cuDNN and flash-attn-4."""
    rates = {name: row.get("tflops", 0.0) for name, row in group.items()}
    ours = max(rates.get(name, 0.0) for name in ("fa3", "fa4"))
    return ours / max(rates.get(name, 0.0) for name in ("cudnn", "flash-attn-4"))


TABLES: dict[str, Callable[[Document], str]] = {
    "random lengths": random_lengths,
    "asked for": asked_for,
    "masked documents": of_documents,
    "shared prompts": of_prompts,
    "uneven decoding": uneven_decoding,
    "random dense": random_dense,
}
