"""FA3's backward for Hopper without a GPU, in an emulator that is as late as the rules allow."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed, widened
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS, Deadlock
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.hopper.backward import rows
from flash_versions.versions.oracle.budget import assess_request
from flash_versions.versions.oracle.reference import forward
from flash_versions.versions.oracle.suite import CASES
from tests.emulator.backward.hopper_backward_bugs import BUGS, RUNS
from tests.emulator.planted_bugs import Bug, assert_found, outcomes, plant
from tests.helpers.rotation import rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa4.hopper.backward")
config, host, tiles, backward_hopper = (
    LOADED[f"fa3.hopper.backward.{name}"] for name in ("config", "host", "tiles", "kernel")
)
shared_out = LOADED["fa4.hopper.backward"]
DTYPES = [torch.float16, torch.bfloat16]
USUAL = config.BackwardConfig()
EARLY = replace(USUAL, early=True)
HELD = replace(EARLY, held=True, stages=3)
CONFIGS = {
    "as it is": USUAL,
    "early": EARLY,
    "three stages": replace(USUAL, stages=3),
    "early, three stages": replace(EARLY, stages=3),
    "held": HELD,
    "held, in order": replace(USUAL, held=True),
    "many queries": replace(USUAL, block_q=128),
    "many queries, early, three stages": replace(EARLY, block_q=128, stages=3),
    "many queries, held": replace(HELD, block_q=128),
}


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """Programs walk from tile to tile."""
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


def differentiate(schedule, request, do=None, dlse=None, eighths=0):
    """({name: gradient}, do) of the emulated kernel, as by `attention`; FA4's with eighths."""
    q, k, v = (x.double() for x in request[:3])
    o, lse, _ = forward(request._replace(q=q, k=k, v=v))
    o = o.to(request.q.dtype)
    do = torch.randn(o.shape).to(o.dtype) if do is None else do
    given = in_vectors(request), widened(o), lse.float(), None, widened(do), dlse
    if eighths:
        dq, dk, dv, dsink = shared_out.backward(*given, schedule, eighths=eighths)
    else:
        dq, dk, dv, dsink = backward_hopper.backward(*given, schedule)
    gradients = (narrowed(x, like) for x, like in zip((dq, dk, dv), request[:3]))
    named = dict(zip(("dq", "dk", "dv"), gradients))
    assert (dsink is None) == (request.sink is None)
    return named if dsink is None else named | {"dsink": dsink}, do


def check(schedule, q, k, v, do=None, dlse=None, eighths=0, **options):
    request = make_request(q, k, v, **options)
    gradients, do = differentiate(schedule, request, do, dlse, eighths)
    for name, accuracy in assess_request(gradients, request, do, dlse).items():
        assert accuracy.ok, f"{name}: {accuracy}"
    return gradients


@pytest.mark.parametrize(("case", "dtype"), rotated(CASES, DTYPES))
def test_every_case_that_it_takes(case, dtype, monkeypatch):
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    inputs, options = case.inputs(dtype, "cpu"), case.all_options("cpu")
    if not all(x.numel() for x in inputs):
        pytest.skip("what no descriptor can address does not come to this kernel")
    if reason := backward_hopper.left_to_portable(in_vectors(make_request(*inputs, **options))):
        pytest.skip(reason)
    check(None, *inputs, **options)


HEAD_DIMS = [
    (64, 64), (128, 128), (80, 80), (64, 128), (128, 64), (256, 256), (192, 128), (160, 200),
    (32, 32), (32, 128), (16, 64), (64, 24),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "dtype"), rotated(HEAD_DIMS, DTYPES))
def test_head_dims(dims, dtype):
    D, D_v = dims
    inputs = qkv(100, 200, 4, D, kv_heads=2, dtype=dtype, D_v=D_v)
    check(None, *inputs)
    check(None, *inputs, causal=True)


@pytest.mark.parametrize(("name", "order"), rotated(CONFIGS, ORDERS), indirect=["order"])
def test_every_switch(name, order):
    """Ragged at both ends, a group of heads; queries without keys, keys without queries."""
    schedule = CONFIGS[name]
    check(schedule, *qkv(200, 330, 3, 64, kv_heads=1))
    check(schedule, *qkv(300, 200, 1, 64, batch=2), causal=True, window=(100, None))
    check(schedule, *qkv(100, 600, 1, 64), causal=True, window=(100, None))


@pytest.mark.parametrize("M, N", [(256, 384), (256, 256), (384, 256), (64, 128), (1, 1), (65, 129)])
@pytest.mark.parametrize("schedule", ["as it is", "many queries"])
def test_causal_tiles(M, N, schedule):
    check(CONFIGS[schedule], *qkv(M, N, 2, 64), causal=True)
    check(CONFIGS[schedule], *qkv(M, N, 1, 64), window=(None, 70))


OPTIONS = [
    {"window": (100, None), "causal": True}, {"window": (64, 10)}, {"window": (None, 70)},
    {"window": (70, None)}, {"softcap": 2.0, "causal": True},
    {"softcap": 30.0, "window": (100, 50)},
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "lengths"),
    rotated(list(product(OPTIONS, (32, 64, 128, 256))), [(200, 300), (300, 200)]),
)
def test_windows_and_softcap(case, lengths):
    options, D = case
    check(None, *qkv(*lengths, 1, D), **options)


SHARES = [
    (1, 64, "early", {"causal": True}), (2, 64, "as it is", {}),
    (3, 64, "many queries", {"window": (100, 50)}), (8, 64, None, {"softcap": 30.0}),
    (2, 256, None, {"causal": True}), (8, 256, None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), rotated(SHARES, DTYPES))
def test_a_share_of_polynomials(case, dtype):
    """Ragged at both ends."""
    eighths, D, schedule, options = case
    schedule = CONFIGS[schedule] if schedule else None
    inputs = qkv(100, 200, 2, D, kv_heads=1, dtype=dtype)
    check(schedule, *inputs, eighths=eighths, **options)


@pytest.mark.parametrize("D", [64, 256])
def test_every_share_is_another(D):
    """No polynomials are FA3's gradients to the bit; each further share changes all three."""
    request = make_request(*qkv(130, 130, 1, D))
    do = torch.randn_like(request.q)
    exact, _ = differentiate(None, request, do)
    given = in_vectors(request), torch.zeros_like(do), torch.zeros(1, 1, 130), None, do, None
    off, on = shared_out.backward(*given), backward_hopper.backward(*given)
    assert all(torch.equal(x, y) for x, y in zip(off[1:3], on[1:3]))
    shares = [exact, *(differentiate(None, request, do, eighths=n)[0] for n in (1, 3, 8))]
    for i, found in enumerate(shares):
        for other in shares[:i]:
            assert not any(torch.equal(found[name], other[name]) for name in exact)


@pytest.mark.parametrize("eighths", [-1, 9])
def test_shares_that_are_not_possible(eighths):
    with pytest.raises(ValueError, match=f"eighths={eighths} is not possible; 0 to 8 are"):
        differentiate(None, make_request(*qkv(8, 8, 1, 64)), eighths=eighths)


@pytest.mark.parametrize("block_q", [64, 128])
@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize(("left", "right"), list(product([False, True], repeat=2)))
def test_full_blocks_of_a_consumer_are_among_those_of_its_program(left, right, edge, block_q):
    """For lengths and windows at random, the consumer past the last key included."""
    n = 20_000
    q_length, kv_length = torch.randint(1, 600, (2, n))
    if not edge:
        kv_length = -(-kv_length // 128) * 128
    window_left, window_right = torch.randint(0, 700, (2, n)) * torch.randint(0, 2, (2, n))
    tile = (torch.rand(n) * -(-kv_length // 128)).long()
    given = {"q_length": q_length, "kv_length": kv_length}
    given |= {"window_left": window_left, "window_right": window_right}
    given = {name: gluon_emulator.Tensor(x) for name, x in given.items()}
    problem = SimpleNamespace(**given, LEFT=left, RIGHT=right, EDGE=edge, BLOCK_Q=block_q)
    blocks = LOADED["fa3.hopper.backward.problem"].KeyProblem.blocks_in_window
    key = gluon_emulator.Tensor(128 * tile)
    begin, _, _, end = (gluon_emulator.tensor_of(x) for x in blocks(problem, key, 128))
    for consumer in range(2):
        found = blocks(problem, key + 64 * consumer, 64)
        _, full_begin, full_end, _ = map(gluon_emulator.tensor_of, found)
        assert (begin <= full_begin).all() and (full_begin <= full_end).all()
        assert (full_end <= end).all()


@pytest.mark.parametrize("planted", [False, True])
def test_tiles_without_queries_between_others(planted, monkeypatch):
    """The consumers give back the K of a tile that no query sees while the warpgroup of dQ, whose
    products are late, is at the tile before. If it waited for that K, it would hear of the next one
    and miss it: in a few of many orders, a dead-lock.
    """
    if planted:
        bug = Bug("accumulate", [("(kv_stage, begin < end)", "(kv_stage)")], "dead-lock")
        plant(bug, LOADED.values(), monkeypatch)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=1))
    q_lengths, k_lengths = [200, 0, 0, 200, 0, 130], [100, 128, 128, 100, 100, 90]
    bounds = [torch.tensor([0, *x]).cumsum(0).int() for x in (q_lengths, k_lengths)]
    locked = 0
    for seed in range(16):
        monkeypatch.setattr(gluon_machine, "order", ORDERS["late products"]._replace(seed=seed))
        q = torch.randn(sum(q_lengths), 2, 64, dtype=torch.bfloat16)
        k, v = torch.randn(2, sum(k_lengths), 1, 64, dtype=torch.bfloat16)
        try:
            check(USUAL, q, k, v, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1])
        except Deadlock:
            locked += 1
    assert bool(locked) == planted


@pytest.mark.parametrize("heads", [2, 5])
def test_sections_of_heads(heads, monkeypatch):
    """The heaviest tiles of several heads first; the last section has fewer."""
    monkeypatch.setattr(host, "heads_of_section", lambda request, config: 3)
    check(None, *qkv(100, 200, heads, 64, batch=2), causal=True)


def test_a_gradient_of_the_lse_and_one_number_for_all_of_o():
    q, k, v = qkv(200, 150, 2, 64)
    dlse = torch.randn(1, 2, 200)
    check(None, q, k, v, dlse=dlse)
    dlse[..., :50] = float("nan")  # of queries that see no key
    do = torch.ones(()).to(q.dtype).expand(q.shape)
    gradients = check(None, q, k, v, do=do, dlse=dlse.nan_to_num(0.0), causal=True)
    request = make_request(q, k, v, causal=True)
    poisoned, _ = differentiate(None, request, do, dlse)
    assert all(torch.equal(x, gradients[name]) for name, x in poisoned.items() if name != "dq")
    assert not poisoned["dq"].isnan().any() and not poisoned["dq"][:, :50].any()


def test_keys_past_the_end_add_nothing():
    """Where all scores are far below 0, 2^(0 - LSE) of a key that is not there overflows."""
    q, k, v = qkv(100, 70, 1, 64)
    check(None, q.abs() + 3, -k.abs() - 3, v)


def test_of_all_orders_only_dq_may_know(monkeypatch):
    """Programs add to dQ as they come by; dK and dV have the same bits."""
    q, k, v = qkv(200, 200, 4, 64, kv_heads=2)
    do, results = torch.randn_like(q), []
    for order in (*ORDERS.values(), ORDERS["any order"]._replace(seed=9)):
        monkeypatch.setattr(gluon_machine, "order", order)
        results.append(check(None, q, k, v, do=do, causal=True))
    for result in results[1:]:
        assert torch.equal(result["dk"], results[0]["dk"])
        assert torch.equal(result["dv"], results[0]["dv"])


def test_what_is_left_to_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    q, k, v = qkv(8, 8, 1, 64)
    assert backward_hopper.left_to_portable(make_request(q, k, v)) is None
    assert "dropout" in backward_hopper.left_to_portable(make_request(q, k, v, dropout_p=0.5))
    for D, D_v, left in ((256, 256, False), (192, 128, False), (256, 64, True), (64, 256, True)):
        reason = backward_hopper.left_to_portable(make_request(*qkv(8, 8, 1, D, D_v=D_v)))
        assert (reason is not None and f"head_dim {D} and {D_v}" in reason) == left
    ends = {"causal": True, "query_ends": torch.full((8,), 8, dtype=torch.int32)}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert backward_hopper.left_to_portable(make_request(q, k, v)) is None
    assert "intervals" in backward_hopper.left_to_portable(make_request(q, k, v, **ends))
    fast = make_request(q, k, v, deterministic=False, **ends)
    assert backward_hopper.left_to_portable(fast) is None


def test_a_schedule_for_another_head_dim():
    for dims in ((128, 64), (64, 128)):
        with pytest.raises(ValueError, match="held does not fit head_dim 128; use it up to 64"):
            differentiate(HELD, make_request(*qkv(8, 8, 1, dims[0], D_v=dims[1])))
    for D, block_kv in ((128, 64), (256, 128)):
        request = make_request(*qkv(8, 8, 1, D))
        with pytest.raises(ValueError, match=f"block_kv={block_kv} does not fit head_dim {D}"):
            differentiate(config.BackwardConfig(block_kv), request)
    request = make_request(*qkv(8, 8, 1, 192))
    with pytest.raises(ValueError, match="tiles of q and v are wider than the 320 of halves"):
        differentiate(config.BackwardConfig(halves=True, panels=True), request)
    request = make_request(*qkv(8, 8, 1, 256))
    with pytest.raises(ValueError, match="tiles of q and v are wider than the 384 of a pair"):
        differentiate(config.BackwardConfig(pair=True, panels=True), request)
    for D in (32, 64):
        request = make_request(*qkv(300, 8, 1, D, D_v=160))
        with pytest.raises(ValueError, match=f"halves do not fit head_dim {D} of q"):
            differentiate(config.BackwardConfig(halves=True, panels=True), request)


@pytest.mark.parametrize(("options", "said"), [({"block_q": 32}, "block_q=32"),
    ({"block_kv": 32}, "block_kv=32"), ({"halves": True, "early": True}, "halves fit"),
    ({"block_kv": 64, "panels": True}, "panels, early and held fit"),
    ({"block_kv": 64, "early": True}, "panels, early and held fit"),
    ({"block_kv": 64, "held": True}, "panels, early and held fit"),

    ({"stages": 3, "block_kv": 64}, "stages=3 does not fit block_kv=64; use 2."),
    ({"pair": True, "block_q": 128}, "pair fits"), ({"pair": True, "halves": True}, "either"),
    ({"stages": 1}, "stages=1")])  # fmt: skip
def test_schedules_that_are_not_possible(options, said):
    with pytest.raises(ValueError, match=said):
        config.BackwardConfig(**options)


def test_columns_of_dq_are_exchanged_and_put_back():
    """What a thread has of an accumulator, two of every eight columns, lies together in the sum."""
    columns = torch.arange(128.0).expand(70, 128)
    found = tiles.exchanged(gluon_emulator.Tensor(columns)).data
    narrow = tiles.exchanged(gluon_emulator.Tensor(columns[:, 64:80])).data
    for thread in range(4):
        own = [c for c in range(128) if c % 8 // 2 == thread]
        for of_32 in range(4):
            place = 32 * of_32 + 8 * thread
            assert found[0, place : place + 8].tolist() == own[8 * of_32 : 8 * of_32 + 8]
    for thread in range(4):
        own = [c for c in range(64, 80) if c % 8 // 2 == thread]
        assert narrow[0, 4 * thread : 4 * thread + 4].tolist() == own
    for D, panels in ((128, False), (80, False), (80, True), (96, True), (16, False)):
        request = make_request(*qkv(70, 10, 1, D, dtype=torch.float16), scale=0.5)
        dq_sum = found[None, :, None, : -(-D // 32) * 32].clone()  # a sum has whole 32s
        if panels and D == 80:
            dq_sum[..., 64:80] = narrow[None, :, None]
        chosen = config.BackwardConfig(panels=panels)
        rows.finish(request, dq_sum, dq := torch.empty_like(request.q), None, chosen)
        assert torch.equal(dq[0, :, 0].float(), columns[:, :D] / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrowed_and_widened(dtype):
    """PTX rounds as torch does, and what it made is the same number in fp32, bit for bit."""
    x = torch.randn(64, 64) * torch.logspace(-10, 4, 64)
    kept = tiles.narrowed(gluon_emulator.Tensor(x), gluon_emulator.Tensor(x.to(dtype)))
    assert torch.equal(kept.data, x.to(dtype))
    assert torch.equal(tiles.widened(kept).data, x.to(dtype).float())


def right(case):
    """Whether the gradients of a bug's run are."""
    run = RUNS[case]
    q, k, v = qkv(run.M, run.N, 2 * run.kv_heads, run.D, run.kv_heads, dtype=run.dtype)
    if run.low_scores:
        q, k = q.abs() + 3, -k.abs() - 3
    request = make_request(q, k, v, **run.options)
    schedule = CONFIGS[run.schedule] if run.schedule else None
    gradients, do = differentiate(schedule, request)
    return all(x.ok for x in assess_request(gradients, request, do).values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", RUNS)
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
