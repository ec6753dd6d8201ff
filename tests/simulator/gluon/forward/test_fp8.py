"""FP8 in the kernels of FA3 and FA4 for Hopper without a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.precision import Fp8
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import fp8_limits
from flash_versions.simulator.checking import Watch
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa3.hopper.config import HopperConfig
from flash_versions.versions.fa4.hopper import forward as fa4_kernel
from flash_versions.versions.fp8.quantize import LARGEST_SCORE
from flash_versions.versions.oracle import budget, reference
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.helpers.kernels.quantized import prepare
from tests.helpers.kernels.watch import told
from tests.simulator.gluon import hopper
from tests.simulator.gluon.hopper import HOSTS, small, taken
from tests.simulator.gluon.orders import in_every_order, in_turn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL = {"fa3": HopperConfig(block_kv=64), "fa4": small("fa4", threshold=4.0)}
VERSIONS = list(SMALL)
by_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture(autouse=True)
def quick_oracle(monkeypatch):
    """Budgets of the same quantised inputs."""
    for module in (budget, reference):
        monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(budget, "available", lambda device: True)


def qkv(*sizes, **more):
    q, k, v = hopper.qkv(*sizes, **more)
    return q, k, v + 0.5


def attend(version, config, request):
    """{name: result} of a simulated forward, in which no access is out of order."""
    fa3, fa4 = forward_fp8_hopper.forward, HOSTS["fa4"].forward_quantized
    quantized = prepare(request)
    with Watch({}).watching():
        o, lse, _ = (fa3 if version == "fa3" else fa4)(request, quantized, config)
    return {"o": o, "lse": lse}


def check(version, config, q, k, v, precision="fp8", **options):
    """A simulated forward is within the error budget: its o."""
    request = make_request(q, k, v, precision=precision, **options)
    found = attend(version, config, request)
    assert_ok(assess_request(found, request))
    return found["o"]


def left(request):
    return fp8_limits(request) or forward_fp8_hopper.left_to_portable(request)


@in_turn("case", taken(left, precision="fp8"))
def test_every_case_that_it_takes(case, order):
    inputs, options = case.inputs(torch.float16, "cpu"), case.all_options("cpu")
    for version in VERSIONS:
        assert check(version, None, *inputs, **options).dtype == torch.float16


HEAD_DIMS = [
    (64, 64, "tensor"), (80, 80, "block"), (128, 128, "head"), (256, 256, "block"),
    (64, 256, "head"), (64, 20, "block"), (16, 64, "tensor"),
]  # fmt: skip


@in_turn("D D_v scales", HEAD_DIMS)
def test_head_dims(D, D_v, scales, order):
    for version in VERSIONS:
        inputs = qkv(70, 201, 2, D, kv_heads=1, D_v=D_v)
        check(version, None, *inputs, Fp8(scales), causal=True)


@by_version
def test_every_order(version):
    """More tiles than programs; blocks and heads whose scales differ. Scores of the caller's 8-bit
    tensors have 32 bits.
    """
    q, k, v = qkv(100, 331, 4, 64, kv_heads=2)
    q[:, 64:, 1] *= 4
    k[:, 128:256] *= 3
    v[:, :128, 1] *= 20
    in_8_bits = make_request(*(x.to(E4M3) for x in (q, k, v)), causal=True)
    dynamic = replace(SMALL[version], scheduler="dynamic", stages=4, late_wait=version == "fa3")
    for request, config in (
        (make_request(q, k, v, precision="fp8"), SMALL[version]),
        (in_8_bits, SMALL[version]),
        (make_request(q, k, v, precision="fp8", causal=True), dynamic),
    ):
        found = in_every_order(lambda x=request, c=config: attend(version, c, x))
        assert_ok(assess_request(found, request))


SCHEDULES = {
    "in order": {"overlap": False},
    "late wait, no turns": {"late_wait": True, "ping_pong": False, "stages": 3},
    "one Q buffer": {"q_stages": 1},
    "three consumers, dynamic": {"consumers": 3, "stages": 3, "scheduler": "dynamic"},
    "three consumers in order": {"consumers": 3, "overlap": False},
    "a block of scales": {"block_kv": 128, "stages": 4},
}


@in_turn("name", SCHEDULES)
def test_every_schedule(name, order):
    """More tiles than programs, ragged at both ends; rows without keys, a window."""
    for version in ["fa3"] if {"overlap", "late_wait"} & {*SCHEDULES[name]} else VERSIONS:
        config = replace(SMALL[version], **SCHEDULES[name])
        check(version, config, *qkv(150, 200, 2, 64, kv_heads=1))
        about = {"causal": True, "window": (60, None)}
        given = [x.to(E5M2) for x in qkv(200, 130, 1, 64)]
        check(version, config, *given, precision=None, **about)


@pytest.mark.parametrize("N", [1, 15, 16, 64, 65, 127, 129])
def test_keys_that_end_anywhere(N):
    """Also hidden within a pair of keys, by the mask on either side."""
    check("fa3", SMALL["fa3"], *qkv(70, N, 2, 64))
    check("fa3", replace(SMALL["fa3"], block_kv=128), *qkv(70, N, 1, 64), causal=True)
    check("fa4", SMALL["fa4"], *qkv(70, N, 1, 64), window=(11, 3))


KINDS = [
    Fp8("tensor"), Fp8("head"), Fp8("block"), Fp8("block", hadamard=True), Fp8("head", dtype=E5M2),
]  # fmt: skip


@in_turn("how", KINDS)
def test_scales_of_every_kind(how, order):
    """Blocks, heads and sequences that differ by far; a head whose values are zeros, and a block of
    zeros.
    """
    q, k, v = qkv(70, 200, 2, 64, batch=2)
    q[:, 64:] *= 4
    k[:, 128:, 1] *= 4
    k[0, :128, 0] = 0
    v[0, :128, 0] *= 100
    v[1, 128:, 0] *= 0.01
    v[1, :, 1] = 0
    version = "fa4" if how.scales == "head" else "fa3"
    check(version, SMALL[version], q, k, v, how, causal=True)


BLOCKS = {"q": (2, 4, 2), "k": (2, 2, 3), "v": (2, 2, 3)}  # of the tensors below
FORMS = [
    {}, dict.fromkeys("qkv", ()), dict.fromkeys("qkv", (2, 2)), BLOCKS,
    {"k": BLOCKS["k"], "v": (2, 2)},
]  # fmt: skip


@pytest.mark.parametrize("shapes", FORMS, ids=str)
def test_quantised_inputs_with_scales_of_any_form(shapes):
    inputs = [x.to(E4M3) for x in qkv(70, 300, 4, 64, kv_heads=2, batch=2)]
    scales = {f"{name}_descale": 2 ** (4 * torch.rand(s) - 2) for name, s in shapes.items()}
    o = check("fa3", SMALL["fa3"], *inputs, precision=None, causal=True, **scales)
    assert o.dtype == torch.bfloat16


def weights_add_up(version, config, q, k, precision, **options):
    """Attention to values of 1 is 1, up to the rounding of P, of rows that see a key."""
    request = make_request(q, k, torch.ones_like(k), precision=precision, **options)
    found = attend(version, config, request)
    weights = torch.where(found["lse"].isfinite(), 1.0, 0.0).mT[..., None]
    assert ((found["o"] - weights).abs() < 0.1).all()


@pytest.mark.parametrize("scales", ["head", "block"])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 300.0])
def test_scores_of_any_size(size, scales):
    """Scores below fp16's least number, and scores far beyond its largest one: there a budget says
    nothing, but weights still add up to 1.
    """
    q, k, v = qkv(70, 200, 1, 64)
    check("fa3", SMALL["fa3"], q * size, k * size, v, Fp8(scales), causal=True)
    weights_add_up("fa3", SMALL["fa3"], q * size, k * size, Fp8(scales), causal=True)


@pytest.mark.parametrize("size", [1e-3, 10.0])
def test_fp16_holds_the_largest_scores_and_their_differences(size):
    """The largest products that there are, all of one sign; and with some keys all of the other."""
    q, k, v = qkv(64, 128, 1, 128)
    q[:], k[:] = 3.0 * size, 5.0 * size
    check("fa3", SMALL["fa3"], q, k, v)
    k[:, ::3] *= -1
    for scales in ("head", "block"):
        check("fa3", SMALL["fa3"], q, k, v, Fp8(scales), scale=0.01 / size)


# ------------------------------------------------------------------------------- FA4
@pytest.fixture
def started(monkeypatch):
    """The scores, of two keys each, of every step of `raise_start`."""
    found = []
    see = told(fa4_kernel.raise_start, lambda s, *state: found.append(s))
    monkeypatch.setattr(fa4_kernel, "raise_start", see)
    return found


@pytest.mark.parametrize("size, threshold", [(1e-4, 1.0), (1.0, 0.0), (3.0, 8.0), (300.0, 1.0)])
def test_starts_with_scores_of_any_size(size, threshold, started):
    """One head of usual scores and one of others, small enough for starts or not; rows without
    keys. Of the largest scores a budget says nothing, but weights still add up to 1.
    """
    q, k, v = qkv(200, 150, 2, 64)
    q[:, :, 1] *= size
    k[:, :, 1] *= size
    config = small("fa4", threshold=threshold, starts=True)
    check("fa4", config, q, k, v, "fp8:head", causal=True)
    steps = len(started)
    weights_add_up("fa4", config, q, k, "fp8:head", causal=True)
    check("fa4", config, q[:, :, :1], k[:, :, :1], v[:, :, :1], "fp8:head", causal=True)
    of_usual = len(started) - 2 * steps
    assert steps == (2 * of_usual if size <= 3.0 else of_usual) > 0


@pytest.mark.parametrize(("factor", "starts"), [(0.999, True), (1.003, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_starts_up_to_their_limit(sign, factor, starts, started):
    """The largest products that there are, from block to block less of them, all of one sign."""
    q, k, v = qkv(64, 300, 1, 64)
    q[:], k[:] = 1.0, sign * torch.linspace(0.3, 1, 300)[None, :, None, None]
    quantized = prepare(make_request(q, k, v, precision="fp8:head"))
    unit = (quantized.q_scale * quantized.k_scale).item() * LARGEST_SCORE * math.log2(math.e)
    scale = factor * (2**11 - 8) / unit
    config = small("fa4", starts=True, threshold=1.0)
    check("fa4", config, q, k, v, "fp8:head", scale=scale)
    assert bool(started) == starts
    weights_add_up("fa4", config, q, k, "fp8:head", scale=scale)
