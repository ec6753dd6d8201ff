"""The errors of FP8 attention against exact attention of the unquantised inputs.

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
counts every query alike.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from flash_versions import attention, attention_reference
from flash_versions.dispatch.precision import Fp8

SCHEMES: dict[str, Fp8 | None] = {
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

Row = dict[str, Any]


def draw(distribution: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A random bf16 tensor from one of the DISTRIBUTIONS; ValueError for an unknown name."""
    if distribution not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"distribution={distribution!r} is unknown; there are {known}.")
    x = torch.randn(shape, generator=generator)
    if distribution != "gaussian":
        chosen = torch.rand(shape, generator=generator) < SHARE
        if distribution == "outliers":
            x = torch.where(chosen, 100 * x, x)
        else:
            x += 10 * chosen * torch.randn(shape, generator=generator)
    return x.bfloat16()


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The o of these rows of q in fp64: (batch, rows, heads, dim)."""
    return attention_reference(q[:, rows].double(), k.double(), v.double())[0]


def errors(o: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
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


def measure(version: str, size: tuple[int, int, int], device: str, seed: int = 0) -> Iterator[Row]:
    """Rows of every distribution, head_dim and scheme, one after the other.

    Args:
        version: whose kernels run.
        size: tokens of the one sequence, its heads, and those of them that the oracle computes.
        device: "cuda" or "cpu".
        seed: of the inputs.

    Raises:
        ValueError: the version cannot compute in FP8; the sentence says why.
    """
    length, heads, judged = size
    rows = torch.arange(0, length, max(1, length // ORACLE_ROWS), device=device)
    for distribution, head_dim in product(DISTRIBUTIONS, HEAD_DIMS):
        generator = torch.Generator().manual_seed(seed)
        shape = (1, length, heads, head_dim)
        q, k, v = (draw(distribution, shape, generator).to(device) for _ in range(3))
        exact = exact_attention(q[:, :, :judged], k[:, :, :judged], v[:, :, :judged], rows)
        for scheme, precision in SCHEMES.items():
            o = attention(q, k, v, version=version, precision=precision)
            found = errors(o[:, rows, :judged], exact)
            yield {"distribution": distribution, "D": head_dim, "scheme": scheme, **found}
