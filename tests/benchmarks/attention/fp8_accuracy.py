"""The errors of FP8 attention against exact attention of the unquantised inputs; writes JSON.

    python -m tests.benchmarks.attention.fp8_accuracy --out docs/results/fp8/h200-accuracy.json

The error budget (`budget.py`) asks whether a kernel is right for the inputs that it gets, so it
takes the quantised inputs as exact. This module asks what a caller loses who passes bf16 tensors
with precision="fp8": quantisation, 8-bit P and kernel together, for every granularity of scales,
with and without rotation. Attention in bf16 stands beside them.

* gaussian: all entries from N(0, 1).
* outliers: the same with 0.1 % of the entries times 100.
* paper: N(0, 1) + N(0, 100) * Bernoulli(0.001), with which FlashAttention-3's paper measures
  (section 4.3, table 3): outliers of about 10.

Three relative measures show different things. The root mean square gives most weight to large
errors: rows in which one key outweighs all others and the wrong key wins. The mean error of a row
counts every query alike. `--device cpu` simulates a small shape.
"""

from itertools import product

import torch

from flash_versions import attention, attention_reference
from flash_versions.bench.document import new_document
from flash_versions.dispatch.precision import Fp8
from tests.benchmarks.harness import keep, parser

VERSION = "fa3"  # whose FP8 kernel runs
# Tokens, heads, and those of them that the oracle computes; simulated, they take a minute.
SIZES = {"cuda": (8192, 16, 4), "cpu": (512, 2, 2)}
SCHEMES = {
    "bf16": None,
    "tensor": Fp8("tensor"),
    "head": Fp8("head"),
    "block": Fp8("block"),
    "block+hadamard": Fp8("block", hadamard=True),
}
DISTRIBUTIONS = ("gaussian", "outliers", "paper")
HEAD_DIMS = (64, 128)
SHARE = 0.001  # of the entries that are outliers
ORACLE_ROWS = 512  # queries of a head that the oracle computes


def draw(distribution, shape, generator):
    """A random bf16 tensor from one of the DISTRIBUTIONS."""
    x = torch.randn(shape, generator=generator)
    if distribution != "gaussian":
        chosen = torch.rand(shape, generator=generator) < SHARE
        if distribution == "outliers":
            x = torch.where(chosen, 100 * x, x)
        else:
            x += 10 * chosen * torch.randn(shape, generator=generator)
    return x.bfloat16()


def errors(o, exact):
    """How far o is from the exact one, (batch, rows, heads, dim), as three relative measures:

    rmse, the root mean square of the error over that of o; mean, the mean magnitude over that of o;
    row, the mean over rows of |o - exact| / |exact|, Euclidean norms.
    """
    difference = o.double() - exact
    row = difference.norm(dim=-1) / exact.norm(dim=-1)
    return {
        "rmse": (difference.square().mean() / exact.square().mean()).sqrt().item(),
        "mean": (difference.abs().mean() / exact.abs().mean()).item(),
        "row": row.mean().item(),
    }


def measure(device):
    """Rows of every distribution, head_dim and scheme, one after the other."""
    length, heads, judged = SIZES[device]
    rows = torch.arange(0, length, max(1, length // ORACLE_ROWS), device=device)
    for distribution, head_dim in product(DISTRIBUTIONS, HEAD_DIMS):
        generator = torch.Generator().manual_seed(0)
        shape = (1, length, heads, head_dim)
        q, k, v = (draw(distribution, shape, generator).to(device) for _ in range(3))
        wide = (x[:, :, :judged].double() for x in (q[:, rows], k, v))
        exact, _ = attention_reference(*wide)
        for scheme, precision in SCHEMES.items():
            o = attention(q, k, v, version=VERSION, precision=precision)
            row = {"suite": "accuracy", "distribution": distribution, "D": head_dim}
            yield row | {"scheme": scheme, **errors(o[:, rows, :judged], exact)}


def main():
    """Measure; the file is written again after each row."""
    options = parser(__doc__).parse_args()
    length, heads, judged = SIZES[options.device]
    oracle = f"fp64, {min(ORACLE_ROWS, length)} queries of {judged} heads, all keys"
    what = {"version": VERSION, "S": length, "H": heads, "oracle": oracle}
    document = new_document(options.device, what=what)
    for row in measure(options.device):
        keep(document, options.out, [row])


if __name__ == "__main__":
    main()
