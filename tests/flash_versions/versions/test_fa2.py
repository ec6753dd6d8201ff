"""What only FA2 has: splitting the keys, the reduction, and the choice of how many splits."""

from functools import partial

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import decode, splits
from flash_versions.versions.fa2 import forward as fa2
from tests.helpers.kernels.budget import assert_gradients_right, assert_within_budget, random_inputs
from tests.helpers.kernels.watch import told

CONFIG = LaunchConfig(block_q=16, block_kv=32, num_warps=4, num_stages=2)  # 5 blocks in 150 keys
inputs = partial(
    random_inputs, M=7, N=150, heads=4, kv_heads=2, batch=2, head_dim=64, dtype=torch.float32
)


def forward(*tensors, config=CONFIG, **options):
    o, lse, _ = fa2.forward(make_request(*tensors, **options), config)
    return o, lse


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 30)},
    "causal window": {"causal": True, "window": (83, None)},
}


@pytest.mark.parametrize(
    ("name", "num_splits"),
    [("full", 5), ("causal", 1000), ("window", 1), ("window", 4), ("causal window", 4)],
)
def test_any_number_of_splits(name, num_splits, device):
    q, k, v = inputs(device)
    o, lse = forward(q, k, v, num_splits=num_splits, **OPTIONS[name])
    assert_within_budget(o, lse, q, k, v, **OPTIONS[name])


CUT = {  # of 256 queries in tiles of 64, blocks of 32 keys; the number of pairs that an edge cuts
    "full": ({}, 0),
    "causal": ({"causal": True}, 8),
    "window": ({"causal": True, "window": (127, None)}, 12),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of simulated kernels")
@pytest.mark.parametrize("name", CUT)
def test_only_blocks_that_are_cut_pay_for_the_mask(name, monkeypatch):
    options, expected = CUT[name]
    calls, mask = [], told(fa2.mask_unseen, lambda *given: calls.append(1))
    for module in (fa2, fa2_backward):
        monkeypatch.setattr(module, "mask_unseen", mask)
    q, k, v = inputs("cpu", M=256, N=256, heads=1, kv_heads=1, batch=1, head_dim=16)
    request, config = make_request(q, k, v, **options), LaunchConfig(64, 32, 4, 2)
    results = fa2.forward(request, config)
    fa2_backward.backward(request, *results, q, None, LaunchConfig(32, 64, 4, 2), config)
    assert len(calls) == 3 * expected  # in the backward for dK and dV, in tiles of 64 keys, and dQ


BACKWARD_TILES = {
    "tall": (LaunchConfig(64, 16, 4, 2), LaunchConfig(16, 64, 4, 2)),
    "wide": (LaunchConfig(16, 64, 4, 2), LaunchConfig(64, 16, 4, 2)),
}


@pytest.mark.parametrize(
    ("tiles", "heads", "intervals"),
    [("tall", 2, False), ("tall", 6, False), ("wide", 6, False), ("wide", 2, True)],
)
def test_backward_of_any_tile(heads, tiles, intervals, device):
    q, k, v = inputs(device, M=50, N=70, heads=heads, batch=1)
    do = torch.randn_like(q)
    options = {"causal": True, "window": (30, None)}
    if intervals:  # dK and dV have blocks of other sizes than dQ
        options["query_ends"] = torch.randint(51, (70,), device=device)
    request = make_request(q, k, v, **options)
    gradients = fa2_backward.backward(
        request, *fa2.forward(request), do, None, *BACKWARD_TILES[tiles]
    )
    assert_gradients_right(request, gradients[:3], do)


@pytest.mark.parametrize(
    ("batch", "length", "at_once", "expected"),
    [
        (13, 131072, 1, 2),  # 104 programs: below 80 % of the multiprocessors
        (1, 131072, 1, 33),  # 8 key heads, a long cache: two programs for each SM
        (1, 4096, 1, 16),  # a short cache: at least four blocks each
        (1, 256, decode.READ_AT_ONCE, 4),
        (1, 600, decode.READ_AT_ONCE, 10),  # a split for each block
        (8, 600, decode.READ_AT_ONCE, 4),  # no more programs than there is room for
    ],
)
def test_how_many_splits(monkeypatch, batch, length, at_once, expected):
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=132))
    q, k = torch.empty(batch, 1, 32, 64), torch.empty(1, 1, 8, 64).expand(batch, length, 8, 64)
    request = make_request(q, k, k, causal=True)
    assert splits.splits_of(request, 8 * batch, 64, at_once) == expected
