"""Attention in FP8: the portable kernel against fp64 on the dequantised inputs, the scales of every
form, and what a call may not ask for.
"""

from functools import partial

import pytest
import torch

from flash_versions import Fp8, attention, attention_reference
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fp8.quantize import dequantize, prepare
from flash_versions.versions.oracle.budget import assess_request
from tests.flash_versions.versions.test_attention import CASES
from tests.flash_versions.versions.test_packed import bounds
from tests.helpers.kernels.budget import assert_ok, assert_within_budget, random_inputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SERVED = [
    case
    for case in CASES
    if not case.options.get("dropout_p")
    and (case.starts, case.ends, case.kv_starts) == (None, None, None)
]
inputs = partial(
    random_inputs, M=70, N=150, heads=2, kv_heads=1, batch=1, head_dim=32, dtype=torch.bfloat16
)


def check(q, k, v, version="fa3", **options):
    """One call against its budget: (o, lse)."""
    with torch.no_grad():
        o, lse = attention(q, k, v, version=version, return_lse=True, **options)
        assert_within_budget(o, lse, q, k, v, **options)
    return o, lse


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_equivalence(case, device):
    q, k, v = case.inputs(torch.bfloat16, device)
    o, lse = check(q, k, v, precision="fp8", **case.all_options(device))
    assert o.shape == (*q.shape[:-1], v.shape[-1]) and o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


@pytest.mark.parametrize(
    "how", [Fp8("tensor"), Fp8("head", True), Fp8("block", True, E5M2), Fp8("head", dtype=E5M2)],
    ids=str,
)  # fmt: skip
def test_every_precision(how, device):
    q, k, v = inputs(device, dtype=torch.float16)
    o, _ = check(q, k, v, precision=how, causal=True)
    assert o.dtype == torch.float16
    options = {"precision": str(how), "num_splits": 1, "version": "fa3"}
    assert torch.equal(o, attention(q, k, v, causal=True, **options))


@pytest.mark.parametrize("how", ["fp8", "fp8:head", "fp8:tensor", None], ids=str)
def test_keys_past_the_length_may_be_anything(how, device):
    q, k, v = inputs(device, batch=2)
    if how is None:  # they have 8 bits already
        q, k, v = (x.to(E4M3) for x in (q, k, v))
    options = {"precision": how, "kv_lengths": torch.tensor([0, 133], device=device)}
    clean = check(q, k, v, **options)
    nan, end = torch.tensor([float("nan"), float("inf")]).to(q.dtype)
    for x in (k, v):
        x[0], x[1, 133:] = nan, end
    found = attention(q, k, v, version="fa3", return_lse=True, **options)
    assert all(map(torch.equal, found, clean)) and not found[0][0].any()


# ---- inputs that are quantised already ----


def quantised(device, dtype=E4M3, **shape):
    """8-bit q, k, v."""
    return tuple(x.to(dtype) for x in inputs(device, **shape))


def random_scales(*shape, device):
    return 2.0 ** (4 * torch.rand(shape, device=device) - 4)


DESCALES = {"number": ((), ()), "tensor": ((1,), (1,)), "head": ((2, 2), (2, 2))}


@pytest.mark.parametrize("form", [*DESCALES, "block", "none", "mixed"])
def test_quantised_inputs_and_scales_of_every_form(form, device):
    dtype = E5M2 if form in ("head", "none") else E4M3
    q, k, v = quantised(device, dtype, heads=4, kv_heads=2, batch=2)
    of_queries, of_keys = DESCALES.get(form, ((2, 4, 2), (2, 2, 2)))
    shapes = {"q_descale": of_queries, "k_descale": of_keys, "v_descale": of_keys}
    scales = {name: random_scales(*shape, device=device) for name, shape in shapes.items()}
    if form == "none":
        scales = {}
    elif form == "mixed":
        scales = {"q_descale": scales["q_descale"], "v_descale": torch.ones(2, 2, device=device)}
    o, lse = check(q, k, v, causal=True, **scales)
    assert o.dtype == torch.bfloat16
    exact = [
        x.double() * per_row(scales.get(f"{n}_descale"), x, n) for n, x in zip("qkv", (q, k, v))
    ]
    right, right_lse = attention_reference(*exact, causal=True)
    # The scales mean what they say, by themselves: what is left is the rounding of P and of o.
    assert (o - right).abs().max() < 0.1 * right.abs().max()
    # A tensor core keeps 13 bits when it adds products of 8 bits: of what a score sums up.
    largest = q.shape[3] ** -0.5 * exact[0].norm(dim=-1).max() * exact[1].norm(dim=-1).max()
    assert (lse - right_lse).abs().max() < 2.0**-13 * largest


def per_row(scale, x, name):
    """A scale of any form as float64 (batch, length, heads, 1), or one for all."""
    _, length, heads, _ = x.shape
    if scale is None:
        return 1.0
    if scale.dim() < 2:
        return scale.double()
    if scale.dim() == 2:
        scale = scale[..., None].expand(-1, -1, length)
    else:
        scale = scale.repeat_interleave(64 if name == "q" else 128, 2)[..., :length]
    return scale.repeat_interleave(heads // scale.shape[1], 1).mT[..., None].double()


# ---- 8-bit rows that are gathered: packed sequences, pages, padding on the left ----

LENGTHS_Q, LENGTHS_K = [9, 0, 70, 3], [14, 5, 150, 1]


def short_scales(*shape, device):
    """Scales of few bits: times an 8-bit number, they are a bf16 number."""
    return random_scales(*shape, device=device).to(E4M3).float()


def assert_16_bits(found, q, k, v, **options):
    """Results of one sequence, of dequantised numbers: o has the budget of bf16, to which P and o
    are rounded, and the LSE that of fp32.
    """
    o, lse = found
    assert all(torch.equal(x, x.bfloat16().double()) for x in (q, k, v))
    assert_within_budget(o, None, *(x.bfloat16() for x in (q, k, v)), **options)
    in_fp32 = make_request(*(x.float() for x in (q, k, v)), **options)
    assert_ok(assess_request({"lse": lse}, in_fp32))


def dequantised(b, scales, *tensors):
    """Rows of sequence b in fp64, times its scales."""
    exact = []
    for name, x in zip("qkv", tensors):
        scale = scales.get(f"{name}_descale")
        scale = scale if scale is None or scale.dim() < 2 else scale[b : b + 1]
        exact.append(x[None].double() * per_row(scale, x[None], name))
    return exact


@pytest.mark.parametrize(
    ("form", "dtype"), [("none", E5M2), ("tensor", E4M3), ("head", E4M3)], ids=str
)
@pytest.mark.parametrize("version", ["auto", "reference"])
def test_packed_sequences(version, form, dtype, device):
    of_q, of_k = bounds(LENGTHS_Q, device), bounds(LENGTHS_K, device)
    q = torch.randn(82 + 3, 4, 32, device=device).to(dtype)  # the last three are of no sequence
    k, v = torch.randn(2, 170, 2, 32, device=device).to(dtype)
    shape = {"tensor": (1,), "head": (4, 2)}.get(form)
    names = [] if shape is None else [f"{name}_descale" for name in "qkv"]
    scales = {name: short_scales(*shape, device=device) for name in names}
    options = {"causal": True, "softcap": 3.0, "scale": 0.3}
    given = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "version": version} | scales
    o, lse = attention(q, k, v, return_lse=True, **given, **options)
    assert o.dtype == torch.bfloat16 and not o[82:].any()
    for b in range(4):
        own_q, own_k = (slice(*x[b : b + 2].tolist()) for x in (of_q, of_k))
        exact = dequantised(b, scales, q[own_q], k[own_k], v[own_k])
        assert_16_bits((o[None, own_q], lse[None, :, own_q]), *exact, **options)


@pytest.mark.parametrize(
    ("where", "queries", "num_splits"),
    [("pages", 1, 1), ("pages", 7, 1), ("padding", 7, 1), ("padding", 1, 4)],
)
def test_gathered_keys(where, queries, num_splits, device):
    """In pages, or behind padding; slots of no key are NaN. Each split scales its own values."""
    lengths, starts = [300, 1, 20], [0, 0, 0] if where == "pages" else [7, 399, 380]
    q = torch.randn(3, queries, 4, 32, device=device).to(E4M3)
    rows = torch.randn(2, sum(lengths), 2, 32, device=device).to(E4M3).view(torch.int8)
    rows = rows.split(lengths, 1)
    nan = torch.tensor(float("nan"), device=device).to(E4M3).view(torch.int8)
    caches = nan.expand(2, 3, 400, 2, 32).clone()
    for b, (start, of_b) in enumerate(zip(starts, rows)):
        caches[:, b, start : start + lengths[b]] = of_b
    starts = torch.tensor(starts, device=device)
    options = {"kv_starts": starts}
    if where == "pages":
        order = torch.randperm(150, device=device)
        pages = torch.empty_like(caches).view(2, 150, 8, 2, 32)
        pages[:, order] = caches.view(pages.shape)
        caches, options = pages, {"block_table": order.view(3, 50)}
    options["kv_lengths"] = starts + torch.tensor(lengths, device=device)
    scales = {f"{name}_descale": short_scales(3, 2, device=device) for name in "qkv"}
    given = {"causal": True, "return_lse": True, "num_splits": num_splits} | options | scales
    o, lse = attention(q, *caches.view(E4M3), **given)
    for b, of_b in enumerate(rows):
        exact = dequantised(b, scales, q[b], *of_b.view(E4M3))
        assert_16_bits((o[b : b + 1], lse[b : b + 1]), *exact, causal=True)


# ---- inputs that require grad ----


@pytest.mark.parametrize(
    ("version", "kind"), [("auto", "16 bits"), ("auto", "8 bits, packed"), ("reference", "8 bits")]
)
def test_only_a_gradient_is_refused(version, kind, device):
    """The forward gives what it gives without gradients."""
    q, k, v = (inputs if kind == "16 bits" else quantised)(device, M=20, N=20)
    options = {"precision": "fp8"} if kind == "16 bits" else {}
    if "packed" in kind:
        q, k, v = (x[0] for x in (q, k, v))
        options["cu_seqlens_q"] = torch.tensor([0, 6, 20], device=device)
    options |= {"version": version, "sink": torch.zeros(2, device=device)}
    expected = attention(q, k, v, **options)
    k.requires_grad_()
    o = attention(q, k, v, **options)
    assert torch.equal(o, expected) and o.requires_grad
    with pytest.raises(ValueError, match=r"precision='fp8:\w*:e4m3' is forward only .*detach the"):
        o.float().sum().backward()
    options["sink"] = options["sink"].requires_grad_()
    with pytest.raises(ValueError, match="is forward only and a gradient of its result was asked"):
        attention(q.detach(), k.detach(), v, **options).float().sum().backward()


# ---- doors ----


def test_a_gpu_without_fp8_is_told(monkeypatch):
    monkeypatch.setattr(devices, "assumed", Properties((8, 6)))
    q, k, v = inputs("cpu")
    with pytest.raises(ValueError, match="compute capability 8.6, whose tensor cores know no FP8"):
        attention(q, k, v, precision="fp8", version="fa3")


def test_the_baseline_is_fp8_too(device):
    q, k, v = inputs(device)
    o, lse = check(q, k, v, version="reference", precision="fp8")
    exact = attention(q, k, v, version="reference")
    assert o.dtype == exact.dtype and not torch.allclose(o, exact, atol=1e-3)
    request = make_request(q, k, v, precision="fp8")
    dequantised = [x.contiguous() for x in dequantize(prepare(request))]
    assert torch.allclose(lse, attention_reference(*dequantised)[1])


def test_descales_that_are_refused(device):
    q, k, v = quantised(device, E4M3, heads=2, kv_heads=2, batch=1)
    scale = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="q_descale requires grad, and has no gradient"):
        attention(q, k, v, q_descale=scale.clone().requires_grad_())
    with pytest.raises(ValueError, match="k_descale holds inf; scales must be positive and finite"):
        attention(q, k, v, k_descale=scale * torch.inf, check=True)
