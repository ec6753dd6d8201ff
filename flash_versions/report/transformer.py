"""Tables of what the transformer does with the kernels: training, its own kernels, generation."""

from collections.abc import Callable
from functools import partial
from statistics import geometric_mean

from flash_versions.bench.peers import PEERS
from flash_versions.bench.results import Document, Row, any_row, label, mask, names, rate_of
from flash_versions.report.tables import markdown, provenance, where_and_when

KERNELS_NOT_MEASURED = "Not measured yet: `python tests/benchmarks/kernels_speed.py --out FILE`.\n"


def processes(document: Document, suite: str = "processes") -> str:
    """Training on several GPUs: tokens per second of steps and of their phases, and times one."""
    found: dict[str, dict[int, Row]] = {}
    for row in document["rows"]:
        if row["suite"] == suite:
            found.setdefault(row["what"], {})[row["gpus"]] = row
    if not found:
        return "Not measured yet: `python tests/benchmarks/parallel_gpu.py --out FILE`.\n"
    sizes = sorted({gpus for rows in found.values() for gpus in rows})
    phases = {"step": "steps", "rollout": "rollouts", "learn": "learning"}
    body = []
    for what, rows in found.items():
        for phase, called in phases.items():
            rates = [rows.get(gpus, {}).get(f"{phase}_tokens_per_second") for gpus in sizes]
            if phase != "step" and not any(rates):
                continue
            ratios = [f" ({r / rates[0]:.2f} x)" if r and rates[0] else "" for r in rates[1:]]
            cells = [f"{r:,.0f}{ratio}" if r else "-" for r, ratio in zip(rates, ["", *ratios])]
            body.append([f"{what}: {called}", *cells])
    header = ["tokens per second", *(f"{n} GPU{'s' * (n > 1)}" for n in sizes)]
    note = "bf16, the same global batch unless it says per GPU; the slowest GPU's time, median. "
    return f"{markdown(header, body)}\n\n{note}{where_and_when(document, suite)}.\n"


def grpo_step(document: Document) -> str:
    """A step of GRPO and its phases against TRL's trainer, the fastest of the timed steps."""
    found: dict[str, dict[str, Row]] = {}
    for row in document["rows"]:
        if row["suite"] == "grpo step":
            found.setdefault(row["case"], {})[row["contestant"]] = row
    if not found:
        return "Not measured yet: `python tests/benchmarks/trl_speed_gpu.py --out FILE`.\n"
    body = []
    for case, rows in found.items():
        ours = [rows[name] for name in ("ours", "ours again") if name in rows]
        for phase, called in {"": "step", "rollout_": "rollouts", "learn_": "learning"}.items():
            key = f"{phase}seconds_best"
            own = min((row[key] for row in ours if key in row), default=None)
            cells = [f"{case}: {called}", f"{own:.2f}" if own else "-"]
            for name in ("TRL", "TRL-bf16"):
                theirs = rows.get(name, {}).get(key)
                ratio = f" ({theirs / own:.1f} x)" if own and theirs else ""
                cells.append(f"{theirs:.2f}{ratio}" if theirs else "-")
            body.append(cells)
    header = ["seconds (times ours)", "ours", "TRL", "TRL, weights in bf16"]
    libraries = ("trl", "transformers")
    about = where_and_when(document, "grpo step", libraries)
    return f"{markdown(header, body)}\n\n64 problems, 16 answers each, on one GPU. {about}.\n"


def layer(document: Document) -> str:
    """Milliseconds of one layer, forward and backward, against the faster of torch's backends."""
    rows = {row["version"]: row for row in document["rows"] if row["suite"] == "layer"}
    if not rows:
        return "Not measured yet: `python tests/benchmarks/training_gpu.py --out FILE`.\n"
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


def products(document: Document, suite: str, base: str) -> str:
    """TFLOP/s of matrix products, and the ratio of ours to another's in the same rounds."""
    groups: dict[str, dict[str, Row]] = {}
    for row in document["rows"]:
        if row["suite"] == suite:
            groups.setdefault(row["shape"], {})[row["version"]] = row
    if not groups:
        return KERNELS_NOT_MEASURED
    everyone = [*dict.fromkeys(name for group in groups.values() for name in group)]
    ours = [name for name in everyone if name.startswith("ours")]
    body: list[list[str]] = []
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    for shape, group in groups.items():
        row = any_row(group)
        cells = [f"{shape}: {row['M']} x {row['K']} x {row['N']}"]
        for name in everyone:
            rate, other = rate_of(group, name), rate_of(group, base)
            if rate and other and name in ours:
                ratios[name].append(rate / other)
            ratio = f" ({rate / other:.2f} x)" if rate and other and name in ours else ""
            cells.append(f"{rate:.0f}{ratio}" if rate else "-")
        body.append(cells)
    means = [f"{geometric_mean(ratios[n]):.2f} x" if ratios.get(n) else "" for n in everyone]
    body.append(["geometric mean", *means])
    header = [f"TFLOP/s of the product (ratio to {base})", *everyone]
    note = "Rows x inputs x outputs. "
    return f"{markdown(header, body)}\n\n{note}{provenance(document, suite)}\n"


def rounding(document: Document) -> str:
    """Errors of a norm and the product after it, fused and not, against fp64."""
    rows = [row for row in document["rows"] if row["suite"] == "norm gemm numerics"]
    if not rows:
        return KERNELS_NOT_MEASURED
    body = [
        [row["path"], f"{row['rms']:.3f}", f"{row['largest']:.2f}", f"{row['from_1']:,}"]
        for row in rows
    ]
    header = ["difference, outputs of a size of 64", "root mean square", "largest", "1 and more"]
    about = where_and_when(document, "norm gemm numerics")
    return f"{markdown(header, body)}\n\n4096 x 4096 outputs in bf16. {about}.\n"


def generation(document: Document, compared_only: bool = False) -> str:
    """Tokens per second of generation, its share of the bandwidth bound, and transformers'; of what
    both were timed at only, if asked for.
    """
    cases: dict[tuple, dict[str, Row]] = {}
    for row in document["rows"]:
        if row["suite"] == "generate":
            place = (row["case"], row["batch"], row.get("prompt"))
            cases.setdefault(place, {})[row["contestant"]] = row
    if not cases:
        return "Not measured yet: `python tests/benchmarks/generate_speed.py --out FILE`.\n"
    body = []
    for (case, batch, prompt), rows in cases.items():
        cells = [f"{case}, batch {batch}, {prompt} tokens before"]
        ours, theirs = rows.get("ours", {}), rows.get("transformers", {})
        step = ours.get("ms_per_step")
        if not step or (compared_only and "ms_per_step" not in theirs):  # or time ran out
            continue
        cells += [f"{1000 * batch / step:,.0f}", f"{step:.2f}", f"{ours['share']:.0%}"]
        other = theirs.get("ms_per_step")
        cells += [f"{other:.2f}", f"{other / step:.1f} x"] if other else ["-", "-"]
        both = "seconds" in ours and "seconds" in theirs
        cells.append(f"{theirs['seconds'] / ours['seconds']:.1f} x" if both else "-")
        body.append(cells)
    header = ["model", "tokens/s", "ms a step", "of the bandwidth bound", "transformers: ms a step"]
    header += ["times faster", "a whole call"]
    about = where_and_when(document, "generate", ("transformers",))
    return f"{markdown(header, body)}\n\nbf16, greedy. {about}.\n"


TABLES: dict[str, Callable[[Document], str]] = {
    "processes": processes,
    "processes of four": partial(processes, suite="processes of four"),
    "grpo step": grpo_step,
    "layer": layer,
    "gemm": lambda document: products(document, "gemm", "cuBLAS"),
    "gemm swiglu": lambda document: products(document, "gemm swiglu", "torch"),
    "norm gemm": lambda document: products(document, "norm gemm", "cuBLAS alone"),
    "norm gemm swiglu": lambda document: products(document, "norm gemm swiglu", "cuBLAS alone"),
    "norm gemm numerics": rounding,
    "generate": generation,
    "headline generate": lambda document: generation(document, compared_only=True),
}
