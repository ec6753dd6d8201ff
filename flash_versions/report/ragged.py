"""Tables of ragged work: packed sequences of random lengths, and what else can be asked for."""

import statistics
from collections.abc import Callable, Iterator

from flash_versions.bench.results import Document, Row
from flash_versions.report.tables import grouped, markdown, not_measured, pivot, where_and_when

COMMAND = "-m tests.benchmarks.packed_gpu --out FILE"
PASSES = ("forward", "backward")


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
        if not shapes:
            return not_measured(f"python {COMMAND}")
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
    if not groups:
        return not_measured(f"python {COMMAND}")
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


TABLES: dict[str, Callable[[Document], str]] = {
    "random lengths": random_lengths,
    "asked for": asked_for,
}
