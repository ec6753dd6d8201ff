"""FA4's kernel for Blackwell without a GPU."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa4.blackwell import forward as forward_blackwell
from flash_versions.versions.fa4.blackwell import host as config
from flash_versions.versions.fa4.blackwell.host import left_to_portable
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.helpers.kernels.watch import told
from tests.simulator.gluon.hopper import gpu, growing, qkv, taken
from tests.simulator.gluon.orders import in_every_order, in_turn

SMALL = config.BlackwellConfig(stages=4)
FP16 = torch.float16
BLACKWELL = gpu(2, (10, 0))


@pytest.fixture(autouse=True)
def blackwell(monkeypatch):
    monkeypatch.setattr(devices, "assumed", BLACKWELL)


def attend(request, schedule=None):
    """{name: result} of a simulated forward."""
    o, lse, _ = forward_blackwell.forward(in_vectors(request), schedule)
    return {"o": narrowed(o, request.v), "lse": lse}


def check(schedule, *inputs, **options):
    request = make_request(*inputs, **options)
    assert_ok(assess_request(attend(request, schedule), request))


@in_turn("case", taken(left_to_portable, BLACKWELL))
def test_every_case_that_it_takes(case, order):
    inputs, options = case.inputs(FP16, "cpu"), case.all_options("cpu")
    schedule = config.default_config(make_request(*inputs, **options))
    check(replace(schedule, threshold=8.0 if case.causal else 0.0), *inputs, **options)


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_every_order(scheduler):
    """More tiles than programs, ragged at both ends, whose references are all raised; few keys, so
    that there is nothing but the ends of tiles. The bits are the same.
    """
    q, k, v = qkv(300, 400, 3, 64, kv_heads=1)
    for inputs in ((20 * q, k, v), qkv(300, 100, 6, 64)):
        request = make_request(*inputs, causal=scheduler == "dynamic")
        schedule = replace(SMALL, scheduler=scheduler)
        found = in_every_order(lambda x=request, c=schedule: attend(x, c))
        assert_ok(assess_request(found, request))


OPTIONS = [
    (300, 400, 2, 64, {"causal": True}), (300, 200, 2, 128, {"causal": True}),
    (300, 500, 1, 64, {"window": (100, None), "causal": True}), (500, 300, 1, 64, {"causal": True}),
    (300, 400, 1, 64, {"window": (64, 10)}), (400, 300, 1, 64, {"window": (None, 70)}),
    (300, 400, 1, 64, {"softcap": 30.0, "window": (100, 50)}), (256, 256, 1, 128, {}),
]  # fmt: skip


@in_turn("M N heads D options", OPTIONS)
def test_longer_inputs(M, N, heads, D, options, order):
    """Several tiles and blocks."""
    check(None, *qkv(M, N, heads, D, kv_heads=1), **options)


SWITCHES = [
    replace(SMALL, scheduler="dynamic"), replace(SMALL, stages=3), replace(SMALL, eighths=8),
    replace(SMALL, eighths=1, degree=5), replace(SMALL, eighths=0, threshold=4.0),
]  # fmt: skip


@in_turn("schedule", SWITCHES)
def test_every_switch(schedule, order):
    check(schedule, *qkv(300, 200, 1, 64, batch=2), causal=True, window=(100, None))


@pytest.mark.parametrize("D, D_v", [(64, 128), (128, 64), (80, 16)])
def test_head_dims(D, D_v):
    check(None, *qkv(170, 200, 2, D, kv_heads=1, D_v=D_v))


# ------------------------------------------------------------------------------- rescaling
@pytest.fixture
def raised(monkeypatch):
    """Whether a row of the tile was raised, of each call of `rescale`."""
    found = []
    see = told(forward_blackwell.rescale, lambda acc, alpha, D: found.append((alpha.a < 1).any()))
    monkeypatch.setattr(forward_blackwell, "rescale", see)
    return found


@pytest.mark.parametrize("threshold, growth, expected", [
    (8.0, 12.0, True), (8.0, 3.0, False), (4.0, 5.0, True), (0.0, 0.5, True),
])  # fmt: skip
def test_o_is_rescaled_where_the_maximum_grew_by_more(threshold, growth, expected, raised):
    """Scores of the two later blocks grow by once and twice as much. They are all the same, so the
    errors of a polynomial would not cancel in the LSE.
    """
    q, k, v = growing(256, 384, 128, growth)
    q[..., 0] = 1.0
    check(replace(SMALL, threshold=threshold, eighths=0), q, k, v)
    assert len(raised) == 2 * 2 * 2  # heads, tiles, later blocks
    assert any(raised) == expected
