"""The transformer's own matrix products against cuBLAS, on a GPU; writes JSON.

    python -m tests.benchmarks.transformer.kernels_speed --out FILE

Competitors of a shape take turns on the same inputs, each as a CUDA graph, with a cold L2 cache
(see flash_versions/bench/measure.py). One is timed only if its results are within the budget:
errors against fp64 at most twice those of plain PyTorch in the same dtype, plus the rounding of the
output. What cannot run has a `reason` in the place of a time.
"""

import os
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.measure import L2_FLUSH_BYTES, in_graphs  # noqa: E402
from tests.benchmarks.harness import keep, parser  # noqa: E402
from transformer.model.kernels.gemm.gemm import fold, linear, swiglu  # noqa: E402

DEVICE = "cuda"
EPS = 1e-6
CHECKED = 256  # rows that are held against fp64
ROUNDS = 30
# name -> rows, inputs, outputs; the last are those of Llama-3.1-8B with 8192 tokens.
SHAPES = {
    "square": (2048, 2048, 2048),
    "square, 4096": (4096, 4096, 4096),
    "square, 8192": (8192, 8192, 8192),
    "queries, keys, values": (8192, 4096, 6144),
    "attention's output": (8192, 4096, 4096),
    "gate and up": (8192, 4096, 28672),
    "down": (8192, 14336, 4096),
}
NORMED = ("square", "square, 4096", "square, 8192", "queries, keys, values", "gate and up")

Call = Callable[[], Tensor]


def inputs(rows: int, width: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (rows, width), weight (outputs, width) with rows of norm 1, a norm's weight (width,)."""
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
    weight = (torch.randn(outputs, width, device=DEVICE) * width**-0.5).bfloat16()
    norm = (1 + 0.2 * torch.randn(width, device=DEVICE)).bfloat16()
    return x, weight, norm


def product(x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    """The product alone."""
    return F.linear(x, weight)


def plain_swiglu(x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    """silu of the first half of the outputs times the second."""
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def eager_norm(x: Tensor, norm: Tensor, weight: Tensor, then: Callable = product) -> Tensor:
    """The norm, then the product, as the model computes them in torch."""
    return then(norm * F.rms_norm(x, x.shape[-1:], eps=EPS), norm, weight)


def fused_norm(x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
    """The same with torch's norm that takes the weight: a rounding and a launch less."""
    return F.linear(F.rms_norm(x, x.shape[-1:], norm, EPS), weight)


# What each suite is held against, a function of x, a norm and a weight.
PLAIN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gemm": product,
    "gemm swiglu": plain_swiglu,
    "norm gemm": eager_norm,
    "norm gemm swiglu": partial(eager_norm, then=plain_swiglu),
}


def competitors(suite: str, x: Tensor, norm: Tensor, weight: Tensor) -> dict[str, Call]:
    """What is timed."""
    alone, torchs = partial(F.linear, x, weight), partial(PLAIN[suite], x, norm, weight)
    if suite == "gemm":
        return {"ours": partial(linear, x, weight), "cuBLAS": alone}
    if suite == "gemm swiglu":
        return {"ours": partial(swiglu, x, *weight.chunk(2)), "torch": torchs}
    folded = fold(norm, weight)
    if suite == "norm gemm swiglu":
        return {
            "ours": partial(swiglu, x, *folded.chunk(2), eps=EPS),
            "cuBLAS alone": alone,
            "torch": torchs,
        }
    return {
        "ours": partial(linear, x, folded, eps=EPS),
        "cuBLAS alone": alone,
        "torch, norm and product": partial(fused_norm, x, norm, weight),
    }


def refuse_wrong(found: Tensor, plain: Tensor, oracle: Tensor) -> None:
    """Raise an ArithmeticError if results are over their budget."""
    errors = [(t[:CHECKED].double() - oracle).abs().max().item() for t in (found, plain)]
    half_ulp = torch.finfo(found.dtype).eps / 2 * oracle.abs().max().item()
    if not errors[0] <= 2 * errors[1] + half_ulp:
        raise ArithmeticError(
            f"an error of {errors[0]:.3g} is more than twice plain PyTorch's {errors[1]:.3g} and"
            f" the rounding {half_ulp:.3g}"
        )


def measure(suite: str, shape: str) -> list[dict]:
    """Rows of one shape, one for each competitor."""
    rows, width, outputs = SHAPES[shape]
    x, weight, norm = inputs(rows, width, outputs)
    calls, plain = competitors(suite, x, norm, weight), PLAIN[suite](x, norm, weight)
    oracle = PLAIN[suite](x[:CHECKED].double(), norm.double(), weight.double())
    about = {"suite": suite, "shape": shape, "M": rows, "K": width, "N": outputs}
    about["flops"] = 2 * rows * width * outputs

    def refuse(name: str, results: tuple) -> None:
        if name != "cuBLAS alone":
            refuse_wrong(*results, plain, oracle)

    made = [
        (about | {"version": name}, lambda call=call: lambda: (call(),), partial(refuse, name))
        for name, call in calls.items()
    ]
    return in_graphs(made, ROUNDS)


def main() -> None:
    """Measure; the file is written again after each shape."""
    args = parser(__doc__, device=False).parse_args()
    method = {"rounds": ROUNDS, "l2_flush_bytes": L2_FLUSH_BYTES, "method": "CUDA graph"}
    document = new_document(protocol=method)
    linear(*inputs(256, 256, 256)[:2])  # a first call says if this cannot work at all
    parts: list[Callable[[], list[dict]]] = [
        *(partial(measure, "gemm", shape) for shape in SHAPES),
        *(partial(measure, "norm gemm", shape) for shape in NORMED),
        *(partial(measure, suite, "gate and up") for suite in ("gemm swiglu", "norm gemm swiglu")),
    ]
    for part in parts:
        keep(document, args.out, part())


if __name__ == "__main__":
    main()
