"""Linear layers with what follows them: against fp64, simulated or on a GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flash_versions.versions.oracle.budget import Accuracy
from flash_versions.versions.tiles import wgmma
from transformer.model.kernels.gemm import gemm as public
from transformer.model.kernels.gemm import hopper as gemm_hopper
from transformer.model.kernels.gemm.config import GemmConfig
from transformer.model.kernels.gemm.gemm import linear, linear_reference, swiglu, swiglu_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FUSIONS = ["", "bias", "residual", "bias residual", "swiglu"]


def operands(M, N, K, what="", dtype=torch.bfloat16, device="cpu"):
    """Arguments of a kernel; `what` is fused, by words."""

    def matrix(rows, columns, size=1.0):
        return (torch.randn(rows, columns, device=device) * size).to(dtype)

    inputs = {"a": matrix(M, K), "b": matrix(N, K, K**-0.5)}
    if "swiglu" in what:
        inputs["up"] = matrix(N, K, K**-0.5)
    if "bias" in what:
        inputs["bias"] = matrix(1, N)[0]
    if "residual" in what:
        inputs["residual"] = matrix(M, N)
    return inputs


def formula(a, b, up=None, bias=None, residual=None):
    """What a kernel computes, by torch's operations."""
    y = F.linear(a, b) if up is None else F.silu(F.linear(a, b)) * F.linear(a, up)
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


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


def assert_within_budget(found, formula, **inputs):
    summed = [inputs[name] for name in ("a", "b", "up") if name in inputs]
    accuracy = assess(found, formula, summed if "b" in inputs else (), **inputs)
    assert accuracy.ok, accuracy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [
    (1, 1, 1), (1, 130, 70), (130, 1, 64), (5, 7, 3), (128, 128, 64), (200, 264, 200),
], ids=str)  # fmt: skip
def test_shapes(shape, dtype, device):
    inputs = operands(*shape, dtype=dtype, device=device)
    assert_within_budget(linear(inputs["a"], inputs["b"]), formula, **inputs)
    inputs = operands(*shape, "swiglu", dtype, device)
    assert_within_budget(swiglu(*inputs.values()), formula, **inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["bias", "residual", "bias residual"])
def test_fusions(what, dtype, device):
    a, b, *_ = operands(200, 136, 72, what, dtype, device).values()
    fused = {k: v for k, v in operands(200, 136, 72, what, dtype, device).items() if len(k) > 1}
    found = linear(a, b, fused.get("bias"), residual=fused.get("residual"))
    assert_within_budget(found, formula, a=a, b=b, **fused)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 20), (21,), ()], ids=str)
def test_gradients_are_those_of_the_formula(shape, dtype, device):
    def randn(*size):
        return torch.randn(*size, device=device, dtype=dtype)

    x, weight, bias, residual = randn(*shape, 40), randn(72, 40), randn(72), randn(*shape, 72)
    dy = randn(*shape, 72)
    cases = [
        (lambda *t: linear(*t[:3], residual=t[3]), linear_reference, (x, weight, bias, residual)),
        (linear, linear_reference, (x, weight)),
        (swiglu, swiglu_reference, (x, weight, randn(72, 40))),
    ]
    for function, reference, tensors in cases:
        found, baseline, truth = (
            torch.autograd.grad(call(*inputs), inputs, dy.to(inputs[0].dtype))
            for call, inputs in (
                (function, leaves(*tensors)),
                (reference, leaves(*tensors)),
                (reference, leaves(*(t.double() for t in tensors))),
            )
        )
        for g, h, t in zip(found, baseline, truth, strict=True):
            assert (g.shape, g.dtype) == (h.shape, h.dtype)
            errors = [(y.double() - t).abs().max().item() for y in (g, h)]
            accuracy = Accuracy(*errors, torch.finfo(dtype).eps / 2 * t.abs().max().item())
            assert accuracy.ok, accuracy


def test_any_strides(device):
    """Transposed, sliced, expanded, packed: as `torch.nn.functional.linear` takes them."""
    packed = torch.randn(144, 80, device=device).bfloat16()
    gate, up = packed.chunk(2)
    x = torch.randn(50, 80, device=device).bfloat16()
    assert_within_budget(swiglu(x, gate, up), swiglu_reference, x=x, gate=gate, up=up)
    inputs = {"a": x, "b": gate, "residual": torch.randn(50, 99, device=device).bfloat16()[:, 9:81]}
    assert_within_budget(linear(x, gate, residual=inputs["residual"]), formula, **inputs)
    weights = packed[:40, :72].t(), packed[:72, 1:41], packed[:1, :40].expand(72, 40)
    middle = torch.randn(4, 40, 10, device=device).bfloat16().transpose(1, 2)
    for weight in weights:
        for y in (packed[:40, :50].t(), middle, x[:, ::2], x[:1, :40].expand(9, 40)):
            assert_within_budget(linear(y, weight), linear_reference, x=y, weight=weight)


def test_out(device):
    inputs = operands(100, 136, 72, "residual", device=device)
    a, b, residual = inputs.values()
    expected = linear(a, b, residual=residual)
    out = torch.empty_like(residual)
    assert linear(a, b, residual=residual, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(linear(a, b, residual=residual, out=residual), expected)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize(("x", "weight"), [((0, 8), (16, 8)), ((3, 8), (0, 8)), ((3, 0), (16, 0))])
def test_nothing_to_multiply(x, weight, device):
    x, weight = torch.ones(x, device=device), torch.ones(weight, device=device)
    bias = torch.ones(len(weight), device=device)
    assert torch.equal(linear(x, weight, bias), linear_reference(x, weight, bias))
    assert torch.equal(swiglu(x, weight, weight), swiglu_reference(x, weight, weight))


X, W = torch.zeros(5, 16), torch.zeros(24, 16)
SQUARE, LONG = torch.zeros(16, 16), torch.zeros(6, 24)
REFUSED = {
    "K": (lambda: linear(X, W[:, :8]), r"x has shape \(5, 16\) and the weight \(24, 8\)"),
    "dtype": (lambda: linear(X.double(), W.double()), "float64; float16, bfloat16 and float32"),
    "out": (lambda: linear(X, W, out=X), r"out has shape \(5, 16\).* need \(5, 24\)"),
    "out over x": (lambda: linear(SQUARE, W[:16], out=SQUARE), "out shares memory with x"),
    "out over half of the residual": (
        lambda: linear(X, W, residual=LONG[1:], out=LONG[:5]), "out shares memory with residual"
    ),
    "tile": (lambda: GemmConfig(rows=32), "64 or 128 rows"),
    "registers": (lambda: GemmConfig(columns=256), "do not fit a consumer's registers"),
    "shared memory": (lambda: GemmConfig(stages=7), "bytes of shared memory"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        call()
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


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not wgmma.available(torch.device("cuda")),
    reason="needs a Hopper GPU",
)
WIDE = GemmConfig(rows=64, columns=256, stages=4, ping_pong=False, epilogue_columns=64)
CONFIGS = {
    "as it is": GemmConfig(),
    "four buffers": GemmConfig(stages=5, buffers=4),
    "high": GemmConfig(stages=4, ping_pong=False),
    "wide": WIDE,
    "small, ping-pong": GemmConfig(rows=64, columns=64, stages=8),
    "two stages": GemmConfig(stages=2),
    "wide sub-tiles": replace(WIDE, stages=3, epilogue_columns=128),
}


def on_gpu(config, *shape, what="", dtype=torch.bfloat16):
    """The inputs and C, which began as NaN."""
    inputs = operands(*shape, what, dtype, "cuda")
    c = inputs["a"].new_full(shape[:2], float("nan"))
    gemm_hopper.gemm(c=c, config=config, **inputs)
    return inputs, c


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("what", [*FUSIONS, "swiglu bias residual"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_switch_on_hopper(config, what):
    """More tiles than multiprocessors, ragged in every dimension; a single tile; the same bits."""
    for shape in [(4000, 2056, 1000), (1, 8, 8)]:
        for dtype in (torch.bfloat16, torch.float16):
            inputs, c = on_gpu(config, *shape, what=what, dtype=dtype)
            assert_within_budget(c, formula, **inputs)
    again, different = torch.empty_like(c), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        again.fill_(float("nan"))
        gemm_hopper.gemm(c=again, config=config, **inputs)
        different += (again != c).any()
    assert different.item() == 0
