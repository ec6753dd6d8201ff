"""The yardstick itself: wrong kernels must not pass it, in any dtype."""

import math
import random

import pytest
import torch
import triton
import triton.language as tl

from flash_versions import attention, attention_reference
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions.fa2 import forward as fa2
from flash_versions.versions.fp8.quantize import dequantize, prepare
from flash_versions.versions.oracle.budget import (
    Accuracy,
    assess,
    assess_request,
    compare,
    plain_pytorch,
)
from flash_versions.versions.oracle.reference import dropout_keep

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def inputs(request):
    q = torch.randn(2, 60, 4, 64)
    k, v = torch.randn(2, 2, 100, 2, 64)
    return tuple(x.to(request.param) for x in (q, k, v))


def all_ok(accuracies: dict[str, Accuracy]) -> bool:
    return all(accuracy.ok for accuracy in accuracies.values())


def no_scale(q, k, v):
    return attention(q, k, v, causal=True, scale=1.0, return_lse=True)


def mask_off_by_one(q, k, v):
    one_more = torch.cat((q[:, :1], q), 1)  # shifts the bottom-right diagonal by one
    o, lse = attention(one_more, k[:, :-1], v[:, :-1], causal=True, return_lse=True)
    return o[:, 1:], lse[:, :, 1:]


def top_left_diagonal(q, k, v):
    return attention(q, k[:, :60], v[:, :60], causal=True, return_lse=True)


def last_block_dropped(q, k, v):
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    last = attention(q[:, -1:], k[:, :96], v[:, :96])
    return torch.cat((o[:, :-1], last), 1), lse


def one_nan(q, k, v):
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    o[1, 30, 2, 5] = float("nan")
    return o, lse


def lse_in_log2(q, k, v):
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    return o, lse * 1.4426950408889634


def wrong_heads(q, k, v):
    return attention(q, k.flip(2), v.flip(2), causal=True, return_lse=True)


WRONG = [
    no_scale, mask_off_by_one, top_left_diagonal, last_block_dropped, one_nan, lse_in_log2,
    wrong_heads,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_wrong_results_are_rejected(wrong, inputs):
    accuracies = assess(*wrong(*inputs), *inputs, causal=True)
    assert not all_ok(accuracies)


@triton.jit
def step_without_rescale(s, row_max, row_sum, scale_log2):
    """FA2's softmax step, but what was summed under the old maximum is not rescaled."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - new_max[:, None])
    return p, new_max, row_sum + tl.sum(p, 1), tl.exp2(new_max * 0)


@triton.jit
def step_without_guard(s, row_max, row_sum, scale_log2):
    """FA2's softmax step without the guard for rows that have not seen a key."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="swaps code that only the interpreter re-reads"
)
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("step", "queries"),
    [(step_without_rescale, 60), (step_without_guard, 130)],
    ids=["rescale", "guard"],
)  # fmt: skip
def test_wrong_kernels_are_rejected(step, queries, inputs, monkeypatch):
    _, k, v = inputs
    q = torch.randn(2, queries, 4, 64).to(k.dtype)
    config = LaunchConfig(block_q=64, block_kv=32, num_warps=4, num_stages=1)
    request = make_request(q, k, v, causal=True)

    def run():
        o, lse, _ = fa2.forward(request, config)
        return assess_request({"o": o, "lse": lse}, request)

    assert all_ok(run())
    monkeypatch.setattr(fa2, "softmax_step", step)
    assert not all_ok(run())


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda o: torch.full_like(o, torch.nan)])
def test_an_overflowing_baseline_excuses_nothing(wrong):
    q, k, v = (300 * torch.randn(1, 20, 1, 64).half() for _ in range(3))
    assert not attention_reference(q, k, v)[0].isfinite().all()
    assert not assess(wrong(q), None, q, k, v)["o"].ok
    assert assess(attention(q, k, v), None, q, k, v)["o"].ok


def test_plain_pytorch_is_within_its_own_budget(inputs):
    o, lse = attention_reference(*inputs, causal=True)
    assert all_ok(assess(o, lse, *inputs, causal=True))


def fp8_attention(q, k, v, missing="", **options):
    """Attention in FP8 in plain PyTorch, with P rounded to 8 bits in units of 2^8, two blocks of
    keys and one of their steps missing: (o, lse).
    """
    request = make_request(q, k, v, precision="fp8", **options)
    q, k, v = dequantize(prepare(request))
    if missing == "k scale of a block":
        k[:, :128] /= prepare(request).k_scale[:, None, :, :1]
    if missing == "v scale":
        v /= prepare(request).v_reference[:, None, :, None]
    if missing == "order of the keys":
        v = v[:, torch.arange(v.shape[1]) ^ 2]
    k, v = (x.repeat_interleave(request.group, 2) for x in (k, v))
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) * request.scale
    p = 2.0**8 * (s - s.amax(-1, keepdim=True)).exp()
    total = p.sum(-1)
    o = torch.einsum("bhmn,bnhd->bmhd", p.to(torch.float8_e4m3fn).float(), v) / total.mT[..., None]
    offset = 0.0 if missing == "offset of the LSE" else 8 * math.log(2)
    return o.bfloat16(), s.amax(-1) + total.log() - offset


@pytest.mark.parametrize(
    ("missing", "wrong"),
    [("", ""), ("k scale of a block", "o lse"), ("order of the keys", "o"), ("v scale", "o"),
     ("offset of the LSE", "lse")],
)  # fmt: skip
def test_fp8_is_held_against_the_dequantised_inputs(missing, wrong):
    q, k, v = torch.randn(3, 1, 144, 2, 64).bfloat16()
    found = assess(*fp8_attention(q, k, v, missing), q, k, v, precision="fp8")
    assert {name: accuracy.ok for name, accuracy in found.items()} == {
        "o": "o" not in wrong.split(), "lse": "lse" not in wrong.split()
    }  # fmt: skip
    assert not assess(attention(q, k, -v), None, q, k, v, precision="fp8")["o"].ok


def test_fp8_is_worse_than_its_inputs_dtype():
    """A result in FP8 is over the budget of 16 bits, and one in 16 bits is over that of FP8, whose
    inputs are others.
    """
    q, k, v = torch.randn(3, 1, 144, 2, 64).bfloat16()
    o, lse = fp8_attention(q, k, v)
    assert not assess(o, lse, q, k, v)["o"].ok
    assert not assess(*attention(q, k, v, return_lse=True), q, k, v, precision="fp8")["lse"].ok


def test_gradients_in_fp8_are_refused():
    x = torch.randn(1, 4, 1, 16).bfloat16()
    request = make_request(x, x, x, precision="fp8")
    with pytest.raises(ValueError, match="dq was given, and attention in FP8 has no gradients"):
        assess_request({"dq": x}, request, x)


# ---- gradients: the arithmetic of a flash backward in plain PyTorch, right and wrong ----


def flash(request, do, dlse=None, wrong=None):
    """o, lse and gradients of dense sequences as the kernels compute them: products in fp32, P and
    dS rounded to the dtype before a product, P recomputed from the LSE, delta taken from the
    rounded o. `wrong` breaks one step of the backward.
    """
    q, k, v, do = (x.float() for x in (request.q, request.k, request.v, do))
    k, v = (x.repeat_interleave(request.group, 2) for x in (k, v))
    batch, m, heads, _ = q.shape
    n = k.shape[1]
    dtype, log2e = request.q.dtype, torch.tensor(1.4426950408889634)

    def product(equation, x, y):
        if wrong == "bf16 products":
            x, y = x.bfloat16().float(), y.bfloat16().float()
        return torch.einsum(equation, x, y)

    capped = s = product("bmhd,bnhd->bhmn", q, k)
    scale_log2 = torch.tensor(request.softcap or request.scale) * log2e
    if request.softcap is not None:
        capped = s = torch.tanh(s * (request.scale / request.softcap))
    behind = torch.arange(m)[:, None] + n - m - torch.arange(n)
    if request.alibi_slopes is not None:
        s = s - (request.alibi_slopes * log2e / scale_log2)[..., None, None] * behind.abs()
    visible = torch.ones(m, n, dtype=torch.bool)
    if request.window_left is not None:
        visible &= behind <= request.window_left
    if request.window_right is not None:
        visible &= behind >= -request.window_right
    x = (s * scale_log2).masked_fill(~visible, -torch.inf)
    row_max, row_sum = x.amax(-1, keepdim=True), 0.0
    if request.sink is not None:
        sink = (request.sink * log2e)[:, None, None]
        row_max = torch.maximum(row_max, sink)
        row_sum = torch.exp2(sink - row_max)
    pivot = row_max.masked_fill(row_max == -torch.inf, 0.0)
    p = torch.exp2(x - pivot)
    row_sum = row_sum + p.sum(-1, keepdim=True)
    kept = torch.ones_like(p)
    if request.dropout_p > 0:
        kept = dropout_keep(request, 0, batch, m, n) / (1 - request.dropout_p)
    o = product("bhmn,bnhd->bmhd", (p * kept.bool()).to(dtype).float() * kept.max(), v)
    o = (o / row_sum.masked_fill(row_sum == 0, 1.0).squeeze(-1).mT[..., None]).to(dtype)
    lse = ((pivot + torch.log2(row_sum)) / log2e).squeeze(-1)

    delta = (do * o.float()).sum(-1).mT
    delta = torch.zeros_like(delta) if wrong == "delta missing" else delta
    if dlse is not None and wrong != "dlse missing":
        delta = delta - dlse
    lse_log2 = (lse * log2e)[..., None]
    lse_log2 = lse_log2.masked_fill(lse_log2 == -torch.inf, 0.0)
    if wrong == "mask off by one":
        x = torch.cat((x[:, :, 1:], x[:, :, -1:]), 2)
    p = torch.exp2(x - lse_log2)
    if wrong == "last block dropped":
        p[:, :, -16:] = 0.0
    dv = product("bhmn,bmhd->bnhd", (p * kept).to(dtype).float(), do)
    dp = product("bmhd,bnhd->bhmn", do, v) * kept
    ds = p * (dp - delta[..., None])
    if request.softcap is not None and wrong != "slope of the softcap missing":
        ds = ds * (1 - capped * capped)
    ds = ds.to(dtype).float() * (1.0 if wrong == "no scale" else request.scale)
    dq, dk = product("bhmn,bnhd->bmhd", ds, k), product("bhmn,bmhd->bnhd", ds, q)
    dk, dv = (g.unflatten(2, (-1, request.group)) for g in (dk, dv))
    dk, dv = (dk[:, :, :, 0] if wrong == "one head of a group" else dk.sum(3)), dv.sum(3)
    results = {"o": o, "lse": lse, "dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
    if wrong == "dv transposed":
        results["dv"] = results["dv"].transpose(1, 3).reshape(dv.shape)
    if wrong == "NaN":
        results["dk"][0, 3, 0, 5] = torch.nan
    if request.sink is not None:
        results["dsink"] = -(torch.exp2(sink.squeeze(-1) - lse_log2.squeeze(-1)) * delta).sum(
            (0, 2)
        )
    return results


def drawn(rng, dtype):
    """A request and the gradients of its o and lse, of a shape and features drawn by rng."""
    m, n = rng.choice([1, 7, 40, 70]), rng.choice([1, 2, 9, 40, 100])
    kv_heads, dim, dim_v = rng.choice([1, 2]), *rng.choices([16, 32, 64, 80, 128], k=2)
    heads = kv_heads * rng.choice([1, 2, 4])
    options = {
        "causal": rng.random() < 0.5,
        "window": (rng.choice([None, 0, 5, 20]), rng.choice([None, 0, 5])),
        "scale": rng.choice([None, None, 1e-4, 1.0]),
        "softcap": rng.choice([None, None, 5.0, 30.0]),
        "alibi_slopes": rng.choice([None, None, torch.rand(heads)]),
        "sink": rng.choice([None, None, torch.randn(heads)]),
        "dropout_p": rng.choice([0.0, 0.0, 0.2, 0.5]),
    }
    options = {name: x for name, x in options.items() if rng.random() < 0.6}
    size = rng.choice([1, 1, 1, 8])
    q, k = (size * torch.randn(1, x, h, dim).to(dtype) for x, h in ((m, heads), (n, kv_heads)))
    v = (torch.randn(1, n, kv_heads, dim_v) + rng.choice([0, 0.5, 3])).to(dtype)
    do = (torch.randn(1, m, heads, dim_v) + rng.choice([0, 0, 1])).to(dtype)
    dlse = rng.choice([None, torch.randn(1, heads, m)])
    return make_request(q, k, v, **options), do, dlse


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_flash_arithmetic_is_within_budget(dtype, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        request, do, dlse = drawn(rng, dtype)
        found = assess_request(flash(request, do, dlse), request, do, dlse)
        assert all_ok(found), (request, {name: str(x) for name, x in found.items()})


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("queries", [1, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_one_key_leaves_room_for_nothing_but_rounding(dtype, queries, heads):
    """dP - delta cancels: to exactly 0 in plain PyTorch, to a rounding in a kernel."""
    q, k, v = (torch.randn(1, x, h, 64).to(dtype) for x, h in ((queries, heads), (1, 1), (1, 1)))
    request, do = make_request(q, k, v), torch.randn(1, queries, heads, 64).to(dtype)
    found = assess_request(flash(request, do), request, do)
    assert all_ok(found)
    assert found["dq"].baseline == found["dk"].baseline == 0
    summands = (do.double().norm(dim=-1) * v.double().norm()).max().item()
    assert found["dq"].budget < 2 * torch.finfo(dtype).eps * summands
    assert not all_ok(assess_request(flash(request, do, None, "delta missing"), request, do))


GRADIENTS_WRONG = [
    "no scale", "delta missing", "dlse missing", "mask off by one", "last block dropped",
    "one head of a group", "dv transposed", "NaN", "slope of the softcap missing",
]  # fmt: skip


@pytest.mark.parametrize("wrong", GRADIENTS_WRONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_wrong_gradients_are_rejected(dtype, wrong):
    q, do = torch.randn(2, 2, 60, 4, 64).to(dtype)
    k, v = torch.randn(2, 2, 100, 2, 64).to(dtype)
    dlse = torch.randn(2, 4, 60)
    softcap = 1.0 if wrong == "slope of the softcap missing" else None
    request = make_request(q, k, v, causal=True, softcap=softcap, sink=torch.randn(4))
    right, given = flash(request, do, dlse), flash(request, do, dlse, wrong)
    gradients = [name for name in right if name not in ("o", "lse")]
    assert all_ok(assess_request({n: right[n] for n in gradients}, request, do, dlse))
    found = assess_request({n: given[n] for n in gradients}, request, do, dlse)
    for name in gradients:  # every gradient that the step goes into, not just the worst one
        assert found[name].ok == torch.equal(given[name], right[name]), f"{name}: {found[name]}"


def test_products_in_fewer_bits_are_rejected():
    q, k, v, do = torch.randn(4, 1, 60, 2, 64)
    request = make_request(q, k, v, causal=True)
    found = assess_request(flash(request, do, None, "bf16 products"), request, do)
    assert not any(accuracy.ok for accuracy in found.values())


def test_plain_pytorchs_gradients_are_within_their_own_budget(inputs):
    torch.manual_seed(1)
    request = make_request(*inputs, causal=True, dropout_p=0.3, sink=torch.randn(4))
    do, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 60)
    given = plain_pytorch(request, do, dlse)
    assert set(given) == {"o", "lse", "dq", "dk", "dv", "dsink"}
    assert all_ok(assess_request(given, request, do, dlse))
    other = request._replace(dropout_seed=request.dropout_seed + 1)
    found = assess_request(given, other, do, dlse)
    assert found["lse"].ok and not any(found[name].ok for name in ("o", "dq", "dk", "dv"))


def test_overflowing_gradients_have_an_fp32_yardstick():
    q, k, v = (300 * torch.randn(1, 20, 1, 64).half() for _ in range(3))
    request, do = make_request(q, k, v / 300), torch.randn(1, 20, 1, 64).half()
    assert not plain_pytorch(request, do, None)["dv"].isfinite().all()
    assert assess_request({"dv": flash(request, do)["dv"]}, request, do)["dv"].ok
    zeros = torch.zeros_like(v)
    assert not assess_request({"dv": zeros}, request, do)["dv"].ok


# ---- compare ----


def test_compare_prints_a_verdict_per_tensor(capsys):
    q, k, v, do = (torch.randn(1, 30, 2, 16).bfloat16() for _ in range(4))
    request = make_request(q, k, v, causal=True)
    given = flash(request, do)
    o, lse = given.pop("o"), given.pop("lse")
    wrong = given | {"dk": given["dk"] * 1.1}
    found = compare(o, q, k, v, lse=lse, do=do, causal=True, **wrong)
    assert {name for name, accuracy in found.items() if not accuracy.ok} == {"dk"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["o", "lse", "dq", "dk", "dv"]
    assert [("OVER" in line) for line in lines] == [False, False, False, True, False]
    assert f"{found['dk'].error:.2e}" in lines[3] and f"{found['dk'].budget:.2e}" in lines[3]


def test_compare_takes_packed_sequences():
    q, k, v, do = (torch.randn(12, 2, 16) for _ in range(4))
    cu = torch.tensor([0, 5, 12])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = attention_reference(*leaves, cu_seqlens_q=cu)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    given = {"do": do, "dq": dq, "dk": dk, "dv": dv}
    assert all_ok(compare(o, q, k, v, lse=lse, cu_seqlens_q=cu, **given))
    assert not compare(o, q, k, v, cu_seqlens_q=torch.tensor([0, 6, 12]))["o"].ok


def test_compare_refuses_what_it_cannot_judge():
    q = torch.randn(1, 5, 2, 16)
    with pytest.raises(ValueError, match="dq was given without do"):
        compare(q, q, q, q, dq=q)
    with pytest.raises(ValueError, match=r"o has shape \(1, 2, 5, 16\).*\(1, 5, 2, 16\)"):
        compare(q.transpose(1, 2), q, q, q)
    with pytest.raises(ValueError, match="scale=-1"):
        compare(q, q, q, q, scale=-1)
