"""The README's sentence with a rate, its table of what each version is worth, and tiles."""

from docs.report.tables import markdown, rate, source, where
from flash_versions import VERSIONS
from flash_versions.bench.results import Document, label, lines, ratio, rows_of

SHAPE = "D=128 causal, S=8192"  # (B, H, S, D) = (2, 16, 8192, 128), the shape of the project's bar
PEERS = ("torch fa2", "cudnn", "flash-attn-4", "plain")
LINK = "flash_versions/versions"
HOPPER = ("fa3", "fa4")  # versions with kernels of their own there, which the table is of


def hook(document: Document) -> str:
    """The fastest version's rate, and how it compares with what torch users have."""
    group = lines(document, "table", where)[SHAPE]
    rates = {name: row["tflops"] for name, row in group.items() if "tflops" in row}
    best = max((rates.get(name, 0.0), name) for name in VERSIONS)[1]
    cudnn, flash, torch = (ratio(group, best, x) for x in ("cudnn", "flash-attn-4", "torch fa2"))
    gpu = document["suites"]["table"]["machine"]["gpu"]
    return (
        f"**{rates[best]:.0f} TFLOP/s on an {gpu}: {cudnn:.2f} times cuDNN's rate, "
        f"{flash:.2f} times flash-attn-4's, {torch:.2f} times that of "
        f"torch's FlashAttention-2** (causal, bf16, head_dim 128, 8192 tokens).\n"
    )


def steps(document: Document) -> str:
    """A row for each version: what the version before it wastes, its idea, its rates and what the
    step gained; then the other implementations at the same shape.
    """
    groups = [lines(document, suite, where).get(SHAPE, {}) for suite in ("table", "backward")]
    body, before = [], ""
    for name, version in VERSIONS.items():
        links = f"[{name.upper()}]({LINK}/{name}/forward.py)"
        if name in HOPPER:
            links += f", [on Hopper]({LINK}/{name}/hopper/forward.py)"
        rates = [rate(group, name, before, f" {before.upper()}") or "-" for group in groups]
        if name == "fa4":
            rates[0] += "; [both ideas are off here on Hopper](#fa4-on-hopper-and-on-blackwell)"
            rates[1] += "; FA3's kernel"
        body.append([links, version.wasted, version.idea, *rates])
        before = name
    for name in PEERS:
        body.append([label(name), "", "", *(rate(group, name) or "-" for group in groups)])
    header = [
        "version", "what the version before wastes", "idea", "forward, TFLOP/s", "backward, TFLOP/s"
    ]  # fmt: skip
    note = "Causal, bf16, (batch, tokens, heads, head_dim) = (2, 8192, 16, 128); M queries, N keys;"
    note += " masked products are not counted."
    forward, backward = (source(document, x, "flash-attn-4") for x in ("table", "backward"))
    return markdown(header, body, note, f"Forward: {forward}", f"Backward: {backward}")


def switched_off(document: Document) -> str:
    """Why both ideas of FA4 are off by default on Hopper from 33 to 128 dims."""
    group = lines(document, "ablation", where)["D=128 causal, S=16384"]
    ideas = ("rescale if grown", "1/8 polynomial")
    rescale, polynomial = (ratio(group, f"fa4 {idea}", "fa4") for idea in ideas)
    return (
        "On Hopper, in 16 bits and from 33 to 128 dims, both ideas of FA4 are off by default, "
        "because they cost more than they save. Testing whether a rescale can be left out "
        f"leaves {rescale:.2f} of the speed, and an eighth of the exponentials by polynomial "
        f"{polynomial:.2f} (causal, head_dim 128, 16384 tokens). The ideas are "
        "meant for Blackwell, whose tensor cores are faster while its exponentials are not.\n"
    )


def lessons(document: Document) -> str:
    """The share of the engine's rate that each lesson's forward has."""
    rows = [x for x in rows_of(document, "lessons") if x["pass"] == "forward"]

    def shares(lesson: str, version: str) -> str:
        groups = [
            {x["version"]: x for x in rows if x["name"] == f"128 {mask}"}
            for mask in ("causal", "full")
        ]
        return " and ".join(f"{ratio(x, f'lesson-{lesson}', version):.2f}" for x in groups)

    fa3, fa4 = shares("fa3-hopper", "fa3"), shares("fa4-hopper", "fa4")
    return (
        "Lessons reach these fractions of the forward's rate with every option, causal and full, "
        f"at head_dim 128 and 8192 tokens: FA1 {shares('fa1', 'fa1')}, FA2 "
        f"{shares('fa2', 'fa2')}, FA3 on Hopper {fa3}, FA4 on Hopper, with both ideas on, {fa4}. "
        f"{source(document, 'lessons')}\n"
    )


TABLES = {"hook": hook, "steps": steps, "lessons": lessons, "fa4 on hopper": switched_off}
