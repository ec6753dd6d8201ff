"""FA3's and FA4's kernels for Hopper in FP8, and FA4's in 16 bits, on the device."""

from dataclasses import replace

import pytest

from flash_versions.dispatch.precision import Fp8
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa3.hopper import config as fa3_config
from flash_versions.versions.fa3.hopper.config import HopperConfig
from flash_versions.versions.fa4.hopper import config
from flash_versions.versions.fa4.hopper import host as forward_hopper
from flash_versions.versions.fa4.hopper.config import RolesConfig
from flash_versions.versions.fp8.quantize import prepare
from tests.benchmarks.attention.record import record
from tests.gpu.launches import differing, on_hopper, qkv
from tests.helpers.kernels.budget import assert_right, assert_within_budget

pytestmark = on_hopper
SMALL = RolesConfig(2, block_kv=128, stages=2)
CONFIGS = {
    "as it is": SMALL,
    "always rescaled": replace(SMALL, threshold=0.0),
    "a quarter polynomial": replace(SMALL, eighths=2),
    "all polynomial": replace(SMALL, eighths=8),
    "no turns": replace(SMALL, ping_pong=False),
    "one Q buffer": replace(SMALL, q_stages=1),
    "O in parts": replace(SMALL, o_columns=64),
    "three consumers": replace(SMALL, consumers=3),
    "narrow blocks": replace(SMALL, block_kv=64, stages=4),
    "grid": replace(SMALL, scheduler="grid"),
    "dynamic": replace(SMALL, scheduler="dynamic"),
    "dynamic, three consumers": replace(SMALL, consumers=3, scheduler="dynamic"),
}
by_length = pytest.mark.parametrize(
    "S", [1, 2, 63, 64, 65, 127, 128, 129, 500, 1000, 1024, 2047, 2048]
)


def check(schedule, q, k, v, **options):
    o, lse, _ = forward_hopper.forward(make_request(q, k, v, **options), schedule)
    assert_within_budget(o, lse, q, k, v, **options)


def check_fp8(schedule, q, k, v, **options):
    """FA3's kernel, or with its switches FA4's."""
    request = make_request(q, k, v, **options)
    run = forward_fp8_hopper.forward
    if isinstance(schedule, RolesConfig):
        run = forward_hopper.forward_quantized
    assert_right(request, *run(request, prepare(request), schedule)[:2])


@pytest.mark.parametrize("schedule", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_switch(schedule, causal):
    check(schedule, *qkv(700, 900, 12, 64, kv_heads=4, batch=3), causal=causal)
    check(schedule, *qkv(300, 200, 2, 64), causal=causal, window=(100, None))


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("D", [32, 64, 80, 128, 256])
def test_fp8(D, scales):
    inputs = qkv(700, 900, 6, D, kv_heads=2, batch=2)
    for causal in (False, True):
        for choose in (fa3_config.fp8_config, config.fp8_config):
            options = {"causal": causal, "precision": Fp8(scales)}
            check_fp8(choose(make_request(*inputs, **options)), *inputs, **options)


@by_length
def test_ten_thousand_launches_bit_for_bit(S):
    """In all: of each kernel, 800 at each length."""
    q, k, v = qkv(S, S, 8, 64, batch=4)
    request = make_request(q, k, v, causal=S % 2 == 0)
    in_fp8 = request._replace(precision="fp8:block:e4m3")
    quantized = prepare(in_fp8)
    kinds = ("static", "dynamic", "grid")
    schedule = replace(SMALL, scheduler=kinds[S % 3], ping_pong=S % 4 < 2)
    three = HopperConfig(3, stages=3, scheduler=kinds[S % 3])
    of_fp8 = config.with_roles(three, threshold=1.0)
    plain = replace(fa3_config.fp8_config(in_fp8), scheduler=kinds[S % 3])
    for run in (
        lambda: forward_hopper.forward(request, schedule),
        lambda: forward_hopper.forward_quantized(in_fp8, quantized, of_fp8),
        lambda: forward_fp8_hopper.forward(in_fp8, quantized, plain),
    ):
        assert differing(lambda run=run: run()[:2], 800) == 0


@pytest.mark.parametrize("scheduler", ["grid", "static", "dynamic"])
@pytest.mark.parametrize("precision", [None, "fp8"])
def test_roles_follow_their_table(precision, scheduler):
    """An instrumented launch gives the same bits, and every role of every program has taken
    nothing but steps of the table.
    """
    request = make_request(*qkv(1000, 1000, 8, 128, batch=2), causal=True, precision=precision)
    schedule = replace(SMALL, scheduler=scheduler)
    found = record(request, schedule)
    states = {role: {event[0] for event in entered} for role, entered in found[0].items()}
    assert states["loader"] == {"claim", "load"} and states["storer"] == {"idle", "store"}
    assert len(states["consumer 1"]) == 6
