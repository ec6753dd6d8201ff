"""FA3's backward for Hopper on the device: head dims, options, switches, streams, turns."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.autograd.compute import in_vectors, narrowed, widened
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa2.forward import forward
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig, default_config
from tests.gpu.launches import differing, on_hopper, qkv
from tests.helpers.kernels.budget import assert_gradients_right
from tests.helpers.kernels.launches import launched

pytestmark = on_hopper


def prepared(q, k, v, config=None, dlse=False, **options):
    """(request, do, dlse, a backward to call)."""
    request = make_request(q, k, v, **options)
    o, lse, _ = forward(in_vectors(request))
    do = torch.randn_like(narrowed(o, v))
    dlse = torch.randn_like(lse) if dlse else None
    given = in_vectors(request), widened(o), lse, None, widened(do), dlse
    return request, do, dlse, partial(backward_hopper.backward, *given, config)


def check(q, k, v, config=None, dlse=False, **options):
    request, do, dlse, run = prepared(q, k, v, config, dlse, **options)
    found = {n: narrowed(x, like) for n, x, like in zip(("dq", "dk", "dv"), run(), (q, k, v))}
    assert_gradients_right(request, found, do, dlse)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 96, 128, 160, 256])
def test_head_dims(D, dtype):
    check(*qkv(700, 900, 12, D, kv_heads=4, batch=3, dtype=dtype))
    check(*qkv(300, 200, 2, D, dtype=dtype), causal=True, dlse=True)


@pytest.mark.parametrize("dims", [(144, 144), (160, 160), (176, 176), (192, 192), (192, 128),
                                  (128, 192), (256, 128), (96, 256), (160, 256)])  # fmt: skip
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "in turns"])
def test_above_head_dim_128(dims, ordered):
    """By default, and padded."""
    for config in (None, BackwardConfig(block_kv=64)):
        inputs = qkv(700, 900, 12, dims[0], kv_heads=4, batch=3, D_v=dims[1])
        check(*inputs, config, causal=True, deterministic=ordered)
        check(*qkv(300, 200, 2, dims[0], D_v=dims[1]), config, deterministic=ordered)


@pytest.mark.parametrize("D, parts", [(64, 6), (96, 2), (128, 3), (160, 2), (192, 3), (256, 2)])
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "in turns"])
def test_groups_in_parts(ordered, D, parts):
    """All tiles divided or some; the same bits of dK and dV in every run."""
    for options in ({"causal": True}, {"window": (300, 100)}):
        inputs = qkv(700, 900, 12, D, kv_heads=2, batch=3)
        request, do, _, _ = prepared(*inputs, deterministic=ordered, **options)
        config = replace(default_config(request), parts=parts)
        check(*inputs, config, deterministic=ordered, **options)
        o, lse, _ = forward(request)
        run = backward_hopper.backward
        runs = [run(request, o, lse, None, do, None, config) for _ in range(20)]
        for x, found in product(range(0 if ordered else 1, 3), runs):
            assert torch.equal(found[x], runs[0][x])


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_ten_thousand_launches(D, causal):
    """dK and dV bit for bit; dQ as close to the first as additions in another order are."""
    _, _, _, run = prepared(*qkv(1500, 1500, 4, D, batch=4), causal=causal)
    dq = run()[0]
    largest = torch.zeros((), dtype=torch.float32, device="cuda")

    def dk_and_dv():
        again = run()
        largest.copy_(torch.maximum(largest, (again[0] - dq).abs().max().float()))
        return again[1:3]

    assert differing(dk_and_dv, 10_000) == 0
    assert float(largest) <= 2**-7 * float(dq.abs().max())  # an ulp of bf16


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (200, 50)}, {"window": (None, 300)},
    {"window": (200, None)}, {"softcap": 5.0, "causal": True},
], ids=str)  # fmt: skip
def test_in_order(options, D):
    """Lengths that end within a tile, groups of heads, queries without keys."""
    for M, N in ((900, 1100), (1100, 900), (2500, 2500)):
        inputs = qkv(M, N, 6, D, kv_heads=2, batch=2)
        request, do, _, run = prepared(*inputs, deterministic=True, **options)
        found = run()
        named = {n: narrowed(x, y) for n, x, y in zip(("dq", "dk", "dv"), found, inputs)}
        assert_gradients_right(request, named, do, None)
        again = run()
        assert all(torch.equal(x, y) for x, y in zip(found[:3], again[:3]))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_same_bits_beside_other_work(D, causal):
    """A hundred launches in a graph while another stream multiplies matrices: programs begin when
    an SM has room for them.
    """
    inputs = qkv(2000, 2000, 8, D, kv_heads=2, batch=2)
    run = prepared(*inputs, causal=causal, deterministic=True)[3]
    other = torch.cuda.Stream()
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)

    def multiply():
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(2000):
                a @ a

    assert differing(lambda: run()[:3], 100, beside=multiply) == 0


def test_attention_uses_it_in_order_or_not(monkeypatch):
    seen = launched(monkeypatch)
    leaves = [x.requires_grad_() for x in qkv(500, 500, 16, 128, kv_heads=4, batch=4)]
    for ordered in (False, True):
        attention(*leaves, causal=True, version="fa3", deterministic=ordered).sum().backward()
    mine = [x for launcher, x in seen if launcher is backward_hopper.launch_backward]
    assert [x["ORDERED"] for x in mine] == [False, True]
