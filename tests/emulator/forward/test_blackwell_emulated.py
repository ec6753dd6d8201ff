"""FA4's kernel for Blackwell without a GPU, in the emulator."""

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
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.flash_versions.versions.test_attention import CASES
from tests.helpers.rotation import named, pairwise, rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa4.blackwell.forward")
forward_blackwell = LOADED["fa4.blackwell.forward"]
config = LOADED["fa4.blackwell.config"]
DTYPES = [torch.float16, torch.bfloat16]
SMALL = config.BlackwellConfig(stages=4)


@pytest.fixture(autouse=True)
def small_blackwell(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles."""
    memory = LOADED["fa4.blackwell.tensor_memory"]
    monkeypatch.setattr(memory, "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


@pytest.fixture
def order(request, monkeypatch):
    """Run a test in an order, named by its parameter."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[request.param])


def qkv(M, N, heads, D, kv_heads=None, batch=1, dtype=torch.bfloat16, D_v=None):
    q = torch.randn(batch, M, heads, D, dtype=dtype)
    k = torch.randn(batch, N, kv_heads or heads, D, dtype=dtype)
    v = torch.randn(batch, N, kv_heads or heads, D_v or D, dtype=dtype)
    return q, k, v


def check(schedule, q, k, v, **options):
    request = make_request(q, k, v, **options)
    o, lse, _ = forward_blackwell.forward(in_vectors(request), schedule)
    o = narrowed(o, v)
    for name, accuracy in assess_request({"o": o, "lse": lse}, request).items():
        assert accuracy.ok, f"{name}: {accuracy}"


# A case runs with one dtype, with each length once and with each threshold once; the rest is wide.
RUNS_OF_CASES = [
    pytest.param(
        case,
        dtype,
        more,
        threshold,
        id=f"{named(case)}-{named(dtype)}-{'longer' if more else 'as it is'}-{threshold}",
        marks=pytest.mark.wide if (i + j) % 2 or (i // 2 + m + t) % 2 else (),
    )
    for (i, case), (j, dtype), (m, more), (t, threshold) in product(
        enumerate(CASES), enumerate(DTYPES), enumerate([0, 300]), enumerate([0.0, 8.0])
    )
]


@pytest.mark.parametrize(("case", "dtype", "more", "threshold"), RUNS_OF_CASES)
def test_every_case_that_it_takes(case, dtype, more, threshold):
    """Also with more queries and keys, so that programs walk over several tiles and blocks."""
    case = replace(case, M=case.M + more, N=case.N + more)
    inputs, options = case.inputs(dtype, "cpu"), case.all_options("cpu")
    if not all(x.numel() for x in inputs):
        pytest.skip("what no descriptor can address does not come to this kernel")
    request = make_request(*inputs, **options)
    if reason := LOADED["fa4.blackwell.host"].left_to_portable(request):
        pytest.skip(reason)
    check(replace(config.default_config(request), threshold=threshold), *inputs, **options)


@pytest.mark.parametrize(
    ("order", "D", "causal"), pairwise(ORDERS, [64, 128], [False, True]), indirect=["order"]
)
def test_every_order(order, D, causal):
    """More tiles than programs, ragged at both ends."""
    check(None, *qkv(300, 330, 3, D, kv_heads=1), causal=causal)


SWITCHES = [
    replace(SMALL, scheduler="dynamic"), replace(SMALL, stages=3), replace(SMALL, eighths=8),
    replace(SMALL, eighths=1, degree=5), replace(SMALL, eighths=0, threshold=4.0),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "order"), rotated(SWITCHES, ORDERS), indirect=["order"])
def test_every_switch(schedule, order):
    check(schedule, *qkv(300, 200, 2, 64, batch=2), causal=True, window=(100, None))


OPTIONS = [
    {"window": (100, None), "causal": True}, {"window": (64, 10)}, {"window": (None, 70)},
    {"softcap": 2.0, "causal": True}, {"softcap": 30.0, "window": (100, 50)},
]  # fmt: skip


@pytest.mark.parametrize(("options", "lengths"), rotated(OPTIONS, [(300, 600), (600, 300)]))
def test_windows_and_softcap(options, lengths):
    check(None, *qkv(*lengths, 2, 64, kv_heads=1), **options)


@pytest.mark.parametrize("D, D_v", [(64, 128), (128, 64), (80, 16), (8, 96)])
def test_head_dims(D, D_v):
    check(None, *qkv(170, 300, 2, D, kv_heads=1, D_v=D_v))


def test_the_same_bits_in_every_order(monkeypatch):
    request = make_request(*qkv(300, 330, 2, 64, kv_heads=1), causal=True)
    results = []
    for order in (*ORDERS.values(), ORDERS["any order"]._replace(seed=9)):
        monkeypatch.setattr(gluon_machine, "order", order)
        for schedule in (SMALL, replace(SMALL, scheduler="dynamic", stages=3)):
            results.append(forward_blackwell.forward(request, schedule)[:2])
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(lse, results[0][1])


# ------------------------------------------------------------------------------- rescaling
def growing(M, N, queries=slice(None), growth=12.0):
    """q, k and v whose scores grow by `growth` or more, in log2 units, from block to block of 128
    keys as the kernel visits them, the last one first; those of other queries are all the same.
    """
    q, k, v = torch.zeros(1, M, 2, 64), torch.zeros(1, N, 2, 64), torch.randn(1, N, 2, 64)
    size = 1 + torch.rand(1, M, 2)
    q[:, queries, :, 0] = size[:, queries]
    k[..., 0] = growth * math.log(2) * 8 * ((N - 1 - torch.arange(N)) // 128)[None, :, None]
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.fixture
def raised(monkeypatch):
    """Whether a row of the tile was raised, of each call of `rescale`."""
    found = []
    rescale = forward_blackwell.rescale

    def noted(acc, alpha, D):
        found.append(bool((alpha.data < 1).any()))
        return rescale(acc, alpha, D)

    monkeypatch.setattr(forward_blackwell, "rescale", noted)
    return found


@pytest.mark.parametrize("threshold, growth, expected", [
    (8.0, 12.0, True), (8.0, 3.0, False), (4.0, 5.0, True), (0.0, 0.5, True), (8.0, 0.0, False),
])  # fmt: skip
def test_o_is_rescaled_where_the_maximum_grew_by_more(threshold, growth, expected, raised):
    """Scores of the two later blocks grow by once and twice as much. They are all the same, so the
    errors of a polynomial would not cancel in the LSE.
    """
    q, k, v = growing(256, 384, growth=growth)
    q[..., 0] = 1.0
    check(replace(SMALL, threshold=threshold, eighths=0), q, k, v)
    assert len(raised) == 2 * 2 * 2  # heads, tiles, later blocks
    assert any(raised) == expected


def test_a_row_does_not_depend_on_its_neighbours():
    """Rows that are not raised are multiplied by 1 or not at all: the same bits."""
    results = []
    for raising in ([], [41]):
        torch.manual_seed(0)
        request = make_request(*growing(256, 384, raising))
        results.append(forward_blackwell.forward(request, SMALL)[:2])
    others = torch.arange(256) != 41
    (o, lse), (o_beside, lse_beside) = results
    assert torch.equal(o[:, others], o_beside[:, others])
    assert torch.equal(lse[..., others], lse_beside[..., others])
    assert not torch.equal(o, o_beside)


# ------------------------------------------------------------------------------- planted bugs
def usual():
    """Two tiles of heads more than programs, all of whose references are raised."""
    q, k, v = qkv(300, 400, 3, 64, kv_heads=1)
    return make_request(20 * q, k, v)


def causal():
    return usual()._replace(window_right=0)


def one_row_grows():
    return make_request(*growing(300, 400, torch.arange(300) % 128 == 77))


def few_keys():
    """One block for each tile: the correction has nothing to do but the ends of tiles."""
    return make_request(*qkv(300, 100, 6, 64))


def wide():
    return make_request(*qkv(300, 200, 2, 128))


DYNAMIC = replace(SMALL, scheduler="dynamic")
EARLY = "is to use it|before its product is done"  # of a product in the queue
P_FULL = "mbarrier.wait(buffers.p_full.index(t), step & 1)"
S_FULL = "mbarrier.wait(buffers.s_full.index(T), step & 1)"
ALPHA_FULL = "mbarrier.wait(buffers.alpha_full.index(t), step & 1)"
ALPHA_OUT = "buffers.put(alpha, T, ALPHA)"
ALPHA_SAID = "mbarrier.arrive(buffers.alpha_full.index(T), count=1)"
SUMS_FULL = "mbarrier.wait(buffers.sums_full.index(t), round & 1)"
SUMS_READ = "mbarrier.arrive(buffers.sums_empty.index(t), count=1)"
SUMS_EMPTY = "mbarrier.wait(buffers.sums_empty.index(t), (round & 1) ^ 1)"
O_FULL = "mbarrier.wait(buffers.o_full.index(t), round & 1)"
O_MEMORY = "allocate_tensor_memory(gl.float32, [TILES, ROWS, D], O)"
S_MEMORY = "allocate_tensor_memory(gl.float32, [TILES, ROWS, BLOCK_KV], S)"
RESCALED = "rescale(buffers.acc.index(t), buffers.get(t, ALPHA, O), D)"
CORRECTED = "mbarrier.arrive(buffers.p_full.index(t), count=1)"
FIRST = "for t in gl.static_range(TILES):  # O of the tile before was read"
LATE_RESCALE = f"{CORRECTED}\n                rescale(buffers.acc.index(t), alpha, D)"
PHASE = "(step & 1) ^ 1"
BUGS = {
    # products
    "P is read before it is written": Bug("multiply", [(P_FULL, "pass")], EARLY),
    "products wait for the phase before of P": Bug(
        "multiply", [(P_FULL, P_FULL.replace("step & 1", PHASE))], EARLY
    ),
    "P of the other tile": Bug("multiply_pv", [("buffers.p(t)", "buffers.p(1 - t)")], EARLY),
    "O begins with what was there": Bug("multiply", [("i > 0, i + 1", "True, i + 1")], WRONG),
    "O forgets the blocks before": Bug("multiply", [("i > 0, i + 1", "False, i + 1")], WRONG),
    "K is read before it is there": Bug(
        "multiply", [("if t == 0:\n                        buffers.kv.wait(stage)", "pass")],
        f"{EARLY}|{WRONG}|more arrivals"
    ),
    "V is read before it is there": Bug(
        "multiply", [("buffers.kv.wait(v_stage)", "pass")], f"{EARLY}|{WRONG}|more arrivals"
    ),
    "Q is read before it is there": Bug(
        "multiply", [("buffers.q.wait(buffers.q.at(t, round & 1))", "pass")], f"{EARLY}|{WRONG}"
    ),
    "tile 0 releases K": Bug("multiply_qk", [("if t == 0", "if t == 1")], EARLY),
    "tile 0 releases V": Bug("multiply_pv", [("if t == 0", "if t == 1")], EARLY),
    "Q is released by each block": Bug(
        "multiply_qk", [(", last]", ", True]")], f"{EARLY}|{WRONG}|more arrivals"
    ),
    "Q is not released": Bug("multiply_qk", [(", last]", ", False]")], "load 4 in .*fill"),
    "K is not released": Bug(
        "multiply_qk", [("[True, True, last]", "[True, False, last]")], "load 4 in .*fill"
    ),
    "O is complete after each block": Bug(
        "multiply_pv", [(", last]", ", True]")], f"{EARLY}|{WRONG}"
    ),
    "the sums are overwritten by the next tile": Bug("multiply", [(SUMS_EMPTY, "pass")], EARLY),
    "products wait for the phase of the sums": Bug(
        "multiply", [(SUMS_EMPTY, SUMS_EMPTY.replace(" ^ 1", ""))], "multiply 3 in multiply"
    ),
    # softmax
    "S is read before it is computed": Bug("softmax", [(S_FULL, "pass")], EARLY),
    "softmax waits for the phase before": Bug(
        "softmax", [(S_FULL, S_FULL.replace("step & 1", PHASE))], EARLY
    ),
    "alpha is announced before it is written": Bug(
        "softmax",
        [(ALPHA_OUT, "#"), (ALPHA_SAID, f"{ALPHA_SAID}\n                {ALPHA_OUT}")], WRONG
    ),
    "the row sum is not rescaled": Bug("softmax", [("row_sum * alpha", "row_sum")], WRONG),
    "the reference is not carried on": Bug(
        "softmax", [("row_max, pivot, alpha = ", "_, pivot, alpha = ")], WRONG
    ),
    "tile 1 is masked as tile 0": Bug(
        "softmax", [("query += T * ROWS", "pass")], WRONG, (SMALL, causal)
    ),
    "the sums are announced before the maximum": Bug(
        "softmax",
        [("buffers.put(row_max, T, ROW_MAX)", "#"),
         ("index(T), count=1)\n        tile",
          "index(T), count=1)\n        buffers.put(row_max, T, ROW_MAX)\n        tile")], WRONG,
        (SMALL, few_keys)
    ),
    "a row is not added up whole": Bug(
        "exponentiate", [("row_sum += gl", "row_sum = gl")], WRONG
    ),
    # correction
    "alpha of the block before": Bug("correct", [(ALPHA_FULL, "pass")], f"{EARLY}|{WRONG}"),
    "the correction waits for the phase before of alpha": Bug(
        "correct", [(ALPHA_FULL, ALPHA_FULL.replace("step & 1", PHASE))], f"{EARLY}|{WRONG}"
    ),
    "alpha of the other tile": Bug("correct", [("get(t, ALPHA", "get(1 - t, ALPHA")], EARLY),
    "O is not rescaled": Bug("correct", [(RESCALED, "pass")], WRONG),
    "O is rescaled during a product": Bug(
        "correct",
        [(RESCALED, "alpha = buffers.get(t, ALPHA, O)"),
         (f"{CORRECTED}\n            step", f"{LATE_RESCALE}\n            step")],
        EARLY
    ),
    "all rows have to be raised": Bug(
        "rescale", [("gl.min", "gl.max")], WRONG, (SMALL, one_row_grows)
    ),
    "the first block is not released": Bug(
        "correct", [(FIRST, "for t in gl.static_range(0):")], "multiply 3 in multiply"
    ),
    "P counts the softmax only": Bug(
        "forward_kernel", [("barriers(TILES, 2)", "barriers(TILES, 1)")], f"{EARLY}|{WRONG}"
    ),
    "P counts one arrival too many": Bug(
        "forward_kernel", [("barriers(TILES, 2)", "barriers(TILES, 3)")], "multiply 3 in multiply"
    ),
    "the sums are not waited for": Bug(
        "hand_over", [(SUMS_FULL, "pass")], "multiply 3 in multiply", (SMALL, few_keys)
    ),
    "the sums are not released": Bug("hand_over", [(SUMS_READ, "pass")], "multiply 3 in multiply"),
    "the sums are released before they are read": Bug(
        "hand_over", [(SUMS_READ, "#"), (SUMS_FULL, f"{SUMS_FULL}\n    {SUMS_READ}")], EARLY
    ),
    "O is read before it is complete": Bug("hand_over", [(O_FULL, "pass")], EARLY),
    "O is taken for the tile before": Bug(
        "hand_over", [(O_FULL, O_FULL.replace("round & 1", "(round & 1) ^ 1"))], EARLY
    ),
    "O is handed over without a fence": Bug(
        "hand_over",
        [("buffers.o.publish(stage)", "mbarrier.arrive(buffers.o.full.index(0), count=1)")],
        "without fence_async_shared"
    ),
    "O is overwritten before it has left": Bug(
        "hand_over", [("buffers.o.wait_empty(stage)", "pass")], "store 5 in store",
        (SMALL, few_keys)
    ),
    # storer
    "the storer does not wait for O": Bug(
        "store", [("buffers.o.wait(stage)", "pass")], f"{WRONG}|in .*hand_over"
    ),
    "the storer does not release O": Bug(
        "store", [("buffers.o.release(stage)", "pass")], "correct 0 in .*hand_over"
    ),
    "the last O is not waited for": Bug(
        "store", [("tma.store_wait(0)", "pass")], "stores in flight"
    ),
    # memory
    "P is written over alpha": Bug(
        "Buffers.p", [("slice(0, BLOCK_KV)", "slice(BLOCK_KV, BLOCK_KV)")], WRONG
    ),
    "O shares columns with S": Bug(
        "forward_kernel",
        [(S_MEMORY, f"(shared := {S_MEMORY})"), (O_MEMORY, "shared.slice(0, D)")],
        f"{EARLY}|{WRONG}"
    ),
    "O shares columns with the other tile's P": Bug(
        "forward_kernel",
        [(S_MEMORY, f"(shared := {S_MEMORY})"), (O_MEMORY, "shared.slice(64, D)")],
        f"{EARLY}|{WRONG}"
    ),
    "more columns than there are": Bug(
        "forward_kernel", [("[TILES, ROWS, D]", "[3, ROWS, D]")], "640 columns of 512",
        (None, wide)
    ),
    "the scheduler does not count the storer": Bug(
        "forward_kernel", [("SCHEDULER, 5)", "SCHEDULER, 4)")], "more arrivals|in .*receive",
        (DYNAMIC, few_keys)
    ),
}  # fmt: skip


def right(case):
    """Whether the result of a bug's case is."""
    torch.manual_seed(0)
    schedule, request = case or (SMALL, usual)
    request = request()
    o, lse, _ = forward_blackwell.forward(request, schedule)
    return all(x.ok for x in assess_request({"o": o, "lse": lse}, request).values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", dict.fromkeys(x.case for x in BUGS.values()))
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
