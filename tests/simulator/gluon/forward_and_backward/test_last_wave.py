"""Tiles of a short last wave, which programs share, in the kernels for Hopper without a GPU."""

from dataclasses import replace

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Plan
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon.hopper import BACKWARD, CONFIGS, HOSTS, attend, gpu, qkv
from tests.simulator.gluon.orders import in_every_order, in_turn

FULL = (330, 250, 3, 64, 3)  # queries, keys, heads, head_dim, key heads: 6 tiles of 192 rows


@pytest.fixture(autouse=True)
def four_programs(monkeypatch):
    monkeypatch.setattr(devices, "assumed", gpu(4))
    monkeypatch.setattr(CONFIGS["fa3"], "LEAST_SHARED", 2)


@in_turn("sizes options tail", [
    (FULL, {}, 2), ((97, 140, 6, 64, 3), {}, 2), ((200, 600, 1, 192, 1), {}, 4),
    ((193, 250, 4, 64, 4), {}, 1), (FULL, {"causal": True}, 1), (FULL, {"deterministic": True}, 1),
])  # fmt: skip
def test_a_call_shares_them_by_itself(sizes, options, tail, order, monkeypatch):
    """Where it has a rest of at most two tiles; results and gradients are within the budget."""
    launch, tails = Plan.launch, {1}
    monkeypatch.setattr(Plan, "launch", lambda plan, *given: (
        tails.add(plan.constants.get("TAIL", 1)), launch(plan, *given)
    ))  # fmt: skip
    leaves = [x.requires_grad_() for x in qkv(*sizes)]
    o, lse = attention(*leaves, return_lse=True, **options)
    do = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    found = {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
    assert_ok(assess_request(found, make_request(*leaves, **options), do))
    assert tails == {1, tail}


@pytest.mark.parametrize("switches", [{}, {"tail": 3, "scheduler": "dynamic"}], ids=str)
def test_the_same_bits_in_every_order_and_counters_left_at_zero(switches, monkeypatch):
    counters, request = torch.zeros(40, dtype=torch.int32), make_request(*qkv(*FULL))
    monkeypatch.setattr(HOSTS["fa3"].tail_counters, "take", lambda *given: counters)
    config = replace(CONFIGS["fa3"].default_config(request), block_kv=64, **switches)
    found = in_every_order(lambda: attend("fa3", request, config))
    assert_ok(assess_request(found, request))
    assert not counters.any()


@pytest.mark.parametrize(("D", "tail", "options"), [
    (64, 0, {}), (64, 2, {"causal": True}), (64, 2, {"softcap": 5.0}), (192, 2, {}),
])  # fmt: skip
def test_calls_whose_tiles_are_not_to_be_shared(D, tail, options):
    """Of the backward, all these: only a pair shares."""
    request = make_request(*qkv(100, 200, 1, D), **options)
    config = replace(CONFIGS["fa3"].default_config(request), tail=tail)
    with pytest.raises(ValueError, match=f"tail={tail} is for tiles"):
        HOSTS["fa3"].forward(request, config)
    of_gradients = replace(BACKWARD.default_config(request), tail=tail)
    if D == 64:
        with pytest.raises(ValueError, match=f"tail={tail} is for tiles"):
            of_gradients.check(request)
