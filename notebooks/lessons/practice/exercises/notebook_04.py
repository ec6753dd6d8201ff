"""The exercises of 04_fa4: when to rescale, and 2^x without an exponential."""

from collections.abc import Callable
from typing import Any

import torch

from lessons.fit_exp2 import evaluate, remez
from lessons.practice.exercises import exercise

DEGREE = 3
RESCALE_HINTS = (
    "A row is raised, to block_max, where block_max > reference + threshold. Elsewhere the "
    "reference stays.",
    "alpha = 2^(old reference - new reference); where nothing is raised it is exactly 1.",
    "A reference of -inf means that the row has seen no key: it takes block_max. Nothing is there "
    "to rescale, so any alpha is right but NaN, which 2^(-inf - -inf) is. Use torch.where for it.",
)
EXP2_HINTS = (
    "n = torch.round(x) and f = x - n. The polynomial computes 2^f, and n goes into the exponent.",
    "Begin with p = c_3; then p = p * f + c_2, p = p * f + c_1 and p = p * f + 1.",
    "Add n * 2^23 to the bits: (p.view(torch.int32) + (n.int() << 23)).view(torch.float32). Clamp "
    "x to -127 first.",
)
INF = float("inf")
# Name of a row: the maxima of its blocks, the references after each of them, the alphas.
ROWS = {
    "a maximum that grows by the threshold itself": ([0, 8, 8], [0, 0, 0], [1, 1, 1]),
    "a maximum that grows by a little more": ([0, 8.125, 8], [0, 8.125, 8.125], [1, 2**-8.125, 1]),
    "growth by 5, twice": ([0, 5, 10], [0, 0, 10], [1, 1, 2**-10]),
    "a maximum that falls": ([3, 1, -4], [3, 3, 3], [1, 1, 1]),
    "a first block without a visible key": ([-INF, 2, 4], [-INF, 2, 2], [1, 1, 1]),
    "a first reference far below zero": ([-90, -70, -69], [-90, -70, -70], [1, 2**-20, 1]),
}


@exercise("raise_reference", *RESCALE_HINTS)
def check_rescale(function: Callable[..., Any]) -> None:
    """function(block_max, reference, threshold) -> (reference, alpha), each (rows,) fp32."""
    blocks = torch.tensor([maxima for maxima, _, _ in ROWS.values()], dtype=torch.float32).T
    expected = [torch.tensor([row[i] for row in ROWS.values()]).float().T for i in (1, 2)]
    reference = torch.full((len(ROWS),), -INF)
    for j, block_max in enumerate(blocks):
        result = function(block_max.clone(), reference.clone(), 8.0)
        assert isinstance(result, tuple) and len(result) == 2, (
            f"return (reference, alpha); you returned {type(result).__name__}."
        )
        for what, found, right in zip(("reference", "alpha"), result, (e[j] for e in expected)):
            found = torch.as_tensor(found, dtype=torch.float32).broadcast_to(right.shape)
            if what == "alpha":  # of a row that has seen no key, it multiplies 0
                found = torch.where(reference.isneginf() & found.isfinite(), right, found)
            for name, one, other in zip(ROWS, found.tolist(), right.tolist()):
                assert abs(one - other) <= 1e-6 * abs(other) or one == other, (
                    f"{name}: after block {j}, {what} is {one:g} and should be {other:g} (blocks "
                    f"have the maxima {ROWS[name][0]})."
                )
        reference = result[0]
    block_max, reference = torch.tensor([4.0, 9.0]), torch.tensor([3.0, 9.5])
    found, alpha = function(block_max, reference, 0.0)
    assert found.tolist() == [4.0, 9.5] and alpha.tolist() == [0.5, 1.0], (
        f"with a threshold of 0 the reference is the running maximum: your references "
        f"{found.tolist()} and alphas {alpha.tolist()} should be [4.0, 9.5] and [0.5, 1.0]."
    )


@exercise("polynomial_exp2", *EXP2_HINTS)
def check_exp2(function: Callable[..., Any]) -> None:
    """function(x, coefficients) -> 2^x, fp32; coefficients (c_3, c_2, c_1) of the fit."""
    fit = remez(DEGREE)
    whole = torch.arange(-126, 9, dtype=torch.float32)
    found = function(whole.clone(), fit.coefficients)
    assert isinstance(found, torch.Tensor) and found.dtype == torch.float32, (
        f"return an fp32 tensor; you returned {getattr(found, 'dtype', type(found).__name__)}."
    )
    wrong = found != torch.exp2(whole)
    assert not wrong.any(), (
        f"whole numbers give powers of two exactly, as p(0) = 1; at x = {whole[wrong][0]:g} you "
        f"have {found[wrong][0]:g}."
    )
    x = torch.linspace(-126, 8, 50_001)
    exact = torch.exp2(x.double())
    found = function(x.clone(), fit.coefficients).double()
    error = ((found - exact) / exact).abs()
    worst = int(error.nan_to_num(INF).argmax())
    assert error[worst] <= 1.05 * fit.error, (
        f"the largest relative error is {error[worst]:.2g}, at x = {x[worst]:.4f}; the "
        f"polynomial's own is {fit.error:.2g}. (On which interval is the polynomial accurate?)"
    )
    own = torch.from_numpy(evaluate(x.numpy(), fit.coefficients, fused=False)).double()
    assert ((found - own) / exact).abs().max() <= 1e-6, (
        "your 2^x is more exact than the polynomial: it must come from the coefficients, not from "
        "an exponential."
    )
    far = torch.tensor([-127.0, -200.0, -INF])
    found = function(far, fit.coefficients)
    assert found.tolist() == [0.0] * 3, (
        f"at -127 and below, where masked scores are, 2^x has to be 0; you have {found.tolist()} "
        f"at {far.tolist()}."
    )
