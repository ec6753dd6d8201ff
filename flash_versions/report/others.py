"""Tables of this package beside others: every head dim, the deterministic backward, the host."""

import statistics
from collections.abc import Callable

from flash_versions.bench.results import Document, Row
from flash_versions.report.tables import grouped, markdown, not_measured, where_and_when
from flash_versions.versions.fa3.hopper.backward.config import MOST_ALTERNATING

HEAD_DIMS = "-m tests.benchmarks.headdims_gpu --defaults --out FILE"
IN_TURNS = "-m tests.benchmarks.deterministic_gpu --out FILE"
HOST = "-m tests.benchmarks.host_gpu --out FILE"
PEERS = ("cudnn", "flash-attn-4")


def head_dims(document: Document) -> str:
    """Forwards of every head dim: TFLOP/s, and over all lengths the ratio to the better peer."""
    rows = [row for row in document["rows"] if row["suite"] == "head dims" and "tflops" in row]
    rows = [row for row in rows if row["name"] in ("", served_by(row["dims"]))]
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        key = (*row["dims"], row["causal"], row["length"])
        groups.setdefault(key, {})[row["version"]] = row
    if not groups:
        return not_measured(f"python {HEAD_DIMS}")
    lengths = sorted({key[-1] for key in groups})
    shown = [n for n in (2048, 8192) if n in lengths] or lengths[:1]
    body = []
    for dims in sorted({key[:2] for key in groups}):
        for causal in (False, True):
            kind = [group for key, group in groups.items() if key[:3] == (*dims, causal)]
            if not kind:
                continue
            name = f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]}, {dims[1]} of v"
            cells = [f"{name}, {'causal' if causal else 'full'}"]
            for n in shown:
                group = groups.get((*dims, causal, n), {})
                for version in (*PEERS, "fa3", "fa4"):
                    cells.append(f"{group[version]['tflops']:.0f}" if version in group else "-")
            ratios = [x for group in kind for x in [to_the_better(group)] if x]
            body.append([*cells, f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-"])
    columns = [f"{version}, {n // 1024}k" for n in shown for version in (*PEERS, "fa3", "fa4")]
    header = ["head_dim", *columns, "ratio"]
    about = where_and_when(document, "head dims", ["flash-attn-4"])
    note = (
        "TFLOP/s; ratio: the better of fa3 and fa4 to the better peer. Above head_dim 128 without "
    )
    note += "sections of equal size, which came after this run"
    return f"{markdown(header, body)}\n\n{note}. {about}.\n"


def served_by(dims: list[int]) -> str:
    """The candidate that is the default since the run was looked at."""
    return "no ping-pong" if max(dims) > 128 else "default"


def to_the_better(group: dict[str, Row]) -> float | None:
    """The rate of the faster of FA3 and FA4 as a share of the faster peer's."""
    peers = [group[name]["tflops"] for name in PEERS if name in group]
    own = [group[name]["tflops"] for name in ("fa3", "fa4") if name in group]
    return max(own) / max(peers) if peers and own else None


def in_turns(document: Document) -> str:
    """The deterministic backward: TFLOP/s, and its share of the rate in any order."""
    keys = "head_dim", "causal", "group", "S"
    groups = grouped(document, "deterministic backward", *keys, by="version")
    if not groups:
        return not_measured(f"python {IN_TURNS}")
    versions = ("fa3", "fa3 deterministic", "fa3 portable")
    body = []
    for (head_dim, causal, heads, length), group in sorted(groups.items()):
        cells = [
            f"D={head_dim}, {'causal' if causal else 'full'}, S={length}, {heads} to a key head"
        ]
        rates = {name: row["tflops"] for name, row in group.items() if "tflops" in row}
        few = f"fa3 deterministic, section {MOST_ALTERNATING}"
        if not causal and group["fa3"]["section"] > MOST_ALTERNATING:  # the default since then
            rates["fa3 deterministic"] = rates[few]
        cells += [f"{rates[name]:.0f}" for name in versions]
        cells.append(f"{rates['fa3 deterministic'] / rates['fa3']:.2f}")
        body.append(cells)
    header = ["TFLOP/s", "fa3", "deterministic", "portable", "share of fa3"]
    about = where_and_when(document, "deterministic backward")
    return f"{markdown(header, body)}\n\n{about}.\n"


def on_the_host(document: Document) -> str:
    """The host's time for a call beside others', and a layer's."""
    found = [row for row in document["rows"] if row["suite"] == "host" and "us" in row]
    if not found:
        return not_measured(f"python {HOST}")
    names = list(dict.fromkeys(row["contestant"] for row in found))
    lines: dict[str, dict[str, float]] = {}
    for row in found:
        shape = ", ".join(map(str, row["shape"]))
        packed = ", packed" if row["packed"] else ""
        line = f"{row['what']}{packed}, ({shape}), {row['measured']}"
        lines.setdefault(line, {})[row["contestant"]] = row["us"]
    body = [
        [line, *(f"{times[name]:.0f}" if name in times else "-" for name in names)]
        for line, times in lines.items()
    ]
    about = where_and_when(document, "host", ["flash-attn-4"])
    return f"{markdown(['microseconds', *names], body)}\n\n{about}.\n"


TABLES: dict[str, Callable[[Document], str]] = {
    "head dims": head_dims,
    "deterministic backward": in_turns,
    "host": on_the_host,
}
