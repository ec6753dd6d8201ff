"""Sentences and tables as the output of a cell."""

from collections.abc import Iterable, Sequence
from typing import Any

from IPython.display import Markdown, display

# Rows of `loop_table`: a label, and the instructions that it sums up.
ARITHMETIC = {
    "exponential (MUFU)": ("MUFU",),
    "multiplications (FMUL, FMUL2)": ("FMUL", "FMUL2"),
    "multiply-adds (FFMA)": ("FFMA",),
    "additions (FADD)": ("FADD",),
    "comparisons and selections (FSETP, ISETP, FSEL)": ("FSETP", "ISETP", "FSEL"),
    "maxima (FMNMX, FMNMX3)": ("FMNMX", "FMNMX3"),
}


def say(text: str) -> None:
    """Display Markdown."""
    display(Markdown(text))


def table(head: Sequence[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Display rows as a table: the first column is text, the others are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    say("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))


def per_score(found: dict[str, Any], scores: int = 128 * 64) -> list[dict[str, float]]:
    """Instructions of each hot loop for each score of a block (128 queries, 64 keys), by name; the
    shortest loop first, which has no mask.
    """
    threads = 32 * found["num_warps"]
    loops = sorted((x["opcodes"] for x in found["hot_loops"]), key=lambda x: sum(x.values()))
    return [{name: n * threads / scores for name, n in opcodes.items()} for opcodes in loops]


def loop_table(columns: dict[str, dict[str, float]]) -> None:
    """Display loops (instructions by name) side by side: {title: loop}."""
    rows = [
        [label, *(f"{sum(x.get(name, 0) for name in names):.2f}" for x in columns.values())]
        for label, names in ARITHMETIC.items()
    ]
    rows.append(["all instructions", *(f"{sum(x.values()):.2f}" for x in columns.values())])
    table(["instructions for each score", *columns], rows)
