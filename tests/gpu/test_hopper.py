"""FA3's kernel for Hopper on the device: each switch, many launches, streams and graphs."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flash_versions import attention, masks
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.hopper import host
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.config import HopperConfig
from flash_versions.versions.tiles import tile_scheduler
from tests.gpu.launches import captured, differing, differing_in_streams, on_hopper, qkv
from tests.helpers.kernels.budget import assert_gradients_right, assert_within_budget
from tests.helpers.kernels.launches import launched

pytestmark = on_hopper
SMALL = HopperConfig(2, block_kv=128, stages=2)  # fits at head_dim 64 with up to four stages
CONFIGS = {
    "in order": replace(SMALL, overlap=False),
    "in order, no turns": replace(SMALL, overlap=False, ping_pong=False),
    "no turns": replace(SMALL, ping_pong=False),
    "late wait": replace(SMALL, late_wait=True),
    "one Q buffer": replace(SMALL, q_stages=1),
    "O in parts": replace(SMALL, o_columns=64),
    "three consumers": replace(SMALL, consumers=3),
    "narrow blocks": replace(SMALL, block_kv=64, stages=4),
    "one stage, in order": replace(SMALL, stages=1, overlap=False),
    "grid": replace(SMALL, scheduler="grid"),
    "dynamic": replace(SMALL, scheduler="dynamic"),
    "dynamic, three consumers": replace(SMALL, consumers=3, scheduler="dynamic"),
}


def check(config, q, k, v, **options):
    o, lse, _ = host.forward(make_request(q, k, v, **options), config)
    assert_within_budget(o, lse, q, k, v, **options)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_switch(config, causal):
    """More tiles than multiprocessors, so that persistent programs walk; ragged at both ends."""
    check(config, *qkv(700, 900, 12, 64, kv_heads=4, batch=3), causal=causal)
    check(config, *qkv(300, 200, 2, 64), causal=causal, window=(100, None))


def launches(config, repeats, q, k, v, **options):
    """`differing` of a call."""
    request = make_request(q, k, v, **options)
    return differing(lambda: host.forward(request, config)[:2], repeats)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_the_default_ten_thousand_times(D):
    assert launches(None, 10_000, *qkv(1500, 1500, 4, D, batch=4), causal=True) == 0


@pytest.mark.parametrize("D", [64, 128, 256])
def test_interval_masks_ten_thousand_times(D):
    """The lists are made anew in every launch."""
    mask = masks.documents([400, 1, 700, 399], device="cuda")
    q, k, v = qkv(1500, 1500, 4, D, batch=2)
    assert launches(None, 10_000, q, k, v, **mask) == 0
    request = make_request(q, k, v, **mask)
    o, lse, _ = host.forward(request)
    run = partial(backward_hopper.backward, request, o, lse, None, torch.randn_like(o), None)
    assert differing(lambda: run()[1:3], 2000) == 0  # dK and dV; dQ is added in any order


def dynamic(S, heads):
    """Launches of a kernel whose programs claim tiles from counters in memory."""
    request = make_request(*qkv(S, S, heads, 64, batch=4), causal=True)
    return lambda: host.forward(request, replace(SMALL, scheduler="dynamic"))[:1]


def test_two_streams_at_once():
    """The programs of both are resident together; their counters are apart."""
    assert differing_in_streams([dynamic(300, 2), dynamic(1000, 2)], 300) == [0, 0]


def test_counters_are_zero_between_launches_and_apart():
    counters = tile_scheduler.Counters()
    device = torch.device("cuda", torch.cuda.current_device())
    mine = counters.take(device)
    assert counters.take(device) is mine and mine.tolist() == [0, 0]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert counters.take(device).data_ptr() != mine.data_ptr()
    run = dynamic(700, 8)
    expected, pair = run()[0], host.counters.take(device)
    assert pair.tolist() == [0, 0]
    pair.fill_(10**6)  # this is the pair that is read: no tile is left to claim
    assert not torch.equal(run()[0], expected)
    pair.zero_()


def test_captured_launches_beyond_those_in_store(monkeypatch):
    run = dynamic(700, 8)
    expected = run()[0]
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setitem(host.counters.free, device, [])
    graph, (o,) = captured(run)
    for _ in range(3):
        o.fill_(float("nan"))
        graph.replay()
        assert torch.equal(o, expected)


def test_attention_uses_it_and_trains_through_it(monkeypatch):
    seen = launched(monkeypatch)
    leaves = [x.requires_grad_() for x in qkv(500, 500, 16, 128, kv_heads=4, batch=4)]
    o = attention(*leaves, causal=True, version="fa3")
    o.float().square().sum().backward()
    o = o.detach()
    assert [launcher for launcher, _ in seen].count(host.launch_forward) == 1
    do = (2 * o.float()).to(o.dtype)
    assert_gradients_right(make_request(*leaves, causal=True), [x.grad for x in leaves], do)
