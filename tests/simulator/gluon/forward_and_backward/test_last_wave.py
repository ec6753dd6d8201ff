"""Tiles of a short last wave, which programs share, in the kernels for Hopper without a GPU."""

from dataclasses import replace

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.helpers.kernels.launches import launched
from tests.simulator.gluon.hopper import CONFIGS, HOSTS, attend, devices, gpu, qkv
from tests.simulator.gluon.orders import in_every_order, in_turn

FULL = (330, 250, 3, 64)  # queries, keys, heads, head_dim: 6 tiles of 192 rows, for 4 programs


@pytest.fixture(autouse=True)
def four_programs(monkeypatch):
    monkeypatch.setattr(devices, "assumed", gpu(4))
    monkeypatch.setattr(CONFIGS["fa3"], "LEAST_SHARED", 2)


@in_turn("sizes options tail", [
    (FULL, {}, 2), ((97, 140, 6, 64, 3), {}, 2), ((200, 600, 1, 192), {}, 4),
    ((193, 250, 4, 64), {}, 1), (FULL, {"causal": True}, 1), (FULL, {"num_splits": 1}, 1),
    (FULL, {"deterministic": True}, 2), ((200, 600, 1, 192), {"deterministic": True}, 1),
])  # fmt: skip
def test_a_call_shares_them_by_itself(sizes, options, tail, order, monkeypatch):
    launches = launched(monkeypatch)
    leaves = [x.requires_grad_() for x in qkv(*sizes)]
    o, lse = attention(*leaves, return_lse=True, **options)
    do = torch.randn_like(o)
    results = o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)
    found = dict(zip(("o", "lse", "dq", "dk", "dv"), results))
    assert_ok(assess_request(found, make_request(*leaves, **options), do))
    assert {1, *(x.get("TAIL", 1) for _, x in launches)} == {1, tail}


@pytest.mark.parametrize("switches", [{}, {"tail": 3, "scheduler": "dynamic"}], ids=str)
def test_the_same_bits_in_every_order_and_counters_left_at_zero(switches, monkeypatch):
    counters, request = torch.zeros(40, dtype=torch.int32), make_request(*qkv(*FULL))
    monkeypatch.setattr(HOSTS["fa3"].tail_counters, "take", lambda *given: counters)
    config = replace(CONFIGS["fa3"].default_config(request), block_kv=64, **switches)
    assert_ok(assess_request(in_every_order(lambda: attend("fa3", request, config)), request))
    assert not counters.any()


def test_fewer_blocks_than_programs_are_refused():
    request = make_request(*qkv(330, 60, 3, 64))
    with pytest.raises(ValueError, match="tail=2 programs cannot share 60 keys"):
        attend("fa3", request, replace(CONFIGS["fa3"].default_config(request), tail=2))
