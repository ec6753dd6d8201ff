"""The table of tiles that are chosen for GPUs on which nothing was timed."""

from collections.abc import Callable

from docs.report.tables import markdown
from flash_versions.bench.results import Document, Row

KERNELS = {
    ("fa1", "forward"): "FA1 forward",
    ("fa1", "backward"): "FA1 backward",
    ("fa2", "forward"): "FA2 forward",
    ("fa2", "dkdv"): "FA2 dK, dV",
    ("fa2", "dq"): "FA2 dQ",
}
SHOWN = (64, 128, 256)  # head dims


def tiles(document: Document) -> str:
    """Configurations by kernel and architecture, and what the compiler makes of them."""
    rows = [row for row in document["rows"] if row["suite"] == "tiles"]
    found = {(row["version"], row["kernel"], row["head_dim"], row["arch"]): row for row in rows}
    arches = list(dict.fromkeys(row["arch"] for row in rows))
    body = [
        [f"{name}, D={head_dim}", *(cell(found[*kernel, head_dim, arch]) for arch in arches)]
        for head_dim in SHOWN
        for kernel, name in KERNELS.items()
    ]
    triton = document["suites"]["tiles"]["machine"]["triton"]
    note = (
        "Queries x keys, warps, stages; below, registers of a thread, KiB of shared memory, and "
        "programs that run on an SM at the same time. * where a loop accesses spilled "
        f"registers. Causal, bf16; compiled by Triton {triton}."
    )
    return f"{markdown(['', *arches], body)}\n\n{note}\n"


def cell(row: Row) -> str:
    """A configuration and its figures."""
    queries, keys = row["tile"]
    config = f"{queries} x {keys}, {row['num_warps']}, {row['num_stages']}"
    figures = f"{row['registers']}, {row['shared'] / 1024:.0f}, {row['programs']}"
    return f"{config}{'*' if any(row['spills']) else ''}<br>{figures}"


TABLES: dict[str, Callable[[Document], str]] = {"tiles": tiles}
