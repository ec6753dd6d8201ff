"""FA4's kernel for Hopper without a GPU, in the emulator of test_hopper_emulated.py."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fp8.quantize import LARGEST_SCORE
from flash_versions.versions.oracle import budget, reference
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.flash_versions.versions.test_attention import CASES
from tests.helpers.kernels.quantized import prepare
from tests.helpers.rotation import rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa4.hopper.host")
host, config = LOADED["fa4.hopper.host"], LOADED["fa4.hopper.config"]
DTYPES = [torch.float16, torch.bfloat16]
SMALL = config.RolesConfig(block_kv=64)
CONFIGS = {
    "as it is": SMALL,
    "no turns": replace(SMALL, ping_pong=False),
    "one Q buffer": replace(SMALL, q_stages=1),
    "three consumers": replace(SMALL, consumers=3, stages=3),
    "aligned tiles": replace(SMALL, block_kv=128),
    "four stages": replace(SMALL, stages=4),
    "one stage": replace(SMALL, stages=1, ping_pong=False),
    "heads by threes": replace(SMALL, section=3),
    "grid": replace(SMALL, scheduler="grid"),
    "dynamic": replace(SMALL, scheduler="dynamic"),
    "dynamic, three consumers": replace(SMALL, consumers=3, stages=3, scheduler="dynamic"),
    "always rescale": replace(SMALL, threshold=0.0),
    "rescale sooner": replace(SMALL, threshold=4.0),
    "all by the polynomial": replace(SMALL, eighths=8),
}
by_order = pytest.mark.parametrize("order", ORDERS, indirect=True)


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles; and budgets of the
    same quantised inputs.
    """
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))
    for module in (budget, reference):
        monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(budget, "available", lambda device: True)


@pytest.fixture
def order(request, monkeypatch):
    """Run a test in an order, named by its parameter."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[request.param])


def qkv(M, N, heads, D, kv_heads=None, batch=1, dtype=torch.bfloat16, D_v=None):
    q = torch.randn(batch, M, heads, D, dtype=dtype)
    k = torch.randn(batch, N, kv_heads or heads, D, dtype=dtype)
    v = torch.randn(batch, N, kv_heads or heads, D_v or D, dtype=dtype)
    return q, k, v


def attend(schedule, request):
    """(o, lse) of the emulated kernel, called as by `attention`."""
    if request.precision is None:
        o, lse, _ = host.forward(in_vectors(request), schedule)
    else:
        o, lse, _ = host.forward_quantized(request, prepare(request), schedule)
    return narrowed(o, request.v), lse


def assess(schedule, request):
    o, lse = attend(schedule, request)
    return assess_request({"o": o, "lse": lse}, request)


def check(schedule, q, k, v, **options):
    request = make_request(q, k, v, **options)
    for name, accuracy in assess(schedule, request).items():
        assert accuracy.ok, f"{name}: {accuracy}"


def growing(M, N, block, queries=slice(None)):
    """q, k and v whose scores grow by 3 or more times 2^8, from block to block of keys as the
    kernel visits them, the last one first; those of other queries are all the same.
    """
    q, k, v = torch.zeros(1, M, 2, 64), torch.zeros(1, N, 2, 64), torch.randn(1, N, 2, 64)
    size = 1 + torch.rand(1, M, 2)
    q[:, queries, :, 0] = size[:, queries]
    k[..., 0] = (70 * (N - torch.arange(N)) / block)[None, :, None]
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize(("case", "dtype"), rotated(CASES, DTYPES))
def test_every_case_that_it_takes(case, dtype):
    inputs, options = case.inputs(dtype, "cpu"), case.all_options("cpu")
    if not all(x.numel() for x in inputs):
        pytest.skip("what no descriptor can address does not come to this kernel")
    request = make_request(*inputs, **options)
    if reason := LOADED["fa3.hopper.host"].left_to_portable(request):
        pytest.skip(reason)
    for threshold in (0.0, 8.0):
        schedule = replace(config.default_config(request), threshold=threshold)
        check(schedule, *inputs, **options)


HEAD_DIMS = [
    (64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 128), (64, 256), (256, 64),
    (32, 32), (16, 64), (64, 24),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "dtype"), rotated(HEAD_DIMS, DTYPES))
def test_head_dims(dims, dtype):
    D, D_v = dims
    inputs = qkv(170, 300, 2, D, kv_heads=1, dtype=dtype, D_v=D_v)
    check(None, *inputs)
    schedule = replace(config.default_config(make_request(*inputs)), threshold=8.0)
    check(schedule, *inputs, causal=True)


@pytest.mark.parametrize(("name", "order"), rotated(CONFIGS, ORDERS), indirect=["order"])
def test_every_switch(name, order):
    """More tiles than programs, ragged at both ends; rows without keys, a window."""
    schedule = CONFIGS[name]
    check(schedule, *qkv(200, 330, 3, 64, kv_heads=1))
    check(schedule, *qkv(300, 200, 1, 64, batch=2), causal=True, window=(100, None))


@by_order
def test_o_in_parts(order):
    """Four of a tile, which consumer and storer hand over one after the other."""
    check(replace(SMALL, o_columns=64), *qkv(300, 60, 4, 256))


OPTIONS = [
    {"window": (100, None), "causal": True}, {"window": (64, 10)}, {"window": (None, 70)},
    {"softcap": 2.0, "causal": True}, {"softcap": 30.0, "window": (100, 50)},
]  # fmt: skip


@pytest.mark.parametrize(("options", "lengths"), rotated(OPTIONS, [(200, 300), (300, 200)]))
def test_windows_and_softcap(options, lengths):
    check(None, *qkv(*lengths, 2, 64, kv_heads=1), **options)


RULES = list(product([0.0, 4.0, 8.0], [0, 1, 2, 4, 8]))  # threshold, eighths


@pytest.mark.parametrize(("rule", "dtype"), rotated(RULES, DTYPES))
def test_threshold_and_share_of_the_polynomial(rule, dtype):
    threshold, eighths = rule
    q, k, v = qkv(150, 330, 2, 64, kv_heads=1, dtype=dtype)
    check(replace(SMALL, threshold=threshold, eighths=eighths), 3 * q, k, v, causal=True)


# ------------------------------------------------------------------------------- FP8
@pytest.mark.parametrize(
    ("dims", "precision"),
    rotated(
        [(64, 64), (80, 80), (128, 128), (256, 256), (64, 256), (64, 20)],
        ["fp8:tensor", "fp8:head", "fp8", "fp8:block:e5m2"],
    ),
)
def test_fp8(dims, precision):
    D, D_v = dims
    q, k, v = qkv(170, 301, 2, D, kv_heads=1, D_v=D_v)
    v[:, :128] *= 30
    check(None, q, k, v, causal=True, precision=precision)


OF_FP8 = [{}, {"causal": True}, {"window": (64, 10)}, {"scale": 3.0}, {"scale": 1e-4}]


@pytest.mark.parametrize(("options", "threshold"), rotated(OF_FP8, [0.0, 4.0, 8.0]))
def test_fp8_thresholds(options, threshold):
    """P starts at 2^(8 - threshold)."""
    schedule = replace(SMALL, consumers=3, threshold=threshold)
    check(schedule, *qkv(200, 300, 2, 64, kv_heads=1), precision="fp8", **options)


def test_fp8_has_no_polynomial():
    request = make_request(*qkv(10, 10, 2, 64), precision="fp8")
    with pytest.raises(ValueError, match="eighths=1 is not possible in FP8; 0 is"):
        attend(replace(SMALL, eighths=1), request)


@pytest.fixture
def started(monkeypatch):
    """The scores, of two keys each, of every step of `raise_start`."""
    found = []
    kernel = LOADED["fa4.hopper.forward"]
    raise_start = kernel.raise_start

    def noted(s, *state):
        found.append(s)
        return raise_start(s, *state)

    monkeypatch.setattr(kernel, "raise_start", noted)
    return found


@pytest.mark.parametrize("threshold", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 3.0, 300.0])
def test_fp8_scores_of_any_size(size, threshold, started):
    """One head of usual scores and one of others, small enough for starts or not; rows without
    keys. Of the largest scores a budget says nothing, but weights still add up to 1.
    """
    q, k, v = qkv(200, 150, 2, 64)
    q[:, :, 1] *= size
    k[:, :, 1] *= size
    schedule = replace(SMALL, threshold=threshold, starts=True)
    check(schedule, q, k, v, precision="fp8:head", causal=True)
    steps = len(started)
    request = make_request(q, k, torch.ones_like(v), precision="fp8:head", causal=True)
    o, lse = attend(schedule, request)
    weights = torch.where(lse.isfinite(), 1.0, 0.0).mT[..., None]
    assert ((o - weights).abs() < 0.1).all()
    assert (weights == 0).any()
    check(schedule, q[:, :, :1], k[:, :, :1], v[:, :, :1], precision="fp8:head", causal=True)
    of_usual = len(started) - 2 * steps
    assert steps == (2 * of_usual if size <= 3.0 else of_usual) > 0


@pytest.mark.parametrize(("factor", "starts"), [(0.999, True), (1.003, False)])
@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_fp8_starts_up_to_their_limit(sign, threshold, factor, starts, started):
    """The largest products that there are, from block to block less of them, all of one sign."""
    q, k, v = qkv(64, 300, 1, 64)
    q[:], k[:] = 1.0, sign * torch.linspace(0.3, 1, 300)[None, :, None, None]
    quantized = prepare(make_request(q, k, v, precision="fp8:head"))
    unit = (quantized.q_scale * quantized.k_scale).item() * LARGEST_SCORE * math.log2(math.e)
    scale = factor * (2**11 - 8) / unit
    schedule = replace(SMALL, starts=True, threshold=threshold)
    check(schedule, q, k, v, precision="fp8:head", scale=scale)
    assert bool(started) == starts
    o, _ = attend(schedule, make_request(q, k, v * 0 + 1, precision="fp8:head", scale=scale))
    assert ((o - 1).abs() < 0.1).all()


def test_fp8_has_starts_where_they_pay():
    for precision, D, starts in (
        ("fp8:head", 128, True), ("fp8:tensor", 80, True), ("fp8:head", 64, False),
        ("fp8:block", 128, False), ("fp8", 256, False), (None, 128, False),
    ):  # fmt: skip
        q = torch.empty(1, 64, 16, D, dtype=torch.bfloat16)
        q = q.to(torch.float8_e4m3fn) if precision is None else q
        chosen = config.fp8_config(make_request(q, q, q, precision=precision))
        assert chosen.starts == starts, precision
        assert chosen.threshold == 3.0, precision


@pytest.mark.parametrize(
    ("keys", "threshold"),
    [(2, 3), (4096, 3), (4097, 2), (8192, 2), (8193, 1), (16384, 1), (16385, 1), (65536, 1)],
)
def test_fp8_threshold_is_the_largest_that_loses_an_eighth(keys, threshold):
    q, k = torch.empty(1, 64, 16, 128), torch.empty(1, keys, 16, 128)
    chosen = config.fp8_config(make_request(q.bfloat16(), k.bfloat16(), k.bfloat16()))
    assert chosen.threshold == threshold
    rounded_to_0 = torch.tensor(2.0**-10).to(torch.float8_e4m3fn)
    assert rounded_to_0 == 0 != torch.tensor(1.01 * 2**-10).to(torch.float8_e4m3fn)
    if keys <= 16384:
        assert keys * 2 ** (threshold - 18) <= 1 / 8
    if threshold < 3:
        assert keys * 2 ** (threshold + 1 - 18) > 1 / 8


@pytest.mark.parametrize(("weight", "lost"), [(0.99, True), (1.6, False)])
def test_fp8_loses_an_eighth_at_most(weight, lost):
    """One key, in the block that is visited first, outweighs all others: 4095 keys of 2^-15 of its
    weight have an eighth of it, and are rounded to 0 if they are any lighter. Rounding moves each
    by half of the numbers' distance at most, which is 2^-15 of that weight, too.
    """
    q, k, v = qkv(64, 4096, 1, 64)
    q[:], k[:], v[:] = 0.0, 0.0, 1.0
    q[..., 0] = 1.0
    k[:, -1, :, 0], v[:, -1] = 8.0, 0.0
    scale = math.log(2**15 / weight) / 8
    o, _ = attend(None, make_request(q, k, v, precision="fp8:head", scale=scale))
    others = 4095 * 2**-15 * weight
    exact = others / (1 + others)
    assert ((o - exact).abs() <= 4095 * 2**-15 / (1 + others)).all()
    assert (o == 0).all() == lost


# ------------------------------------------------------------------------------- rescaling
@pytest.fixture
def raised(monkeypatch):
    """The rows that were raised, (64,), of each call of `correct`."""
    found = []
    kernel = LOADED["fa4.hopper.correction"]
    correct = kernel.correct

    def noted(acc, alpha):
        found.append(alpha.data != 1)
        return correct(acc, alpha)

    monkeypatch.setattr(kernel, "correct", noted)
    return found


@pytest.mark.parametrize("precision", [None, "fp8:head"])
@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize("threshold", [0.0, 4.0, 8.0])
def test_every_block_raises_the_reference(threshold, block_kv, precision, raised):
    q, k, v = growing(100, 300, block_kv)
    schedule = replace(SMALL, block_kv=block_kv, threshold=threshold)
    check(schedule, q, k, v, precision=precision)
    if threshold > 0:
        blocks = -(-300 // block_kv)
        assert len(raised) == 2 * 2 * blocks  # heads, consumers
        rows = torch.stack(raised).sum(1)
        assert (rows == 0).sum() == 2 * 2  # a first block sets the reference
        assert set(rows.tolist()) == {0, 64, 100 - 64}  # the last tile ends in rows of zeros


@pytest.mark.parametrize("precision", [None, "fp8:head"])
@pytest.mark.parametrize("threshold", [4.0, 8.0])
def test_no_block_raises_a_reference_that_stays(threshold, precision, raised):
    q, k, v = growing(100, 300, 64)
    k[..., 0] = 1.0
    check(replace(SMALL, threshold=threshold), q, k, v, precision=precision)
    assert raised and not torch.stack(raised).any()


@pytest.mark.parametrize("growth, any_raised", [(7.5, False), (8.5, True)])
def test_the_threshold_is_in_log2_units(growth, any_raised, raised):
    """From the second block on nothing grows: it is compared with what the first one set."""
    q, k, v = growing(64, 128, 64)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :64, :, 0] = growth
    check(SMALL, q, k, v, scale=math.log(2))
    assert torch.stack(raised).any() == any_raised


def test_a_row_does_not_depend_on_its_neighbours():
    """Rows that are not raised are multiplied by 1 or not at all: the same bits."""
    results = []
    for raising in ([], [41]):
        torch.manual_seed(0)
        q, k, v = growing(64, 300, 64, raising)
        results.append(attend(SMALL, make_request(q, k, v)))
    others = torch.arange(64) != 41
    (o, lse), (o_beside, lse_beside) = results
    assert torch.equal(o[:, others], o_beside[:, others])
    assert torch.equal(lse[..., others], lse_beside[..., others])
    assert not torch.equal(o, o_beside)


def test_the_same_bits_in_every_order(monkeypatch):
    request = make_request(*qkv(200, 330, 2, 64, kv_heads=1), causal=True)
    schedules = [SMALL, replace(SMALL, scheduler="dynamic", stages=4, q_stages=1)]
    results = []
    for order in (*ORDERS.values(), ORDERS["any order"]._replace(seed=9)):
        monkeypatch.setattr(gluon_machine, "order", order)
        results += [attend(schedule, request) for schedule in schedules]
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(lse, results[0][1])


# ------------------------------------------------------------------------------- planted bugs
def usual():
    q, k, v = qkv(150, 330, 4, 64)
    return make_request(2 * q, k, v)


def few_keys():
    return make_request(*qkv(300, 60, 4, 64))


def wide():
    return make_request(*qkv(300, 60, 2, 128))


def one_row_grows():
    """The last row of each warp."""
    return make_request(*growing(150, 330, 64, torch.arange(150) % 16 == 15))


def one_row_grows_in_fp8():
    return one_row_grows()._replace(precision="fp8:head:e4m3")


def rows_of_starts_grow():
    return make_request(*growing(150, 330, 64), precision="fp8:head", scale=0.025)


def rows_without_keys():
    return make_request(*qkv(150, 90, 1, 64), precision="fp8:head", causal=True)


def in_fp8():
    q, k, v = qkv(150, 330, 4, 64, kv_heads=2)
    k[:, 128:256] *= 3
    v[:, :128, 1] *= 20
    return make_request(q, k, v, precision="fp8")


FP8 = replace(SMALL, threshold=4.0)
STARTS = replace(FP8, starts=True)
DYNAMIC = replace(SMALL, scheduler="dynamic", stages=4)
V_WAITED = "acc = acc.wait(acc_token)"
ONE_Q, IN_PARTS = replace(SMALL, q_stages=1), replace(SMALL, o_columns=64)
BEFORE, RELEASED = "= first_state(problem, buffers)", "buffers.q.release(q_stage)"
O_TAKEN = "mbarrier.arrive(buffers.o_empty.index(c), count=1)"
O_FULL = "mbarrier.wait(buffers.o_full.index(c), turn & 1)"
O_EMPTY = "mbarrier.wait(buffers.o_empty.index(CONSUMER), (turn & 1) ^ 1)"
BUGS = {
    "the storer does not say that it has taken O": Bug(
        "store", [(O_TAKEN, "pass")], "consume 0 in .*compute:.*o_empty"
    ),
    "the storer waits for the phase before": Bug(
        "store", [(O_FULL, O_FULL.replace("turn & 1", "(turn & 1) ^ 1"))],
        "consume [01] in .*compute:.*o_empty",
    ),
    "the storer does not wait for O": Bug(
        "store", [(O_FULL, "pass")], "consume [01] in .*compute:.*o_empty"
    ),
    "the storer takes O before it has left": Bug(
        "store",
        [("tma.store_wait(0)", "pass"), ("round += 1", "round += 1\n    tma.store_wait(0)")],
        WRONG,
    ),
    "the last O is not waited for": Bug(
        "store", [("tma.store_wait(0)", "pass")], "stores in flight"
    ),
    "a consumer does not release Q": Bug(
        "attend", [(RELEASED, "pass")], "load 2 in .*fill", (ONE_Q, usual)
    ),
    "a consumer releases Q before its products": Bug(
        "attend", [(f"    {RELEASED}", "    pass"), (BEFORE, f"{BEFORE}; {RELEASED}")],
        WRONG, (ONE_Q, usual)
    ),
    "every part of O goes to the first columns": Bug(
        "store", [("moved(box, i * o.block_type.shape[-1])", "moved(box, 0)")], WRONG,
        (IN_PARTS, wide)
    ),
    "the storer takes one part of O": Bug(
        "store", [("for i in gl.static_range(schedule.O_PARTS)", "for i in gl.static_range(1)")],
        "consume [01] in .*compute:.*o_empty", (IN_PARTS, wide)
    ),
    "a consumer does not wait for the storer": Bug(
        "compute", [(O_EMPTY, "pass")], "store 3 in store:.*o_full", (SMALL, few_keys)
    ),
    "a consumer waits for the phase of the storer": Bug(
        "compute", [(O_EMPTY, O_EMPTY.replace(" ^ 1", ""))], "consume 0 in .*compute"
    ),
    "a consumer does not hand over": Bug(
        "compute", [("mbarrier.arrive(buffers.o_full.index(CONSUMER), count=1)", "pass")],
        "store 3 in store:.*o_full",
    ),
    "O is handed over without a fence": Bug(
        "compute", [("fence_async_shared()", "pass")], "without fence_async_shared"
    ),
    "the scheduler does not count the storer": Bug(
        "forward_kernel", [("SCHEDULER, CONSUMERS + 1)", "SCHEDULER, CONSUMERS)")],
        "more arrivals|in .*receive", (DYNAMIC, few_keys)
    ),
    "the storer does not receive tiles": Bug(
        "store", [("scheduler.receive(round)", "scheduler.following(round)")],
        "load 2 in .*claim|wrong result", (DYNAMIC, usual)
    ),
    "K is not released": Bug(
        "attend", [("        buffers.k.release(stage)", "        pass")], "load 2 in .*fill"
    ),
    "V is not released": Bug(
        "attend",
        [("buffers.v.release(before)", "pass")],
        "load 2 in .*fill",
    ),
    "V is released while it is read": Bug(
        "attend",
        [(f"{V_WAITED}\n        buffers.v.release(before)",
          f"buffers.v.release(before)\n        {V_WAITED}")],
        WRONG,
    ),
    "K is read before it is there": Bug(
        "attend", [("        buffers.k.wait(stage)", "")],
        "more arrivals",
    ),
    "V is read before it is there": Bug(
        "attend", [("buffers.v.wait(before)", "pass")], "more arrivals"
    ),
    "Q is read before it is there": Bug("compute", [("buffers.q.wait(q_stage)", "pass")], WRONG),
    "the turn is not passed on": Bug(
        "attend", [("named_barrier_arrive(CONSUMER, schedule.CONSUMERS)", "pass")],
        "consume 1 in .*named_barrier_sync"
    ),
    "the accumulator is not corrected": Bug(
        "attend", [("acc = corrected(acc, alpha)", "pass")], WRONG
    ),
    "one of a thread's two rows decides": Bug(
        "correct", [(" setp.ne.or.f32 mine, $3, 0f3F800000, mine;", "")], WRONG,
        (SMALL, one_row_grows),
    ),
    "a thread's rows are corrected by one of them": Bug(
        "correction_ptx", [("${2 * n + i}", "${2 * n}")], WRONG, (SMALL, one_row_grows)
    ),
    "rows that stay are corrected, the others not": Bug(
        "correction_ptx", [("@!raised", "@raised")], WRONG, (SMALL, one_row_grows)
    ),
    "the reference is not carried on": Bug(
        "fold_scores", [("row_max, pivot, alpha = ", "_, pivot, alpha = ")], WRONG
    ),
    "the row sum is not rescaled": Bug(
        "fold_scores", [("grown(alpha", "grown(0 * alpha + 1")], WRONG
    ),
    "P is below the block's own maximum": Bug(
        "raise_reference",
        [('tl.where(new_max == float("-inf"), 0.0, new_max)',
          'tl.where(new_max == float("-inf"), 0.0, block_max)')],
        WRONG,
    ),
    "P outgrows its type": Bug(
        "raise_reference", [("row_max + THRESHOLD", "row_max + THRESHOLD * 20")], WRONG,
        (FP8, one_row_grows_in_fp8),
    ),
    "P outgrows its type above a start": Bug(
        "raise_start", [("before - THRESHOLD", "before - THRESHOLD * 20")], WRONG,
        (STARTS, rows_of_starts_grow),
    ),
    "a start is not carried on": Bug(
        "raise_start", [("return p, start,", "return p, before,")], WRONG,
        (STARTS, rows_of_starts_grow),
    ),
    "starts begin as references do": Bug(
        "attend", [("row_max = -row_max", "pass")], WRONG, (STARTS, rows_of_starts_grow)
    ),
    "a row without keys has a reference": Bug(
        "reference_of", [("start == NO_START", "start == float('inf')")], WRONG,
        (STARTS, rows_without_keys),
    ),
    "P in FP8 is not shifted": Bug(
        "powers_of_pairs", [("shift = shift - (", "shift = -(")], WRONG, (FP8, in_fp8)
    ),
    "the LSE counts what P is scaled by": Bug(
        "compute", [("row_max - scales.SHIFT", "row_max")], WRONG, (FP8, in_fp8)
    ),
    "the scale of V is forgotten": Bug(
        "compute", [("out = out.scaled(scales.value)", "pass")], WRONG, (FP8, in_fp8)
    ),
    "the scale of another block of K": Bug(
        "TileScales.of_block", [("block * problem.BLOCK_KV // KEYS_OF_SCALE", "block")], WRONG,
        (FP8, in_fp8),
    ),
    "the keys of P are in their own order": Bug(
        "operands.rounded", [("2, 4]).permute((0, 1, 3, 2))", "4, 2])")], WRONG, (FP8, in_fp8)
    ),
    "V is not transposed": Bug(
        "fill_values", [("if is_fp8(v.first.dtype)", "if False")], WRONG, (FP8, in_fp8)
    ),
}  # fmt: skip


def right(case):
    """Whether the result of a bug's case is."""
    schedule, request = case or (SMALL, usual)
    return all(x.ok for x in assess(schedule, request()).values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", dict.fromkeys(x.case for x in BUGS.values()))
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
