"""Linear layers with what follows them and the norm before them: against fp64, simulated or on a
GPU; the gradients, and what is refused.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from flash_versions.versions.oracle.budget import Accuracy
from flash_versions.versions.tiles import wgmma
from transformer.model.kernels.gemm import gemm as public
from transformer.model.kernels.gemm import hopper as gemm_hopper
from transformer.model.kernels.gemm.config import NORM, GemmConfig
from transformer.model.kernels.gemm.gemm import fold, linear, swiglu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FUSIONS = ["", "bias", "residual", "bias residual", "swiglu"]
EPS = 1e-5


def operands(M, N, K, what="", dtype=torch.bfloat16, device="cpu", scale=1.0):
    """Arguments of a product; `what` is fused, by words."""

    def matrix(rows, columns, size=1.0):
        return (torch.randn(rows, columns, device=device) * size).to(dtype)

    inputs = {"a": matrix(M, K, scale), "b": matrix(N, K, K**-0.5)}
    if "swiglu" in what:
        inputs["up"] = matrix(N, K, K**-0.5)
    if "bias" in what:
        inputs["bias"] = matrix(1, N)[0]
    if "residual" in what:
        inputs["residual"] = matrix(M, N)
    if "norm" in what:
        inputs["norm_weight"] = 1 + matrix(1, K, 0.3)[0]
    return inputs


def formula(a, b, up=None, bias=None, residual=None, norm_weight=None, eps=EPS):
    """What is computed, by torch's operations in the dtype of the inputs."""
    if norm_weight is not None:
        a = norm_weight * F.rms_norm(a, a.shape[-1:], eps=eps)
    y = F.linear(a, b) if up is None else F.silu(F.linear(a, b)) * F.linear(a, up)
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


def call(a, b, up=None, bias=None, residual=None, norm_weight=None, eps=EPS):
    """The function that is under test."""
    if norm_weight is None:
        return linear(a, b, bias, residual=residual) if up is None else swiglu(a, b, up)
    b, up = (None if w is None else fold(norm_weight, w) for w in (b, up))
    return linear(a, b, bias, eps=eps) if up is None else swiglu(a, b, up, eps=eps)


def assess(found, formula, summed=(), **inputs):
    """The error of a result against the formula in fp64, beside that of plain PyTorch.

    Of `summed`, a matrix and the weights that it is multiplied with, also what sums in fp32 lose.
    """
    exact = formula(**{name: x.double() for name, x in inputs.items()})
    plain = formula(**inputs)
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    rounding = torch.finfo(found.dtype).eps / 2 * exact.abs().max().item()
    rounding += sum_rounding(*(x.double() for x in summed)) if summed else 0.0
    error, baseline = ((x.double() - exact).abs().max().item() for x in (found, plain))
    return Accuracy(error, baseline, rounding)


def sum_rounding(left, *weights):
    """The rounding of a score in the oracle's budget.py, sqrt(K) of 2^-24 at the size of the
    products; of two sums that are multiplied, each times the other.
    """
    largest = max((left.norm(dim=1).max() * w.norm(dim=1).max()).item() for w in weights)
    one = 2.0**-24 * left.shape[1] ** 0.5 * largest
    others = max((left @ w.T).abs().max().item() for w in weights)
    return one if len(weights) == 1 else 2 * others * one


def assert_within_budget(found, eps=EPS, **inputs):
    """Of a product of `operands`."""
    left = inputs["a"]
    if "norm_weight" in inputs:
        left = inputs["norm_weight"] * F.rms_norm(left, left.shape[-1:])
    summed = [left, *(inputs[name] for name in ("b", "up") if name in inputs)]
    accuracy = assess(found, partial(formula, eps=eps), summed, **inputs)
    assert accuracy.ok, accuracy


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # rows of padding
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [
    (1, 1, 1), (1, 130, 70), (130, 1, 64), (5, 7, 3), (200, 264, 200),
], ids=str)  # fmt: skip
def test_shapes(shape, dtype, device):
    for what in ("", "swiglu", "norm", "norm swiglu"):
        inputs = operands(*shape, what, dtype, device)
        assert_within_budget(call(**inputs), **inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["bias", "residual", "bias residual", "norm bias"])
def test_fusions(what, dtype, device):
    inputs = operands(200, 136, 72, what, dtype, device)
    assert_within_budget(call(**inputs), **inputs)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("scale", "eps"), [(1e4, EPS), (1e-4, EPS), (0, EPS), (1, 3.0), (1, 0)])
def test_norms_of_large_and_small_rows(scale, eps, device):
    for dtype in DTYPES:
        inputs = operands(20, 40, 128, "norm", dtype, device, scale=scale)
        assert_within_budget(call(**inputs, eps=eps), eps, **inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 20), (21,), ()], ids=str)
@pytest.mark.parametrize("what", ["", "bias residual", "swiglu"])
def test_gradients_are_those_of_the_formula(what, shape, dtype, device):
    inputs = operands(60, 72, 40, what, dtype, device)
    inputs["a"] = torch.randn(*shape, 40, device=device).to(dtype)
    if "residual" in what:
        inputs["residual"] = torch.randn(*shape, 72, device=device).to(dtype)
    dy = torch.randn(*shape, 72, device=device).to(dtype)

    def gradient(call, name, **tensors):
        leaves = {k: t.detach().clone().requires_grad_() for k, t in tensors.items()}
        y = call(**leaves)
        return torch.autograd.grad(y, leaves[name], dy.to(y.dtype))[0]

    for name in inputs:
        found = gradient(call, name, **inputs)
        accuracy = assess(found, partial(gradient, formula, name), **inputs)
        assert accuracy.ok, f"{name}: {accuracy}"


def test_any_strides(device):
    """Transposed, sliced, expanded, packed: as `torch.nn.functional.linear` takes them."""
    packed = torch.randn(144, 80, device=device).bfloat16()
    gate, up = packed.chunk(2)
    x = torch.randn(50, 80, device=device).bfloat16()
    assert_within_budget(swiglu(x, gate, up), a=x, b=gate, up=up)
    residual = torch.randn(50, 99, device=device).bfloat16()[:, 9:81]
    found = linear(x, gate, residual=residual)
    assert_within_budget(found, a=x, b=gate, residual=residual)
    weights = packed[:40, :72].t(), packed[:72, 1:41], packed[:1, :40].expand(72, 40)
    middle = torch.randn(4, 40, 10, device=device).bfloat16().transpose(1, 2)
    for weight in weights:
        for y in (packed[:40, :50].t(), middle, x[:, ::2], x[:1, :40].expand(9, 40)):
            accuracy = assess(linear(y, weight), formula, a=y, b=weight)
            assert accuracy.ok, accuracy


def test_more_dimensions_and_a_bias_with_gaps(device):
    x, weight, bias, n = operands(24, 40, 64, "norm bias", device=device).values()
    y = linear(x, fold(n, weight), bias, eps=EPS)
    every_other = torch.stack((bias, bias), 1)[:, 0]
    again = linear(x.view(2, 3, 4, 64), fold(n, weight), every_other, eps=EPS)
    assert torch.equal(again.view_as(y), y)


@pytest.mark.parametrize(("x", "weight"), [((0, 8), (16, 8)), ((3, 8), (0, 8)), ((3, 0), (16, 0))])
def test_nothing_to_multiply(x, weight, device):
    x, weight = torch.ones(x, device=device), torch.ones(weight, device=device)
    bias = torch.ones(len(weight), device=device)
    assert torch.equal(linear(x, weight, bias), formula(x, weight, bias=bias))
    assert torch.equal(swiglu(x, weight, weight), formula(x, weight, weight))


X, W = torch.zeros(5, 16), torch.zeros(24, 16)
REFUSED = {
    r"x has shape \(5, 16\) and the weight \(24, 8\)": lambda: linear(X, W[:, :8]),
    "float64; float16, bfloat16 and float32": lambda: linear(X.double(), W.double()),
    r"residual has shape \(5, 16\).* need \(5, 24\)": lambda: linear(X, W, residual=X),
    "weight is torch.bfloat16": lambda: linear(X, W.bfloat16(), eps=EPS),
    r"up has shape \(23, 16\)": lambda: swiglu(X, W, W[1:], eps=EPS),
    r"x has shape \(5, 16\) and the weight \(24,\)": lambda: linear(X, W[:, 0], eps=EPS),
    "eps=-1 is of a norm": lambda: linear(X, W, eps=-1),
    "there is no residual then": lambda: linear(X, W, eps=EPS, residual=torch.zeros(5, 24)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        REFUSED[sentence]()
    assert "\n" not in str(caught.value)


def test_who_gets_the_kernel_for_hopper(monkeypatch):
    """What TMA can address, of 16 bits; everything else gets the portable kernel."""
    monkeypatch.setattr(wgmma, "available", lambda device: True)
    x = torch.zeros(40, 64, dtype=torch.bfloat16)
    for suited in (x, x[:, 8:], x[3:, :32], x[:, ::1]):
        assert public.suits_hopper(suited)
    apart, odd = x.as_strided((40, 1), (8, 5)), torch.zeros(3, 9).bfloat16()
    for other in (x[:, 1:], x.float(), x.t(), x[:1].expand(40, 64), apart, odd):
        assert not public.suits_hopper(other)
    monkeypatch.setattr(wgmma, "available", lambda device: False)
    assert not public.suits_hopper(x)


# ------------------------------------------------------------------------------- on Hopper
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not wgmma.available(torch.device("cuda")),
    reason="needs a Hopper GPU",
)
CONFIGS = {
    "as it is": GemmConfig(),
    "four buffers": GemmConfig(stages=5, buffers=4),
    "high": GemmConfig(stages=4, ping_pong=False),
    "wide": NORM,
    "small, ping-pong": GemmConfig(rows=64, columns=64, stages=8),
    "two stages": GemmConfig(stages=2),
    "wide sub-tiles": replace(NORM, stages=3, epilogue_columns=128),
    "norm": NORM,
    "norm, narrow": replace(NORM, columns=128, epilogue_columns=32),
    "norm, one buffer": replace(NORM, buffers=1, epilogue_columns=128),
    "norm, two stages": replace(NORM, stages=2, group=1),
}


def multiply(config, a, b, up=None, norm_weight=None, **others):
    """The result of the kernel for Hopper, which began as NaN."""
    c = a.new_full((len(a), len(b)), float("nan"))
    if norm_weight is not None:
        b, up = (None if w is None else fold(norm_weight, w) for w in (b, up))
        others["eps"] = EPS
    gemm_hopper.gemm(a, b, c, up=up, config=config, **others)
    return c


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("name", "what"), [
    (name, what)
    for name in CONFIGS
    for what in (
        ["norm", "norm bias", "norm swiglu"]
        if name.startswith("norm")
        else [*FUSIONS, "swiglu bias residual"]
    )
])  # fmt: skip
def test_every_switch_on_hopper(name, what):
    """More tiles than multiprocessors, ragged in every dimension; a single tile; the same bits."""
    # Of 8 elements, a norm and two products may err by more than the budget, in any order.
    for shape in [(4000, 2056, 1000), (130, 136, 392), (1, 8, 8)][: 2 + (what != "norm swiglu")]:
        for dtype in (torch.bfloat16, torch.float16):
            inputs = operands(*shape, what, dtype, "cuda")
            assert_within_budget(multiply(CONFIGS[name], **inputs), **inputs)
    inputs = operands(1000, 2000, 1024, what, device="cuda")
    expected = multiply(CONFIGS[name], **inputs)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        different += (multiply(CONFIGS[name], **inputs) != expected).any()
    assert different.item() == 0
