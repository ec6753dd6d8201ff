"""The table of what the backward's units do, from the profile that `profile_backward` made."""

from collections.abc import Callable

from flash_versions.bench.results import Document, Row, mask
from flash_versions.report.tables import markdown, where_and_when

NOT_MEASURED = (
    "Not measured yet: `python -m flash_versions.bench.profile_backward --out "
    "docs/results/h200-backward-profile.json`.\n"
)
# Units whose work is a share of what they could do, and what the table calls them.
UNITS = {
    "tensor_pct": "tensor cores",
    "exp_pct": "exponentials and conversions (XU)",
    "fma_pct": "multiply-adds (FMA)",
    "alu_pct": "comparisons, integers (ALU)",
    "issue_pct": "issue slots",
    "shared_pct": "shared memory, loads and stores of threads",
    "bank_read_pct": "shared memory and L1, banks read",
    "bank_write_pct": "shared memory and L1, banks written",
    "l2_pct": "L2",
    "dram_pct": "memory",
}
SHOWN_STALLS = 3


def heading(row: Row) -> str:
    """What a column is of."""
    share = f", {row['eighths']}/8 polynomial" if row["eighths"] else ""
    return f"D={row['D']} {mask(row)}{share}"


def busiest(row: Row) -> str:
    """The two units that are busiest, in words."""
    first, second = sorted((x for x in UNITS if x in row), key=lambda x: -row[x])[:2]
    return (
        f"At {heading(row)} the busiest are: {UNITS[first]}, {row[first]:.0f} %, and "
        f"{UNITS[second]}, {row[second]:.0f} %."
    )


def backward_profile(document: Document) -> str:
    """Percent of the peak of each unit, bank conflicts, registers and stalls; one column a call."""
    rows = [row for row in document["rows"] if row["suite"] == "backward profile"]
    if not rows:
        return NOT_MEASURED

    def line(called: str, name: str, form: str) -> list[str]:
        return [called, *(format(row[name], form) if name in row else "-" for row in rows)]

    body = [line(called, name, ".0f") for name, called in UNITS.items() if any_has(rows, name)]
    conflicts = {"load_conflicts": "loads", "store_conflicts": "stores"}
    for name, what in conflicts.items():
        if any_has(rows, name):
            cells = [f"{row[name] / 1e6:.1f}" if name in row else "-" for row in rows]
            body.append([f"bank conflicts of {what}, million", *cells])
    body.append(line("registers of a thread at launch", "registers", ".0f"))
    body.append(["cycles stalled for an instruction", *map(stalls, rows)])
    body.append(line("microseconds under the profiler", "microseconds", ",.0f"))
    said = " ".join(busiest(row) for row in rows if not row["causal"] and not row["eighths"])
    about = where_and_when(document, "backward profile")
    table = markdown(["percent of the peak", *map(heading, rows)], body)
    return f"{table}\n\n{said} S={rows[0]['N']}, 16k tokens, bf16. {about}.\n"


def any_has(rows: list[Row], name: str) -> bool:
    """Whether a counter was read for any row."""
    return any(name in row for row in rows)


def stalls(row: Row) -> str:
    """The largest stalls, as the profiler calls them."""
    found = list(row["stalls"].items())[:SHOWN_STALLS]
    return ", ".join(f"{name.replace('_', ' ')} {cycles:.1f}" for name, cycles in found)


TABLES: dict[str, Callable[[Document], str]] = {"backward profile": backward_profile}
