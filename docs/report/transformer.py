"""Tables of what the transformer does with the kernels: training, its own kernels, generation."""

from functools import partial
from statistics import geometric_mean

from docs.report.tables import markdown, pivot, provenance, rate, source
from flash_versions.bench.results import Document, any_row, lines, ratio, rows_of


def compared(own, other, form="{:.2f}", times="{:.2f}"):
    """A number, and how many times another it is; None for none."""
    if not own:
        return None
    ratio = other and times.format(own / other)
    return form.format(own) + (f" ({ratio} x)" if ratio else "")


def processes(document: Document) -> str:
    """Training on several GPUs: tokens per second of steps and of their phases, and times one."""
    found = lines(document, "processes", "what", by="gpus")
    sizes = sorted({gpus for rows in found.values() for gpus in rows})
    groups = {}
    for what, rows in found.items():
        for phase, called in {"step": "steps", "rollout": "rollouts", "learn": "learning"}.items():
            rates = {n: row.get(f"{phase}_tokens_per_second") for n, row in rows.items()}
            if phase == "step" or any(rates.values()):
                groups[f"{what}: {called}"] = rates

    def cell(rates: dict, gpus: int) -> str | None:
        return compared(rates.get(gpus), gpus != sizes[0] and rates.get(sizes[0]), "{:,.0f}")

    titles = {n: f"{n} GPU{'s' * (n > 1)}" for n in sizes}
    note = "bf16, the same global batch unless it says per GPU; the slowest GPU's time, median."
    return pivot("tokens per second", groups, titles, cell, note, source(document, "processes"))


def grpo_step(document: Document) -> str:
    """A step of GRPO and its phases against TRL's trainer, the fastest of the timed steps."""
    groups = {}
    for case, rows in lines(document, "grpo step", "case", by="contestant").items():
        for phase, called in {"": "step", "rollout_": "rollouts", "learn_": "learning"}.items():
            best = {name: row.get(f"{phase}seconds_best") for name, row in rows.items()}
            ours = [x for name, x in best.items() if name in ("ours", "ours again") and x]
            groups[f"{case}: {called}"] = best | {"ours": min(ours, default=None)}

    def cell(best: dict, name: str) -> str | None:
        return compared(best.get(name), name != "ours" and best["ours"], times="{:.1f}")

    titles = {"ours": "ours", "TRL": "TRL", "TRL-bf16": "TRL, weights in bf16"}
    note = "64 problems, 16 answers each, on one GPU."
    about = source(document, "grpo step", "trl", "transformers")
    return pivot("seconds (times ours)", groups, titles, cell, note, about)


def training_step(document: Document) -> str:
    """Tokens per second of training a whole model, against torch's attention under torch.compile;
    the slower of the two turns of ours counts.
    """
    base = "sdpa compiled"
    titles = {
        "ours compiled": "ours, compiled",
        base: "torch's attention, compiled",
        "ours": "ours",
        "sdpa": "torch's attention",
    }

    def cell(rows: dict, name: str) -> str | None:
        def rate_at(name: str) -> float | None:
            turns = [rows.get(x, {}) for x in (name, f"{name}, again")]
            return min((x["tokens_per_second"] for x in turns if "seconds" in x), default=None)

        return compared(rate_at(name), name != base and rate_at(base), "{:,.0f}")

    groups = lines(document, "training step", lambda row: f"{row['length']:,}", by="contestant")
    title, about = "tokens per second; tokens of a row", source(document, "training step")
    return pivot(title, groups, titles, cell, about)


def trainers(document: Document) -> str:
    """Seconds of a step of other libraries' trainers, with our attention and with torch's."""
    body = []
    for integration, rows in lines(document, "trainers", "integration", by="contestant").items():
        ours, other = (rows.get(x, {}).get("seconds") for x in ("fv_auto", "sdpa"))
        if ours and other:
            body.append([integration, f"{ours:.3f}", f"{other:.3f}", f"{other / ours:.2f}"])
    header = ["seconds of a step", "ours", "torch's attention", "torch's / ours"]
    about = source(document, "trainers", "transformers", "trl", "peft", "accelerate")
    return markdown(header, body, about)


def products(document: Document, suite: str, base: str) -> str:
    """TFLOP/s of matrix products, and the ratio of ours to another's in the same rounds."""
    groups = lines(
        document, suite, lambda row: f"{row['shape']}: {row['M']} x {row['K']} x {row['N']}"
    )
    everyone = [*dict.fromkeys(name for group in groups.values() for name in group)]

    def cell(group: dict, name: str) -> str | None:
        return rate(group, name, base if name.startswith("ours") else None)

    body = [[name, *(cell(group, x) or "-" for x in everyone)] for name, group in groups.items()]
    last = ["geometric mean"]
    for name in everyone:
        ratios = [x for group in groups.values() if (x := ratio(group, name, base))]
        ours = name.startswith("ours") and ratios
        last.append(f"{geometric_mean(ratios):.2f} x" if ours else "")
    header = [f"TFLOP/s of the product (ratio to {base})", *everyone]
    about = provenance(document, suite)
    return markdown(header, [*body, last], "Rows x inputs x outputs.", about)


def rounding(document: Document) -> str:
    """Errors of a norm and the product after it, fused and not, against fp64."""
    body = [
        [row["path"], f"{row['rms']:.3f}", f"{row['largest']:.2f}", f"{row['from_1']:,}"]
        for row in rows_of(document, "norm gemm numerics")
    ]
    header = ["difference, outputs of a size of 64", "root mean square", "largest", "1 and more"]
    about = source(document, "norm gemm numerics")
    return markdown(header, body, "4096 x 4096 outputs in bf16.", about)


def generation(document: Document) -> str:
    """Generation: tokens per second, milliseconds of a step, and those of others, at the shapes at
    which transformers was timed, too; the figure has the others.

    The ratios are to compiled steps, because a user who wants speed compiles.
    """
    titles = {
        "torch compiled": "torch alone, compiled as in gpt-fast: ms a step (times ours)",
        "transformers compiled": "transformers, static cache, compiled: ms a step (times ours)",
        "transformers": "transformers as called by default: ms a step",
    }
    keys = ("case", "batch", "prompt")
    found = {
        place: {name: row for name, row in rows.items() if "ms_per_step" in row}
        for place, rows in lines(
            document, "generate", lambda row: tuple(row[key] for key in keys), by="contestant"
        ).items()
    }
    found = {place: rows for place, rows in found.items() if len(rows) > 1}
    known = [x for x in titles if any(x in rows for rows in found.values())]
    body = []
    for (case, batch, prompt), rows in found.items():
        if row := rows.get("ours"):  # or time ran out
            step = row["ms_per_step"]
            cells = [f"{case}, batch {batch}, {prompt} tokens before"]
            cells += [f"{1000 * batch / step:,.0f}", f"{step:.2f}", f"{row['share']:.0%}"]
            for name in known:
                other = rows.get(name, {}).get("ms_per_step")
                one = compared(other, name != "transformers" and step, times="{:.1f}")
                cells.append(one or "-")
            body.append(cells)
    header = ["model", "tokens/s", "ms a step", "of the bandwidth bound", *map(titles.get, known)]
    about = source(document, "generate", "transformers")
    rows = [
        row for row in rows_of(document, "generate") if tuple(row[key] for key in keys) in found
    ]
    latest = document["suites"]["generate"]["commit"]
    earlier = {(row["date"], row["commit"]) for row in rows if row.get("commit", latest) != latest}
    if earlier:
        dates = [f"{date} (commit {commit[:7]})" for date, commit in sorted(earlier)]
        about = f"{about[:-1]}; some rows are of {' and '.join(dates)}."
    return markdown(header, body, "bf16, greedy.", about)


def shipped_models(document: Document) -> str:
    """The share of right greedy replies of each shipped model, by kind of question; not of those
    that both answer rightly.
    """
    found = lines(document, "shipped models", "asked", by="model")
    found = {kind: x for kind, x in found.items() if not kind.startswith(("beyond", "sorting"))}
    models = dict.fromkeys(model for rows in found.values() for model in rows)

    def cell(rows: dict, column: str) -> str | None:
        row = any_row(rows)
        if column == "questions":
            return f"{row['problems']:,}"
        if column == "wanted":
            return f"{row['bar']:.1%}" if row["bar"] else None
        return f"{rows[column]['right']:.1%}" if column in rows else None

    columns = ("questions", *models, "wanted")
    about = source(document, "shipped models").removeprefix("none, ")
    return pivot("right replies to", found, columns, cell, "Greedy.", about)


TABLES = {
    "processes": processes,
    "grpo step": grpo_step,
    "training step": training_step,
    "trainers": trainers,
    "gemm": partial(products, suite="gemm", base="cuBLAS"),
    "norm gemm": partial(products, suite="norm gemm", base="cuBLAS alone"),
    "norm gemm numerics": rounding,
    "generate": generation,
    "shipped models": shipped_models,
}
