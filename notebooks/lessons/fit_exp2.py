"""The coefficients of FA4's exponential.

A polynomial p with p(0) = 1 whose largest relative error against 2^f on -1/2 .. 1/2 is as small as
it can be, found by a Remez exchange. p(0) = 1 costs a third of the accuracy and is worth it: 2^0 is
the largest element of a row, and an integer x gives its power of two exactly.

Then the whole exponential is evaluated as a GPU does, in fp32, and the result is rounded to the
dtypes that P may have. The rule for the degree: the smallest whose relative error after that is at
most the dtype's unit roundoff (half the distance of 1 to the next number), which is what rounding
2^x itself may cost, and so what an exponential without any error would be allowed.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from flash_versions.versions.fa4.exp2 import MAGIC

DEGREE_RANGE = range(2, 6)
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
LOWEST, HIGHEST = -126.0, 8.0  # exponents of P: normal fp32 numbers, and what a reference allows
GRID = 200_001  # points at which errors are looked at while fitting


class Fit(NamedTuple):
    """A polynomial 1 + c_1 f + ... + c_d f^d: (c_d, ..., c_1) as fp32 numbers, and the relative
    error that it would have without rounding.
    """

    coefficients: tuple[float, ...]
    error: float


@cache
def remez(degree: int) -> Fit:
    """The minimax polynomial of a degree.

    p(0) = 1 makes it an approximation of h(f) = (2^f - 1) / f by a polynomial of one degree less,
    with the weight w = |f| / 2^f. The best one errs by +-E in turn at degree + 1 points; each round
    solves for these errors at the points that it has, and moves the points to where the errors are
    largest.

    Raises:
        RuntimeError: the points did not settle.
    """
    ln2 = np.log(np.longdouble(2))
    f = np.linspace(np.longdouble(-0.5), np.longdouble(0.5), GRID)
    f[GRID // 2] = 0.0
    h = np.full(GRID, ln2)
    np.divide(np.expm1(f * ln2), f, out=h, where=f != 0)
    weight = np.abs(f) / np.exp2(f)
    signs = (-1.0) ** np.arange(degree + 1)
    chebyshev = np.cos(np.pi * (np.arange(degree + 1) + 0.3) / (degree + 1))
    points = np.sort((GRID // 2 + chebyshev * (GRID // 2)).astype(int))
    for _ in range(20):
        at = f[points]
        system = np.column_stack([at[:, None] ** np.arange(degree), signs / weight[points]])
        solution = np.linalg.solve(system.astype(np.float64), h[points].astype(np.float64))
        difference = h - np.polynomial.polynomial.polyval(f, solution[:-1])
        turns = np.flatnonzero(np.diff(np.sign(difference))) + 1
        errors = weight * np.abs(difference)
        largest = [part[np.argmax(errors[part])] for part in np.split(np.arange(GRID), turns)]
        if np.array_equal(largest, points):
            coefficients = solution[-2::-1].astype(np.float32)
            return Fit(tuple(coefficients.tolist()), float(errors.max()))
        points = np.array(largest)
    raise RuntimeError(f"the exchange for degree {degree} did not settle.")


def evaluate(x: np.ndarray, coefficients: tuple[float, ...], fused: bool = True) -> np.ndarray:
    """What `exp2.polynomial_exp2` computes, fp32 step by step; x fp32, in -126 .. 127.

    fused: multiply-adds round once, as on a GPU; otherwise twice, as in the simulator.
    """

    def multiply_add(a: np.ndarray, b: np.ndarray, c: float) -> np.ndarray:
        if fused:  # the product is exact in fp64
            return (a.astype(np.float64) * b + c).astype(np.float32)
        return a * b + np.float32(c)

    shifted = x + np.float32(MAGIC.value)
    f = x - (shifted - np.float32(MAGIC.value))
    p = np.full_like(f, coefficients[0])
    for c in (*coefficients[1:], 1.0):
        p = multiply_add(p, f, c)
    return (p.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)


def samples(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Exponents whose powers are normal numbers of a dtype, fp32: 2^20 spread over the whole range,
    and the neighbours of those at which rounding to the dtype or to n turns.
    """
    kind = torch.finfo(dtype)
    lowest = max(LOWEST, np.log2(kind.tiny))
    spread = np.linspace(lowest, HIGHEST, 1 << 20, dtype=np.float32)
    midpoints = np.log2(1 + np.arange(1, 2 / kind.eps, 2) * kind.eps / 2)
    turning = np.arange(lowest, HIGHEST)[:, None] + np.append(midpoints, [0.0, 0.5])
    centre = turning.astype(np.float32)[..., None]
    near = (centre + np.spacing(centre) * np.arange(-2, 3, dtype=np.float32)).ravel()
    return spread, near[(near >= lowest) & (near <= HIGHEST)]


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Values rounded to a dtype, as fp64."""
    return torch.from_numpy(values).to(dtype).double().numpy()


class Measured(NamedTuple):
    """Largest relative errors, and the share of evenly spread exponents at which the result is
    rounded to another number than 2^x itself is.
    """

    fp32: float
    after_cast: float
    allowed: float
    differing: float


def measure(coefficients: tuple[float, ...], dtype: torch.dtype, fused: bool = True) -> Measured:
    """How wrong the exponential is over a dtype's normal numbers, before and after rounding."""
    spread, turning = samples(dtype)
    x = np.concatenate([spread, turning])
    exact = np.exp2(x.astype(np.float64))
    found = evaluate(x, coefficients, fused)
    cast, right = rounded(found, dtype), rounded(exact, dtype)
    return Measured(
        fp32=float(np.max(np.abs(found - exact) / exact)),
        after_cast=float(np.max(np.abs(cast - exact) / exact)),
        allowed=torch.finfo(dtype).eps / 2,
        differing=float(np.mean((cast != right)[: len(spread)])),
    )


def chosen_degree(dtype: torch.dtype) -> int:
    """The smallest degree that the rule allows, fused or not; see the top of this file."""
    for degree in DEGREE_RANGE:
        both = [measure(remez(degree).coefficients, dtype, fused) for fused in (True, False)]
        if all(found.after_cast <= found.allowed for found in both):
            return degree
    raise RuntimeError(f"no degree in {DEGREE_RANGE} is enough for {dtype}.")
