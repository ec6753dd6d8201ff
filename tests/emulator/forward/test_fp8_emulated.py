"""FA3's FP8 kernel for Hopper without a GPU, in the emulator of test_hopper_emulated.py."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.precision import Fp8
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import fp8_limits
from flash_versions.versions.fp8 import quantize
from flash_versions.versions.oracle import budget, reference
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.flash_versions.versions.test_attention import CASES
from tests.helpers.kernels.quantized import prepare
from tests.helpers.rotation import rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa3.fp8.hopper")
config, host = LOADED["fa3.hopper.config"], LOADED["fa3.hopper.host"]
forward_fp8_hopper = LOADED["fa3.fp8.hopper"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL = config.HopperConfig(block_kv=64)
CONFIGS = {
    "as it is": SMALL,
    "in order": replace(SMALL, overlap=False),
    "no turns": replace(SMALL, ping_pong=False),
    "late wait": replace(SMALL, late_wait=True),
    "late wait, three stages": replace(SMALL, late_wait=True, ping_pong=False, stages=3),
    "one Q buffer": replace(SMALL, q_stages=1),
    "three consumers": replace(SMALL, consumers=3, stages=3),
    "three consumers in order": replace(SMALL, consumers=3, overlap=False),
    "a block of scales": replace(SMALL, block_kv=128),
    "two blocks of scales in order": replace(SMALL, block_kv=128, overlap=False, stages=4),
    "four stages": replace(SMALL, stages=4),
    "grid": replace(SMALL, scheduler="grid"),
    "dynamic": replace(SMALL, consumers=3, stages=3, scheduler="dynamic"),
}


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles."""
    monkeypatch.setattr(forward_fp8_hopper, "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


@pytest.fixture(autouse=True)
def quick_oracle(monkeypatch):
    """Budgets of the same quantised inputs."""
    for module in (budget, reference):
        monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(budget, "available", lambda device: True)


@pytest.fixture
def order(request, monkeypatch):
    """Run a test in an order, named by its parameter."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[request.param])


def qkv(M, N, heads, D, kv_heads=None, batch=1, D_v=None):
    q = torch.randn(batch, M, heads, D)
    k = torch.randn(batch, N, kv_heads or heads, D)
    v = torch.randn(batch, N, kv_heads or heads, D_v or D) + 0.5
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def attend(schedule, request):
    """(o, lse) of the emulated kernel."""
    o, lse, _ = forward_fp8_hopper.forward(request, prepare(request), schedule)
    return o, lse


def check(schedule, q, k, v, precision="fp8", **options):
    request = make_request(q, k, v, precision=precision, **options)
    o, lse = attend(schedule, request)
    for name, accuracy in assess_request({"o": o, "lse": lse}, request).items():
        assert accuracy.ok, f"{name}: {accuracy}"
    return o, lse


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_that_it_takes(case):
    inputs, options = case.inputs(torch.float16, "cpu"), case.all_options("cpu")
    if not all(x.numel() for x in inputs):
        pytest.skip("what no descriptor can address does not come to this kernel")
    request = make_request(*inputs, precision="fp8", **options)
    if reason := fp8_limits(request) or forward_fp8_hopper.left_to_portable(request):
        pytest.skip(reason)
    o, _ = check(None, *inputs, **options)
    assert o.dtype == torch.float16


HEAD_DIMS = [
    (64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 128), (64, 256), (256, 64),
    (64, 20), (32, 32), (16, 64),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "scales"), rotated(HEAD_DIMS, ["tensor", "head", "block"]))
def test_head_dims(dims, scales):
    D, D_v = dims
    inputs = qkv(170, 301, 2, D, kv_heads=1, D_v=D_v)
    check(None, *inputs, Fp8(scales))
    check(None, *inputs, Fp8(scales), causal=True)


@pytest.mark.parametrize(("name", "order"), rotated(CONFIGS, ORDERS), indirect=["order"])
def test_every_switch(name, order):
    """More tiles than programs, ragged at both ends; rows without keys, a window. Scores of the
    caller's 8-bit tensors have 32 bits.
    """
    schedule = CONFIGS[name]
    check(schedule, *qkv(200, 330, 3, 64, kv_heads=1))
    about = {"causal": True, "window": (100, None)}
    check(schedule, *qkv(300, 200, 1, 64, batch=2), **about)
    given = [x.to(E4M3) for x in qkv(300, 200, 1, 64)]
    check(schedule, *given, precision=None, **about)


@pytest.mark.parametrize("N", [1, 15, 16, 17, 64, 127, 128, 129, 257])
def test_keys_that_end_anywhere(N):
    check(SMALL, *qkv(70, N, 2, 64))
    check(replace(SMALL, block_kv=128), *qkv(70, N, 1, 64), causal=True)


@pytest.mark.parametrize("M, N", [(200, 300), (300, 200)])
@pytest.mark.parametrize("window", [(100, 0), (64, 10), (None, 70)], ids=str)
def test_windows(window, M, N):
    check(None, *qkv(M, N, 2, 64, kv_heads=1), window=window)
    check(replace(SMALL, overlap=False), *qkv(M, N, 2, 128, kv_heads=1), window=window)


KINDS = [
    Fp8("tensor"), Fp8("head"), Fp8("block"), Fp8("block", hadamard=True), Fp8("head", dtype=E5M2),
    Fp8("block", dtype=E5M2),
]  # fmt: skip


@pytest.mark.parametrize(("how", "block_kv"), rotated(KINDS, (64, 128)))
def test_scales_of_every_kind(how, block_kv):
    """Blocks, heads and sequences that differ by far; a head whose values are zeros."""
    q, k, v = qkv(200, 300, 6, 64, kv_heads=3, batch=2)
    q[:, 64:128] *= 4
    k[:, 128:256, 1] *= 4
    v[0, :128, 0] *= 100
    v[1, 128:256] *= 0.01
    v[1, :, 2] = 0
    schedule = SMALL if block_kv == 64 else replace(SMALL, block_kv=128, stages=3)
    check(schedule, q, k, v, how, causal=True)


@pytest.mark.parametrize("where", [slice(0, 128), slice(128, 256), slice(256, None)])
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_block_of_zeros(name, where):
    given = dict(zip("qkv", qkv(100, 300, 2, 64)))
    given[name][:, where] = 0
    check(SMALL, *given.values())


BLOCKS = {"q": (2, 4, 2), "k": (2, 2, 3), "v": (2, 2, 3)}  # of the tensors below


FORMS = [
    {}, dict.fromkeys("qkv", ()), dict.fromkeys("qkv", (2, 2)), BLOCKS, {"q": BLOCKS["q"]},
    {"k": BLOCKS["k"], "v": (2, 2)}, {"v": BLOCKS["v"]},
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "dtype"), rotated(FORMS, [E4M3, E5M2]))
def test_quantised_inputs_with_scales_of_any_form(shapes, dtype):
    inputs = [x.to(dtype) for x in qkv(100, 300, 4, 64, kv_heads=2, batch=2)]
    scales = {f"{name}_descale": 2 ** (4 * torch.rand(s) - 2) for name, s in shapes.items()}
    o, _ = check(SMALL, *inputs, precision=None, causal=True, **scales)
    assert o.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [1e-6, 1e-3, 20.0, 300.0])
def test_scores_of_any_size(size):
    """Scales below fp16's least number, and scores far beyond its largest one: there a budget says
    nothing, but weights still add up to 1.
    """
    q, k, v = qkv(100, 300, 2, 64)
    for scales in ("head", "block"):
        check(SMALL, q * size, k * size, v, Fp8(scales), causal=True)
        assert weights_add_up(q * size, k * size, scales)


@pytest.mark.parametrize("size", [1e-3, 0.3, 10.0])
def test_fp16_holds_the_largest_scores_and_their_differences(size):
    """The largest products that there are, all of one sign; and with some keys all of the other."""
    q, k, v = qkv(64, 128, 1, 128)
    q[:], k[:] = 3.0 * size, 5.0 * size
    check(SMALL, q, k, v)
    k[:, ::3] *= -1
    for scales in ("head", "block"):
        check(SMALL, q, k, v, Fp8(scales), scale=0.01 / size)


@pytest.mark.parametrize("factor", [1e-10, 1e-4, 0.01, 100.0])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_blocks_of_very_different_scales(name, factor):
    """The maximum of a row comes from a block of another scale."""
    given = dict(zip("qkv", qkv(150, 331, 2, 64)))
    given[name][:, : 64 if name == "q" else 128] *= factor
    check(SMALL, *given.values(), causal=True, scale=0.02)


def test_what_the_quantising_kernels_write():
    q, k, v = qkv(130, 150, 2, 64, kv_heads=1)
    request = make_request(q, k, v, precision="fp8")
    for x, same in zip(quantize.prepare(request), prepare(request), strict=True):
        assert torch.equal(x.float(), same.float())
    check(None, q, k, v, "fp8:hadamard")


def test_the_same_bits_in_every_order(monkeypatch):
    request = make_request(*qkv(200, 330, 2, 64, kv_heads=1), precision="fp8", causal=True)
    schedules = [SMALL, replace(SMALL, scheduler="dynamic", stages=4, late_wait=True)]
    results = []
    for order in (*ORDERS.values(), ORDERS["any order"]._replace(seed=9)):
        monkeypatch.setattr(gluon_machine, "order", order)
        results += [attend(schedule, request) for schedule in schedules]
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(lse, results[0][1])


def test_heads_of_one_tile_have_scales_of_their_own():
    request = make_request(*qkv(10, 10, 2, 64, kv_heads=1), precision="fp8")
    with pytest.raises(ValueError, match="share no scale in FP8; use heads=1"):
        attend(replace(SMALL, heads=2), request)


def inputs_of_bugs():
    """Blocks of scales that differ, and heads."""
    q, k, v = qkv(150, 331, 4, 64, kv_heads=2)
    q[:, 64:128, 1] *= 4
    k[:, 128:256] *= 3
    v[:, :128, 1] *= 20
    return q, k, v


def is_right(*inputs, **options):
    request = make_request(*inputs, **options)
    o, lse = attend(SMALL, request)
    return all(x.ok for x in assess_request({"o": o, "lse": lse}, request).values())


def right():
    """Whether the result for these inputs is."""
    return is_right(*inputs_of_bugs(), precision="fp8")


def right_of_32_bits():
    return is_right(*(x.to(E4M3) for x in inputs_of_bugs()))


def right_of_few_keys():
    return is_right(*qkv(9, 9, 1, 64), precision="fp8", causal=True)


def right_of_large_scores():
    q, k, _ = qkv(100, 300, 2, 64)
    return weights_add_up(q * 300, k * 300, "head")


def right_of_blocks():
    q, k, v = qkv(100, 300, 2, 64)
    k[:, :128] *= 1e-4
    return is_right(q, k, v, precision="fp8")


def right_of_a_small_block():
    q, k, v = qkv(150, 331, 2, 64)
    k[:, :128] *= 0.01
    return is_right(q, k, v, precision="fp8", causal=True, scale=0.02)


def weights_add_up(q, k, scales):
    """Whether attention to values of 1 is 1, up to the rounding of P."""
    request = make_request(q, k, torch.ones_like(k), precision=Fp8(scales), causal=True)
    o, _ = attend(SMALL, request)
    return bool(((o - 1).abs() < 0.1).all())


BUGS = {
    "the scale of V is forgotten": Bug(
        "consume", [("out = out.scaled(tile_scales.value)", "pass")], WRONG
    ),
    "the LSE counts what P is scaled by": Bug(
        "consume", [("row_max -= scales.SHIFT", "pass")], WRONG
    ),
    "the scale of another block of K": Bug(
        "TileScales.of_block", [("block * problem.BLOCK_KV // KEYS_OF_SCALE", "block")], WRONG
    ),
    "the scale of another head of K": Bug(
        "Scales.of_tile", [("head // problem.GROUP", "head // problem.GROUP * 0")], WRONG
    ),
    "the scale of another block of Q": Bug(
        "Scales.of_tile", [("query // WARPGROUP_ROWS", "0")], WRONG
    ),
    "blocks of V count the same": Bug(
        "TileScales.of_block", [("self.SHIFT + shift", "self.SHIFT")], WRONG
    ),
    "the row sum counts the scale of V": Bug(
        "TileScales.of_block", [("gl.exp2(-shift)", "1.0")], WRONG
    ),
    "all blocks' sums weigh the same": Bug("RowSums.grown", [("weight * new", "new")], WRONG),
    "scales as of heads": Bug(
        "Scales.of_tile", [("elif self.PER_BLOCK", "elif False")], WRONG
    ),
    "P's keys are in their own order": Bug(
        "operands.rounded", [("2, 4]).permute((0, 1, 3, 2))", "4, 2])")], WRONG
    ),
    "pairs of keys change places": Bug(
        "operands.rounding_ptx", [("{{low, high}}", "{{high, low}}")], WRONG
    ),
    "the second key of a pair is not hidden": Bug(
        "QueryProblem.masked", [("k_pos < last", "k_pos <= last")], WRONG, right_of_few_keys
    ),
    "the maximum of first keys": Bug("largest", [("max.f16 low, low, high; ", "")], WRONG),
    "the sum of first keys": Bug(
        "sums", [("add.f32 $0, first, second", "mov.b32 $0, first")], WRONG
    ),
    "P's keys are in their own order, of scores of 32 bits": Bug(
        "operands.rounded", [(".permute((0, 1, 3, 2, 4))", "")], WRONG, right_of_32_bits
    ),
    "neighbouring keys change places": Bug(
        "operands.rounding_ptx", [("\"$5, $4\"", "\"$4, $5\"")], WRONG, right_of_32_bits
    ),
    "pairs of keys change places, of scores of 32 bits": Bug(
        "operands.rounding_ptx", [("{{low, high}}", "{{high, low}}")], WRONG, right_of_32_bits
    ),
    "no score is subtracted": Bug(
        "powers_of_pairs", [("pivot * (-1.0 / scale_log2)", "pivot * 0")], WRONG,
        right_of_large_scores,
    ),
    "a pivot of another scale may be out of reach": Bug(
        "powers_of_pairs", [("-MOST), MOST", "-LARGEST), LARGEST")], WRONG, right_of_a_small_block
    ),
    "a pivot of another scale counts as one of this scale": Bug(
        "powers_of_pairs", [("if OF_BLOCKS", "if False")], WRONG, right_of_blocks
    ),
    "V is not transposed": Bug(
        "fill_values", [("if is_fp8(v.first.dtype)", "if False")], "a box at|in flight|wrong result"
    ),
    "V's keys are not side by side": Bug(
        "operands.multiply_pv", [("v_tile.permute((1, 0))", "v_tile")], "contiguous"
    ),
    "P is of the block before": Bug(
        "attend",
        [("        p = rounded(p, buffers.v.tile(stage), acc)\n        acc", "        acc"),
         ("        p, row_max, row_sum, alpha = ", "        _, row_max, row_sum, alpha = ")],
        WRONG,
    ),
    "the rest of P V is not waited for": Bug(
        "Output.wait",
        [("_wait(IN_FLIGHT, deps=[tokens[0]])", "_wait(1, deps=[tokens[0]])")],
        "in flight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, bug.case or right, monkeypatch)


RUNS = dict.fromkeys([right, *(bug.case for bug in BUGS.values() if bug.case)])


@pytest.mark.parametrize("outcome", RUNS)
def test_nothing_is_found_where_no_bug_is(outcome, monkeypatch):
    assert list(outcomes(outcome, monkeypatch)) == ["", "", ""]
