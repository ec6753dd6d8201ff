"""RMSNorm fused into a product: against fp64, simulated or on a GPU; the gradients, and
what is refused.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.transformer.kernels.test_gemm import assess, on_hopper
from transformer.model.kernels.gemm import hopper
from transformer.model.kernels.gemm.config import NormGemmConfig
from transformer.model.kernels.gemm.rmsnorm import fold, norm_linear, norm_swiglu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EPS = 1e-5


class Case(NamedTuple):
    """Rows, columns and what is summed over; what else is asked for."""

    rows: int
    columns: int
    inner: int
    swiglu: bool = False
    bias: bool = False
    scale: float = 1.0  # of x
    eps: float = EPS

    def inputs(self, dtype, device="cpu"):
        """The tensors, by name."""
        shape = self.columns, self.inner
        inputs = {
            "x": torch.randn(self.rows, self.inner) * self.scale,
            "norm_weight": 1 + 0.3 * torch.randn(self.inner),
            "weight": torch.randn(shape) / self.inner**0.5,
        }
        if self.swiglu:
            inputs["up"] = torch.randn(shape) / self.inner**0.5
        if self.bias:
            inputs["bias"] = torch.randn(self.columns)
        return {name: tensor.to(device, dtype) for name, tensor in inputs.items()}

    def assert_right(self, y, **inputs):
        normed = inputs["norm_weight"] * F.rms_norm(inputs["x"], inputs["x"].shape[-1:])
        weights = [inputs[name] for name in ("weight", "up") if name in inputs]
        accuracy = assess(y, partial(formula, eps=self.eps), (normed, *weights), **inputs)
        assert accuracy.ok, accuracy


def formula(x, norm_weight, weight, up=None, bias=None, eps=EPS):
    """What is computed, by torch in the dtype of the inputs, as the model does."""
    normed = norm_weight * F.rms_norm(x, x.shape[-1:], eps=eps)
    y = F.linear(normed, weight, bias)
    return y if up is None else F.silu(y) * F.linear(normed, up)


def run(x, norm_weight, weight, up=None, bias=None, eps=EPS):
    """The function that is under test."""
    if up is not None:
        return norm_swiglu(x, norm_weight, eps, weight, up)
    return norm_linear(x, norm_weight, eps, weight, bias)


CASES = [
    Case(1, 1, 1), Case(17, 64, 64), Case(129, 72, 200),
    Case(1, 24, 40, bias=True), Case(65, 130, 96, bias=True),
    Case(40, 72, 200, swiglu=True), Case(130, 65, 33, swiglu=True),
    *(Case(20, 40, 128, scale=scale) for scale in (1e4, 1e-4, 0.0)),
    Case(20, 40, 128, eps=3.0), Case(20, 40, 128, eps=0),
]  # fmt: skip
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # rows of padding
@by_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_is_within_the_budget(case, dtype, device):
    inputs = case.inputs(dtype, device)
    case.assert_right(run(**inputs, eps=case.eps), **inputs)


def test_dimensions_strides_and_what_was_folded_before(device):
    x, n, weight, bias = Case(24, 40, 64, bias=True).inputs(torch.bfloat16, device).values()
    y = norm_linear(x, n, EPS, weight, bias)
    assert torch.equal(norm_linear(x, n, EPS, weight, bias, folded=fold(n, weight)), y)
    packed = torch.randn(2, 3, 4, 128, device=device).bfloat16()
    packed[..., 32:96] = x.view(2, 3, 4, 64)
    assert torch.equal(norm_linear(packed[..., 32:96], n, EPS, weight, bias), y.view(2, 3, 4, 40))
    assert torch.equal(norm_linear(x[0], n, EPS, weight, bias), y[0])
    x_columns, weight_columns = x.T.contiguous().T, weight.T.contiguous().T
    assert torch.equal(norm_linear(x_columns, n, EPS, weight_columns, bias), y)
    every_other = torch.stack((bias, bias), 1)[:, 0]
    assert torch.equal(norm_linear(x, n, EPS, weight, every_other), y)
    y = norm_swiglu(x, n, EPS, weight[:20], weight[20:])
    folded = fold(n, weight).chunk(2)
    assert torch.equal(norm_swiglu(x, n, EPS, weight[:20], weight[20:], folded=folded), y)


# ------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("options", [{"bias": True}, {"swiglu": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_those_of_the_formula(options, dtype, device):
    inputs = Case(30, 40, 64, **options).inputs(dtype, device)
    dy = torch.randn(2, 15, 40, device=device).to(dtype)

    def gradient(call, name, **tensors):
        leaves = {k: t.detach().clone().requires_grad_() for k, t in tensors.items()}
        y = call(**leaves | {"x": leaves["x"].view(2, 15, 64)})
        return torch.autograd.grad(y, leaves[name], dy.to(y.dtype))[0]

    for name in inputs:
        found = gradient(run, name, **inputs)
        accuracy = assess(found, partial(gradient, formula, name), **inputs)
        assert accuracy.ok, f"{name}: {accuracy}"


# ------------------------------------------------------------------------------- refusals
def test_what_does_not_fit_is_named():
    x, n, weight = torch.ones(3, 8), torch.ones(8), torch.ones(4, 8)
    for message, call in {
        r"norm_weight has shape \(7,\)": lambda: norm_linear(x, n[1:], EPS, weight),
        r"eps=-1": lambda: norm_linear(x, n, -1, weight),
        r"x has shape \(3, 7\)": lambda: norm_linear(x[:, 1:], n, EPS, weight),
        r"K at least 1": lambda: norm_linear(x[:, :0], n[:0], EPS, weight[:, :0]),
        r"weight is torch.bfloat16": lambda: norm_linear(x, n, EPS, weight.bfloat16()),
        r"folded\[1\] has": lambda: norm_swiglu(x, n, EPS, weight, weight, folded=(weight, n)),
        r"up has shape \(3, 8\)": lambda: norm_swiglu(x, n, EPS, weight, weight[1:]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


# ------------------------------------------------------------------------------- on Hopper
USUAL = NormGemmConfig()
CONFIGS = {
    "as it is": USUAL,
    "no chain": replace(USUAL, chain=1),
    "long chains": replace(USUAL, chain=4),
    "A from registers": replace(USUAL, through_registers=True),
    "A from registers, long chains": replace(USUAL, through_registers=True, chain=4),
    "narrow": replace(USUAL, columns=128, epilogue_columns=32),
    "one buffer": replace(USUAL, buffers=1, epilogue_columns=128),
    "two stages": replace(USUAL, stages=2, group=1),
}
ON_HOPPER = [
    Case(200, 304, 256, bias=True), Case(300, 520, 72), Case(1, 8, 8),
    Case(130, 280, 200, swiglu=True), Case(130, 136, 392, scale=1e4),
]  # fmt: skip


def multiply(config, x, norm_weight, weight, up=None, bias=None):
    """The result of the kernel for Hopper, which began as NaN."""
    y = x.new_full((x.shape[0], weight.shape[0]), torch.nan)
    up = None if up is None else fold(norm_weight, up)
    hopper.gemm(x, fold(norm_weight, weight), y, up=up, bias=bias, eps=EPS, config=config)
    return y


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", CONFIGS)
def test_every_switch_on_hopper(name):
    """And the same bits, a thousand times."""
    config = CONFIGS[name]
    for case in [*ON_HOPPER, Case(1000, 2000, 1024, bias=True)]:
        inputs = case.inputs(torch.bfloat16, "cuda")
        case.assert_right(multiply(config, **inputs), **inputs)
    y = multiply(config, **inputs)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000 if name == "as it is" else 20):
        different += (multiply(config, **inputs) != y).any()
    assert different.item() == 0
