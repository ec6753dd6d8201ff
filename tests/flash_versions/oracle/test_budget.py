"""The yardstick itself: wrong kernels must not pass it, in any dtype."""

import math

import pytest
import torch

from flash_versions import attention, attention_reference
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import (
    Accuracy,
    assess,
    assess_request,
    compare,
    plain_pytorch,
)
from flash_versions.versions.oracle.suite import DTYPES


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def inputs(request):
    q = torch.randn(2, 60, 4, 64)
    k, v = torch.randn(2, 2, 100, 2, 64)
    return tuple(x.to(request.param) for x in (q, k, v))


def all_ok(accuracies: dict[str, Accuracy]) -> bool:
    return all(accuracy.ok for accuracy in accuracies.values())


@pytest.mark.parametrize("step", ["scale", "mask", "last block", "NaN", "log2"])
def test_wrong_results_are_rejected(step, inputs):
    q, k, v = inputs
    options = {"scale": 1.0, "causal": True} if step == "scale" else {"causal": True}
    options = {"window": (None, 1)} if step == "mask" else options
    o, lse = attention(q, k, v, return_lse=True, **options)
    if step == "last block":
        o[:, -1:] = attention(q[:, -1:], k[:, :96], v[:, :96])
    if step == "NaN":
        o[1, 30, 2, 5] = torch.nan
    if step == "log2":
        lse = lse * 1.4426950408889634
    assert not all_ok(assess(o, lse, q, k, v, causal=True))


def test_an_overflowing_baseline_excuses_nothing():
    q, k, v = (300 * torch.randn(1, 20, 1, 64).half() for _ in range(3))
    assert not attention_reference(q, k, v)[0].isfinite().all()
    o = attention(q, k, v)
    for given, right in ((o, True), (o * 0, False), (o * torch.nan, False)):
        assert assess(given, None, q, k, v)["o"].ok == right


def test_fp8_is_held_against_the_dequantised_inputs():
    q, k, v = torch.randn(3, 1, 144, 2, 64).bfloat16()
    o, lse = attention(q, k, v, precision="fp8", return_lse=True)
    for o_given, lse_given, right in (
        (o, lse, {"o", "lse"}),
        (o, lse + 8 * math.log(2), {"o"}),  # the factor of P
        (attention(q, k, -v, precision="fp8"), lse, {"lse"}),
        (*attention(q, k, v, return_lse=True), {"o"}),  # of 16 bits
    ):
        found = assess(o_given, lse_given, q, k, v, precision="fp8")
        assert {name for name, accuracy in found.items() if accuracy.ok} == right
    assert not assess(o, None, q, k, v)["o"].ok


# ---- gradients ----


def by_fa2(q, k, v, do, dlse=None, **options):
    """Results of FA2's kernels, by name."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves, version="fa2", return_lse=True, **options)
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    gradients = torch.autograd.grad((o, lse), leaves, (do, dlse))
    return {"o": o.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), gradients))


@pytest.mark.parametrize("queries", [1, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_one_key_leaves_room_for_nothing_but_rounding(dtype, queries):
    """dP - delta cancels: to exactly 0 in plain PyTorch, to a rounding in a kernel."""
    q, k, v = (torch.randn(1, x, h, 64).to(dtype) for x, h in ((queries, 4), (1, 1), (1, 1)))
    request, do = make_request(q, k, v), torch.randn(1, queries, 4, 64).to(dtype)
    found = assess_request(by_fa2(q, k, v, do), request, do)
    assert all_ok(found) and found["dq"].baseline == found["dk"].baseline == 0
    summands = (do.double().norm(dim=-1) * v.double().norm()).max().item()
    assert found["dq"].budget < 2 * torch.finfo(dtype).eps * summands


def gradients_without(step, request, do, dlse):
    """Those of plain PyTorch in which one step of a backward is wrong."""
    if step == "delta":  # dlse comes in with the other sign
        o = plain_pytorch(request, None, None)["o"]
        dlse = dlse + (do.float() * o.float()).sum(-1).mT
    if step == "dlse":
        dlse = None
    if step == "mask":  # off by one
        request = request._replace(window_right=1)
    if step == "heads":  # of a group but the first
        do = do * (torch.arange(4) % 2 == 0)[:, None]
    found = plain_pytorch(request, do, dlse)
    if step == "scale":
        found["dq"], found["dk"] = found["dq"] / request.scale, found["dk"] / request.scale
    if step == "last block":
        found["dk"][:, -16:], found["dv"][:, -16:] = 0, 0
    if step == "NaN":
        found["dk"][0, 3, 0, 5] = torch.nan
    return found


GRADIENTS = {
    "": "", "delta": "dq dk dsink", "dlse": "dq dk dsink", "mask": "dq dk dv dsink",
    "heads": "dq dk dv dsink", "scale": "dq dk", "last block": "dk dv", "NaN": "dk",
}  # fmt: skip


@pytest.mark.parametrize("step", GRADIENTS)
def test_wrong_gradients_are_rejected(step, inputs):
    """Every gradient that the step goes into, not just the worst one."""
    do, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 60)
    request = make_request(*inputs, causal=True, sink=torch.randn(4))
    given = gradients_without(step, request, do, dlse)
    found = assess_request(given, request, do, dlse)
    wrong = {name for name, accuracy in found.items() if name[0] == "d" and not accuracy.ok}
    assert wrong == set(GRADIENTS[step].split())


def test_products_in_fewer_bits_are_rejected():
    q, k, v, do = torch.randn(4, 1, 60, 2, 64)
    given = by_fa2(*(x.bfloat16().float() for x in (q, k, v, do)), causal=True)
    found = assess_request(given, make_request(q, k, v, causal=True), do)
    assert not any(accuracy.ok for accuracy in found.values())


# ---- compare ----


def test_compare_prints_a_verdict_per_tensor(capsys):
    q, k, v, do = (torch.randn(1, 30, 2, 16).bfloat16() for _ in range(4))
    given = by_fa2(q, k, v, do, causal=True)
    given["dk"] = given["dk"] * 1.1
    found = compare(given.pop("o"), q, k, v, do=do, causal=True, **given)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["o", "lse", "dq", "dk", "dv"]
    assert [("OVER" in line) for line in lines] == [False, False, False, True, False]
    assert [not accuracy.ok for accuracy in found.values()] == [("OVER" in line) for line in lines]
    assert f"{found['dk'].error:.2e}" in lines[3] and f"{found['dk'].budget:.2e}" in lines[3]


def test_compare_refuses_what_it_cannot_judge():
    q = torch.randn(1, 5, 2, 16)
    with pytest.raises(ValueError, match="dq was given without do"):
        compare(q, q, q, q, dq=q)
    with pytest.raises(ValueError, match=r"o has shape \(1, 2, 5, 16\).*\(1, 5, 2, 16\)"):
        compare(q.transpose(1, 2), q, q, q)
    with pytest.raises(ValueError, match="scale=-1"):
        compare(q, q, q, q, scale=-1)
    with pytest.raises(ValueError, match="dq was given, and attention in FP8 has no gradients"):
        compare(q.half(), *[q.half()] * 3, precision="fp8", do=q, dq=q)
