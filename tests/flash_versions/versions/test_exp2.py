"""FA4's exponential: the derivation of its coefficients, its error, its edges, its share."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flash_versions.versions.fa4.exp2 import COEFFICIENTS, DEGREES, mixed_exp2, polynomial_exp2
from lessons.fit_exp2 import DTYPES, chosen_degree, evaluate, measure, rounded, samples

# Largest relative errors in fp32 for exponents from -126 to 8: what exp2.py and the documents say.
BOUNDS = {2: 1.97e-3, 3: 1.02e-4, 4: 2.95e-6, 5: 2.0e-7}
every_degree = pytest.mark.parametrize("degree", BOUNDS)
every_dtype = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@triton.jit
def polynomial_kernel(x, out, count, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    y = polynomial_exp2(tl.load(x + index, mask=inside, other=0.0), DEGREE)
    tl.store(out + index, y, mask=inside)


@triton.jit
def mixed_kernel(x, out, EIGHTHS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + index, mixed_exp2(tl.load(x + index), EIGHTHS, 2))


def polynomial(x, degree=3):
    """The kernel's 2^x of a vector."""
    out, block = torch.empty_like(x), 1 << 16
    grid = (triton.cdiv(x.numel(), block),)
    polynomial_kernel[grid](x, out, x.numel(), DEGREE=degree, BLOCK=block)
    return out


# ---- the error ----


@every_dtype
def test_rounded_it_is_as_good_as_an_exact_exponential(dtype):
    """With the chosen degree, and not with the one below."""
    degree = DEGREES[dtype]
    assert degree == chosen_degree(dtype)
    for fused in (True, False):
        found = measure(COEFFICIENTS.value[degree], dtype, fused)
        assert found.after_cast <= found.allowed == torch.finfo(dtype).eps / 2
    if degree > 2:
        found = measure(COEFFICIENTS.value[degree - 1], dtype)
        assert found.after_cast > found.allowed


@every_degree
def test_the_kernel_computes_what_was_measured(degree, device):
    """And a P in bf16 is within the unit roundoff of bf16."""
    x = np.ascontiguousarray(np.concatenate(samples(torch.bfloat16))[::7])
    found = polynomial(torch.from_numpy(x).to(device), degree).cpu().numpy()
    fused = torch.cuda.is_available()
    assert np.array_equal(found, evaluate(x, COEFFICIENTS.value[degree], fused))
    exact = np.exp2(x.astype(np.float64))
    assert BOUNDS[degree] / 2 < np.max(np.abs(found - exact) / exact) <= BOUNDS[degree]
    if degree >= DEGREES[torch.bfloat16]:
        assert np.max(np.abs(rounded(found, torch.bfloat16) - exact) / exact) <= 2.0**-8


# ---- the edges ----


@every_degree
def test_whole_numbers_are_exact(degree, device):
    x = torch.arange(-126.0, 128.0, device=device)
    assert torch.equal(polynomial(x, degree), torch.ldexp(torch.ones_like(x), x.int()))


def test_nan_does_not_become_a_number_that_counts(device):
    y = polynomial(torch.tensor([float("nan")], device=device))
    assert not any(y.to(dtype).float().isfinite().any() for dtype in (torch.bfloat16, torch.half))


# ---- the share ----


@pytest.mark.parametrize(("eighths", "columns"), [(0, 32), (1, 128), (3, 32), (6, 128), (8, 32)])
def test_the_share_is_what_was_asked_for(eighths, columns, device):
    x = (torch.rand(16, columns, device=device) - 0.5) * 20
    hardware, mixed = torch.empty_like(x), torch.empty_like(x)
    mixed_kernel[(1,)](x, hardware, EIGHTHS=0, ROWS=16, COLUMNS=columns)
    mixed_kernel[(1,)](x, mixed, EIGHTHS=eighths, ROWS=16, COLUMNS=columns)
    software = polynomial(x.flatten(), 2).view_as(x)
    assert not (software == hardware).any(0).all()
    chosen = (mixed != hardware).any(0)
    assert torch.equal(mixed, torch.where(chosen, software, hardware))
    assert chosen.sum().item() == columns * eighths // 8
    torch.testing.assert_close(hardware, torch.exp2(x), rtol=2**-20, atol=0)
