"""Tables of what the transformer does with the kernels: training, its own kernels, generation."""

from collections.abc import Callable
from functools import partial
from statistics import geometric_mean

from docs.report.tables import grouped, markdown, pivot, provenance, rate, where_and_when
from flash_versions.bench.peers import PEERS
from flash_versions.bench.results import Document, Row, any_row, label, mask, names, rate_of


def processes(document: Document, suite: str = "processes") -> str:
    """Training on several GPUs: tokens per second of steps and of their phases, and times one."""
    found = grouped(document, suite, "what", by="gpus")
    sizes = sorted({gpus for rows in found.values() for gpus in rows})
    groups = {}
    for what, rows in found.items():
        for phase, called in {"step": "steps", "rollout": "rollouts", "learn": "learning"}.items():
            rates = {n: row.get(f"{phase}_tokens_per_second") for n, row in rows.items()}
            if phase == "step" or any(rates.values()):
                groups[f"{what}: {called}"] = rates

    def cell(rates: dict[int, float | None], gpus: str) -> str | None:
        one, own = rates.get(sizes[0]), rates.get(int(gpus))
        ratio = f" ({own / one:.2f} x)" if own and one and int(gpus) != sizes[0] else ""
        return f"{own:,.0f}{ratio}" if own else None

    titles = {str(n): f"{n} GPU{'s' * (n > 1)}" for n in sizes}
    table = pivot("tokens per second", groups, titles, cell, titles)
    note = "bf16, the same global batch unless it says per GPU; the slowest GPU's time, median. "
    return f"{table}\n\n{note}{where_and_when(document, suite)}.\n"


def grpo_step(document: Document) -> str:
    """A step of GRPO and its phases against TRL's trainer, the fastest of the timed steps."""
    found = grouped(document, "grpo step", "case", by="contestant")
    groups = {}
    for case, rows in found.items():
        for phase, called in {"": "step", "rollout_": "rollouts", "learn_": "learning"}.items():
            best = {name: row.get(f"{phase}seconds_best") for name, row in rows.items()}
            ours = [x for name, x in best.items() if name in ("ours", "ours again") and x]
            groups[f"{case}: {called}"] = best | {"ours": min(ours, default=None)}

    def cell(best: dict[str, float | None], name: str) -> str | None:
        own, other = best.get("ours"), best.get(name)
        ratio = f" ({other / own:.1f} x)" if own and other and name != "ours" else ""
        return f"{other:.2f}{ratio}" if other else None

    titles = {"TRL-bf16": "TRL, weights in bf16"}
    table = pivot("seconds (times ours)", groups, ("ours", "TRL", "TRL-bf16"), cell, titles)
    about = where_and_when(document, "grpo step", ("trl", "transformers"))
    return f"{table}\n\n64 problems, 16 answers each, on one GPU. {about}.\n"


def layer(document: Document) -> str:
    """Milliseconds of one layer, forward and backward, against the faster of torch's backends."""
    rows = {row["version"]: row for row in document["rows"] if row["suite"] == "layer"}
    everyone = names(document, "layer")
    base = min(rows[name]["seconds"] for name in everyone if name in PEERS)
    median, spread = ["median"], ["fastest and slowest round"]
    for name in everyone:
        times, seconds = rows[name]["times"], rows[name]["seconds"]
        ratio = "" if name in PEERS else f" ({base / seconds:.2f} x)"
        median.append(f"{1000 * seconds:.2f}{ratio}")
        spread.append(f"{1000 * min(times):.2f}, {1000 * max(times):.2f}")
    header = ["milliseconds (ratio to torch's best)", *map(label, everyone)]
    row, protocol = rows[everyone[0]], document["suites"]["layer"]["protocol"]
    note = (
        f"(B, S, H, D) = ({row['B']}, {row['S']}, {row['H']}, {row['D']}), {mask(row)}, bf16; "
        f"{protocol['rounds']} rounds in which the competitors take turns, "
        f"{protocol['steps']} calls each."
    )
    table = markdown(header, [median, spread])
    return f"{table}\n\n{note} {where_and_when(document, 'layer')}.\n"


def training_step(document: Document) -> str:
    """Tokens per second of training a whole model, against torch's attention under torch.compile;
    the slower of the two turns of ours counts.
    """
    found = grouped(document, "training step", "length", by="contestant")
    base, again = "sdpa compiled", "ours compiled, again"

    def rate_at(rows: dict[str, Row], name: str) -> float | None:
        turns = (name, again) if name == "ours compiled" else (name,)
        return min((rows[x]["tokens_per_second"] for x in turns if "seconds" in rows.get(x, {})),
                   default=None)  # fmt: skip

    def cell(rows: dict[str, Row], name: str) -> str | None:
        own, other = rate_at(rows, name), rate_at(rows, base)
        if own is None:
            return None
        ratio = f" ({own / other:.2f} x)" if other and name != base else ""
        return f"{own:,.0f}{ratio}"

    titles = {
        "ours compiled": "ours, compiled",
        base: "torch's attention, compiled",
        "ours": "ours",
        "sdpa": "torch's attention",
    }
    rows = {f"{length:,}": group for length, group in found.items()}
    table = pivot("tokens per second; tokens of a row", rows, titles, cell, titles)
    return f"{table}\n\n{where_and_when(document, 'training step')}.\n"


def trainers(document: Document) -> str:
    """Seconds of a step of other libraries' trainers, with our attention and with torch's."""
    libraries = "transformers", "trl", "peft", "accelerate"
    found = grouped(document, "trainers", "integration", by="contestant")
    lines = []
    for integration, rows in found.items():
        ours, other = (rows.get(x, {}).get("seconds") for x in ("fv_auto", "sdpa"))
        if ours and other:
            lines.append([integration, f"{ours:.3f}", f"{other:.3f}", f"{other / ours:.2f}"])
    table = markdown(["seconds of a step", "ours", "torch's attention", "torch's / ours"], lines)
    return f"{table}\n\n{where_and_when(document, 'trainers', libraries)}.\n"


def products(document: Document, suite: str, base: str) -> str:
    """TFLOP/s of matrix products, and the ratio of ours to another's in the same rounds."""
    groups = {}
    for shape, group in grouped(document, suite, "shape", by="version").items():
        row = any_row(group)
        groups[f"{shape}: {row['M']} x {row['K']} x {row['N']}"] = group
    everyone = [*dict.fromkeys(name for group in groups.values() for name in group)]
    means = {}
    for name in [name for name in everyone if name.startswith("ours")]:
        pairs = [(rate_of(group, name), rate_of(group, base)) for group in groups.values()]
        if ratios := [own / other for own, other in pairs if own and other]:
            means[name] = f"{geometric_mean(ratios):.2f} x"

    def cell(group: dict[str, Row], name: str) -> str | None:
        return rate(group, name, base if name.startswith("ours") else None)

    table = pivot(f"TFLOP/s of the product (ratio to {base})", groups, everyone, cell)
    last = " | ".join(["geometric mean", *(means.get(name, "") for name in everyone)])
    note = "Rows x inputs x outputs. "
    return f"{table}\n| {last} |\n\n{note}{provenance(document, suite)}\n"


def rounding(document: Document) -> str:
    """Errors of a norm and the product after it, fused and not, against fp64."""
    rows = [row for row in document["rows"] if row["suite"] == "norm gemm numerics"]
    body = [
        [row["path"], f"{row['rms']:.3f}", f"{row['largest']:.2f}", f"{row['from_1']:,}"]
        for row in rows
    ]
    header = ["difference, outputs of a size of 64", "root mean square", "largest", "1 and more"]
    about = where_and_when(document, "norm gemm numerics")
    return f"{markdown(header, body)}\n\n4096 x 4096 outputs in bf16. {about}.\n"


def generation(document: Document, compared_only: bool = False) -> str:
    """Generation: tokens per second, milliseconds of a step, and those of others.

    The ratios are to compiled steps, because a user who wants speed compiles.

    Args:
        document: of which the suite "generate" is shown.
        compared_only: show only the larger models (of 1 and 8 billion weights), at the shapes at
            which transformers was timed, too.
    """
    cases = grouped(document, "generate", "case", "batch", "prompt", by="contestant")
    others = {
        "torch compiled": "torch alone, compiled as in gpt-fast: ms a step (times ours)",
        "transformers compiled": "transformers, static cache, compiled: ms a step (times ours)",
        "transformers": "transformers as called by default: ms a step",
    }
    steps = {
        where: {name: row["ms_per_step"] for name, row in rows.items() if "ms_per_step" in row}
        for where, rows in cases.items()
    }
    if compared_only:
        steps = {w: x for w, x in steps.items() if w[0].startswith("llama") and len(x) > 1}
    known = {name for found in steps.values() for name in found}
    titles = {name: title for name, title in others.items() if name in known}
    body = []
    for (case, batch, prompt), found in steps.items():
        if step := found.get("ours"):  # or time ran out
            cells = [f"{case}, batch {batch}, {prompt} tokens before"]
            share = cases[case, batch, prompt]["ours"]["share"]
            cells += [f"{1000 * batch / step:,.0f}", f"{step:.2f}", f"{share:.0%}"]
            for name in titles:
                other = found.get(name)
                ratio = f" ({other / step:.1f} x)" if other and name != "transformers" else ""
                cells.append(f"{other:.2f}{ratio}" if other else "-")
            body.append(cells)
    header = ["model", "tokens/s", "ms a step", "of the bandwidth bound", *titles.values()]
    return f"{markdown(header, body)}\n\nbf16, greedy. {generated_when(document, [*steps])}.\n"


def generated_when(document: Document, shown: list[tuple]) -> str:
    """Where and when generation was measured, and which rows are of another commit."""
    about = where_and_when(document, "generate", ("transformers",))
    earlier = {
        (row["date"], row["commit"][:7])
        for row in document["rows"]
        if row["suite"] == "generate" and (row["case"], row["batch"], row["prompt"]) in shown
        if "commit" in row and row["commit"] != document["suites"]["generate"]["commit"]
    }
    dates = [f"{date} (commit {commit})" for date, commit in sorted(earlier)]
    return f"{about}; some rows are of {' and '.join(dates)}" if dates else about


def shipped_models(document: Document) -> str:
    """The share of right greedy replies of each shipped model, by kind of question."""
    found = grouped(document, "shipped models", "asked", by="model")
    models = dict.fromkeys(model for rows in found.values() for model in rows)

    def cell(rows: dict[str, Row], column: str) -> str | None:
        row = next(iter(rows.values()))
        if column == "questions":
            return f"{row['problems']:,}"
        if column == "wanted":
            return f"{row['bar']:.1%}" if row["bar"] else None
        return f"{rows[column]['right']:.1%}" if column in rows else None

    columns = ("questions", *models, "wanted")
    table = pivot("right replies to", found, columns, cell, {name: name for name in columns})
    where = where_and_when(document, "shipped models").removeprefix("none, ")
    return f"{table}\n\nGreedy. {where}.\n"


TABLES: dict[str, Callable[[Document], str]] = {
    "processes": processes,
    "processes of four": partial(processes, suite="processes of four"),
    "grpo step": grpo_step,
    "layer": layer,
    "training step": training_step,
    "trainers": trainers,
    "gemm": partial(products, suite="gemm", base="cuBLAS"),
    "gemm swiglu": partial(products, suite="gemm swiglu", base="torch"),
    "norm gemm": partial(products, suite="norm gemm", base="cuBLAS alone"),
    "norm gemm swiglu": partial(products, suite="norm gemm swiglu", base="cuBLAS alone"),
    "norm gemm numerics": rounding,
    "generate": generation,
    "shipped models": shipped_models,
    "headline generate": partial(generation, compared_only=True),
}
