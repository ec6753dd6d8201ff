"""The README's sentence with a rate, and its table: what each version is worth."""

from collections.abc import Callable

from docs.report.tables import by_shape, markdown, where_and_when
from flash_versions import VERSIONS
from flash_versions.bench.results import Document, Row, label, rate_of

SHAPE = "D=128 causal, S=8192"  # (B, H, S, D) = (2, 16, 8192, 128), the shape of the project's bar
PEERS = ("torch fa2", "cudnn", "flash-attn-4", "plain")
LINK = "flash_versions/versions"
HOPPER = ("fa3", "fa4")  # versions with kernels of their own there, which the table is of


def hook(document: Document) -> str:
    """The fastest version's rate, and how it compares with what torch users have."""
    group = by_shape(document, "table").get(SHAPE, {})
    rates = {name: row["tflops"] for name, row in group.items() if "tflops" in row}
    cudnn, torch_fa2, flash = rates["cudnn"], rates["torch fa2"], rates["flash-attn-4"]
    best = max((rates.get(name, 0.0), name) for name in VERSIONS)
    gpu = document["suites"]["table"]["machine"]["gpu"]
    return (
        f"**{best[0]:.0f} TFLOP/s on an {gpu}: {best[0] / cudnn:.2f} times cuDNN's rate, "
        f"{best[0] / flash:.2f} times flash-attn-4's, {best[0] / torch_fa2:.2f} times that of "
        f"torch's FlashAttention-2** (causal, bf16, head_dim 128, 8192 tokens).\n"
    )


def steps(document: Document) -> str:
    """A row for each version: what the version before it wastes, its idea, its rates and what the
    step gained; then the other implementations at the same shape.
    """
    forward = by_shape(document, "table").get(SHAPE, {})
    backward = by_shape(document, "backward").get(SHAPE, {})
    body, before = [], ""
    for name, version in VERSIONS.items():
        links = f"[{name.upper()}]({LINK}/{name}/forward.py)"
        if name in HOPPER:
            links += f", [on Hopper]({LINK}/{name}/hopper/forward.py)"
        cells = [links, version.wasted, version.idea]
        rates = [gained(group, name, before) for group in (forward, backward)]
        if name == "fa4":
            where = "#fa4-on-hopper-and-on-blackwell"
            rates[0] += f"; [both ideas are off here on Hopper]({where})"
            rates[1] += "; FA3's kernel"
        body.append([*cells, *rates])
        before = name
    for name in PEERS:
        rates = [f"{rate_of(group, name) or 0:.0f}" for group in (forward, backward)]
        body.append([label(name), "", "", *(rate if rate != "0" else "-" for rate in rates)])
    about = "version", "what the version before wastes", "idea"
    header = [*about, "forward, TFLOP/s", "backward, TFLOP/s"]
    note = (
        "Causal, bf16, (batch, tokens, heads, head_dim) = (2, 8192, 16, 128); M queries, N keys; "
        "masked products are not counted. "
        f"Forward: {where_and_when(document, 'table', ('flash-attn-4',))}. "
        f"Backward: {where_and_when(document, 'backward', ('flash-attn-4',))}."
    )
    return f"{markdown(header, body)}\n\n{note}\n"


def gained(group: dict[str, Row], name: str, before: str) -> str:
    """A rate, and how many times that of the version before."""
    own, other = rate_of(group, name), rate_of(group, before)
    if not own:
        return "-"
    return f"{own:.0f} ({own / other:.2f} x {before.upper()})" if other else f"{own:.0f}"


def switched_off(document: Document) -> str:
    """Why both ideas of FA4 are off by default on Hopper from 33 to 128 dims."""
    group = by_shape(document, "ablation").get("D=128 causal, S=16384", {})
    own = group["fa4"]["tflops"]
    rescale, polynomial = (
        group[f"fa4 {variant}"]["tflops"] for variant in ("rescale if grown", "1/8 polynomial")
    )
    return (
        "From 33 to 128 dims, both ideas of FA4 are off by default on Hopper in 16 bits, because "
        "they cost more there than they save. The test whether a rescale can be left out costs "
        "more than the rescale that it saves: with it, the kernel runs at "
        f"{rescale / own:.2f} times the speed. The polynomial's instructions compete with the rest "
        "of the softmax: with an eighth of the exponentials by polynomial it runs at "
        f"{polynomial / own:.2f} times the speed (causal, head_dim 128, 16384 tokens). They are "
        "meant for Blackwell, whose tensor cores are faster while its exponentials are not. Up "
        "to 32 dims and above 128, the first idea is on.\n"
    )


TABLES: dict[str, Callable[[Document], str]] = {
    "hook": hook,
    "steps": steps,
    "fa4 on hopper": switched_off,
}
