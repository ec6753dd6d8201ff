"""FA3's kernel for Hopper without a GPU, in an emulator that is as late as the rules allow."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.ablation import SWITCHES
from flash_versions.versions.oracle.budget import assess
from flash_versions.versions.tiles import varlen_scheduler
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.flash_versions.versions.test_attention import CASES, assert_within_budget
from tests.helpers.rotation import pairwise, rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa3.hopper.host")
config, host = LOADED["fa3.hopper.config"], LOADED["fa3.hopper.host"]
DTYPES = [torch.float16, torch.bfloat16]
SMALL = config.HopperConfig(block_kv=64)
CONFIGS = {
    "as it is": SMALL,
    "in order": replace(SMALL, overlap=False),
    "in order, no turns": replace(SMALL, overlap=False, ping_pong=False),
    "no turns": replace(SMALL, ping_pong=False),
    "late wait": replace(SMALL, late_wait=True),
    "late wait, no turns": replace(SMALL, late_wait=True, ping_pong=False, stages=3),
    "one Q buffer": replace(SMALL, q_stages=1),
    "three consumers": replace(SMALL, consumers=3, stages=3),
    "three consumers in order": replace(SMALL, consumers=3, overlap=False),
    "aligned tiles": replace(SMALL, block_kv=128),
    "four stages": replace(SMALL, stages=4),
    "one stage, in order": replace(SMALL, stages=1, overlap=False),
    "in order, heads in pairs": replace(SMALL, overlap=False, section=2),
    "grid": replace(SMALL, scheduler="grid"),
    "dynamic": replace(SMALL, scheduler="dynamic"),
    "dynamic, three consumers": replace(SMALL, consumers=3, stages=3, scheduler="dynamic"),
}
by_order = pytest.mark.parametrize("order", ORDERS, indirect=True)


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles."""
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
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


def attend(schedule, q, k, v, **options):
    """(o, lse) of the emulated kernel, called as by `attention`."""
    request = in_vectors(make_request(q, k, v, **options))
    o, lse, _ = host.forward(request, schedule)
    return narrowed(o, v), lse


def check(schedule, q, k, v, **options):
    assert_within_budget(*attend(schedule, q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize(("case", "dtype"), rotated(CASES, DTYPES))
def test_every_case_that_it_takes(case, dtype):
    inputs, options = case.inputs(dtype, "cpu"), case.all_options("cpu")
    if not all(x.numel() for x in inputs):
        pytest.skip("what no descriptor can address does not come to this kernel")
    if reason := host.left_to_portable(in_vectors(make_request(*inputs, **options))):
        pytest.skip(reason)
    check(None, *inputs, **options)


HEAD_DIMS = [
    (64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 128), (64, 256), (256, 64),
    (32, 32), (16, 64), (64, 24),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "dtype"), rotated(HEAD_DIMS, DTYPES))
def test_head_dims(dims, dtype):
    D, D_v = dims
    inputs = qkv(170, 300, 4, D, kv_heads=2, dtype=dtype, D_v=D_v)
    check(None, *inputs)
    check(None, *inputs, causal=True)


@pytest.mark.parametrize(("name", "order"), rotated(CONFIGS, ORDERS), indirect=["order"])
def test_every_switch(name, order):
    """More tiles than programs, ragged at both ends; rows without keys, a window."""
    schedule = CONFIGS[name]
    check(schedule, *qkv(200, 330, 3, 64, kv_heads=1))
    check(schedule, *qkv(300, 200, 1, 64, batch=2), causal=True, window=(100, None))


@pytest.mark.parametrize("packed", [False, True])
def test_no_lse_at_the_address_0(packed, monkeypatch):
    """As a replayed call has it whose caller does not get the LSE."""
    q, k, v = qkv(200, 200, 2, 64)
    options = {"causal": True}
    if packed:
        q, k, v = q[0], k[0], v[0]
        options["cu_seqlens_q"] = torch.tensor([3, 90, 180], dtype=torch.int32)
    request = make_request(q, k, v, **options)
    expected, lse, _ = host.forward(request)
    nothing = lse.new_empty(0)
    assert lse.data_ptr() and not nothing.data_ptr()
    again = torch.empty_like(expected), nothing
    monkeypatch.setattr(host, "new_outputs", lambda *given: again)
    form = varlen_scheduler.form_of
    monkeypatch.setattr(varlen_scheduler, "form_of", lambda x: form(x if x.numel() else lse))
    o, _, _ = host.forward(request)
    assert torch.equal(o, expected)


@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize("M, N", [(256, 384), (256, 256), (384, 256), (250, 250), (250, 314)])
def test_causal_tiles_that_end_with_a_block(M, N, block_kv):
    """Where only a tile's first block is cut by the mask, the others are not masked."""
    check(replace(SMALL, block_kv=block_kv), *qkv(M, N, 2, 64), causal=True)
    check(replace(SMALL, block_kv=block_kv), *qkv(M, N, 1, 64), window=(None, 128))


@pytest.mark.parametrize(
    ("M", "N", "heads", "cut"),
    [(400, 400, 1, False), (250, 314, 1, False), (320, 192, 1, False), (250, 300, 1, True),
     (250, 282, 1, True), (250, 282, 2, False)],
)  # fmt: skip
def test_consumers_that_end_with_a_block(M, N, heads, cut):
    """Tiles of three consumers do not divide a block, so consumers end in different ones; but only
    the first block of each is cut, if its queries end with it.
    """
    schedule = replace(SMALL, consumers=3, block_kv=128, heads=heads)
    for options in ({"causal": True}, {"window": (None, 64)}):
        inputs = qkv(M, N, 2, 64, kv_heads=1)
        constants = host.constants(make_request(*inputs, **options), schedule)
        assert (constants["CUT"], constants["UNEVEN"]) == (cut, True)
        check(schedule, *inputs, **options)


@pytest.mark.parametrize("variant", SWITCHES)
def test_every_variant_of_the_ablation(variant):
    q, k, v = qkv(200, 330, 2, 128, batch=2)
    request = make_request(q, k, v, causal=True)
    schedule = replace(config.overlapping_config(request), **SWITCHES[variant])
    o, lse, _ = host.forward(request, schedule)
    assert_within_budget(o, lse, q, k, v, causal=True)


OPTIONS = [
    {"window": (100, None), "causal": True}, {"window": (64, 10)}, {"window": (None, 70)},
    {"softcap": 2.0, "causal": True}, {"softcap": 30.0, "window": (100, 50)},
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "lengths", "D"), pairwise(OPTIONS, [(200, 300), (300, 200)], [64, 128])
)
def test_windows_and_softcap(options, lengths, D):
    check(None, *qkv(*lengths, 2, D, kv_heads=1), **options)
    check(replace(SMALL, overlap=False), *qkv(*lengths, 2, D, kv_heads=1), **options)


@pytest.mark.parametrize("programs", [1, 2, 3])
@by_order
def test_dynamic_tiles_are_shared_out_and_the_counters_left_at_zero(programs, order, monkeypatch):
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=programs))
    counters = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(host.counters, "take", lambda device: counters)
    for _ in range(2):
        check(replace(SMALL, scheduler="dynamic", stages=4), *qkv(300, 100, 3, 64), causal=True)
        assert counters.tolist() == [0, 0]


def test_the_same_bits_in_every_order(monkeypatch):
    inputs = qkv(200, 330, 2, 64, kv_heads=1)
    schedules = [SMALL, replace(SMALL, scheduler="dynamic", stages=4, late_wait=True)]
    results = []
    for order in (*ORDERS.values(), ORDERS["any order"]._replace(seed=9)):
        monkeypatch.setattr(gluon_machine, "order", order)
        results += [attend(schedule, *inputs, causal=True) for schedule in schedules]
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(lse, results[0][1])


USUAL = (SMALL, 330)  # schedule and number of keys
V_WAITED = "acc = acc.wait(acc_token)"
BUGS = {
    "K is not released": Bug(
        "attend", [("        buffers.k.release(stage)", "        pass")], "produce 2 in .*fill"
    ),
    "V is not released": Bug(
        "attend",
        [("buffers.v.release(before)", "pass")],
        "produce 2 in .*fill",
    ),
    "Q is not released": Bug(
        "attend", [("buffers.q.release(q_stage)", "pass")], "produce 2 in .*fill",
    ),
    "Q is not released in order": Bug(
        "attend_in_order", [("buffers.q.release(q_stage)", "pass")],
        "produce 2 in .*fill", (replace(SMALL, overlap=False), 330),
    ),
    "K is released while it is read": Bug(
        # Of a tile's first block: later ones are safe behind the V that is filled before.
        "attend",
        [("s = warpgroup_mma_wait(0, deps=[multiply_qk(q, buffers.k.tile(stage), scales.SCORES)])",
          "s_token = multiply_qk(q, buffers.k.tile(stage), scales.SCORES)"),
         ("    buffers.k.release(stage)\n    s = problem",
          "    buffers.k.release(stage)\n    s = warpgroup_mma_wait(0, deps=[s_token])\n"
          "    s = problem")],
        WRONG,
    ),
    "V is released while it is read": Bug(
        "attend",
        [(f"{V_WAITED}\n        buffers.v.release(before)",
          f"buffers.v.release(before)\n        {V_WAITED}")],
        WRONG,
    ),
    "Q is released while it is read": Bug(
        "attend",
        [("    buffers.q.release(q_stage)", "    pass"),
         ("= first_state(problem, buffers)",
          "= first_state(problem, buffers); buffers.q.release(q_stage)")],
        WRONG,
        (replace(SMALL, q_stages=1), 330),
    ),
    "K is read before it is there": Bug(
        "attend", [("        if not schedule.LATE_WAIT:\n            buffers.k.wait(stage)", "")],
        "more arrivals",
    ),
    "V is read before it is there": Bug(
        "attend", [("buffers.v.wait(before)", "pass")], "more arrivals"
    ),
    "Q is read before it is there": Bug("consume", [("buffers.q.wait(q_stage)", "pass")], WRONG),
    "S is read while it is in flight": Bug(
        "attend", [("_wait(acc.PANELS,", "_wait(acc.PANELS + 1,")], "in flight"
    ),
    "the rest of P V is not waited for": Bug(
        "Output.wait",
        [("_wait(IN_FLIGHT, deps=[tokens[0]])", "_wait(1, deps=[tokens[0]])")],
        "in flight",
    ),
    "a slot is filled before it is empty": Bug(
        "Pipeline.fill", [("mbarrier.wait(self.empty.index(stage.slot), stage.phase ^ 1)", "pass")],
        "more arrivals",
    ),
    "more bytes are expected than are loaded": Bug(
        "Pipeline.fill",
        [("desc.block_type.nbytes", "desc.block_type.nbytes + 16")],
        "consume 0 in .* wait",
    ),
    "the phase is not toggled": Bug(
        "Stage.next", [("self.phase ^ 1, self.phase", "self.phase, self.phase")], "dead-lock"
    ),
    "the producer begins with the phase of a consumer": Bug(
        "Pipeline.fill", [("stage.phase ^ 1", "stage.phase")], "produce 2 in .*fill"
    ),
    "a barrier counts one consumer": Bug(
        "make_pipeline", [("(STAGES, CONSUMERS)", "(STAGES, 1)")], "more arrivals"
    ),
    "the turn is not passed on": Bug(
        "attend", [("named_barrier_arrive(CONSUMER, schedule.CONSUMERS)", "pass")],
        "consume 1 in .*named_barrier_sync"
    ),
    "a turn is waited for at a barrier that the hardware lacks": Bug(
        "named_barrier_sync", [("TURNS + CONSUMER", "TURNS + 8 + CONSUMER")], "there are 16"
    ),
    "nobody begins": Bug(
        "consume", [("named_barrier_arrive(CONSUMER, schedule.CONSUMERS)", "pass")],
        "consume 0 in .*named_barrier_sync"
    ),
    "the accumulator is not rescaled": Bug(
        "attend", [("acc = acc.rescaled(alpha)", "pass")], WRONG
    ),
    "O is overwritten while it is stored": Bug(
        "consume", [("tma.store_wait(0)  # of the part before", "pass")], WRONG
    ),
    "the last O is not waited for": Bug(
        "consume", [("\n    tma.store_wait(0)\n", "\n")], "stores in flight"
    ),
    "O is stored without a fence": Bug(
        "consume", [("fence_async_shared()", "pass")], "without fence_async_shared"
    ),
    "a claim overwrites one that was not received": Bug(
        "Scheduler.claim",
        [("mbarrier.wait(self.empty.index(slot), ((round >> 1) & 1) ^ 1)", "pass")],
        "consume 0 in .*receive",
        (replace(SMALL, scheduler="dynamic", stages=4), 60),
    ),
    "a claim is not taken": Bug(
        "Scheduler.receive",
        [("mbarrier.arrive(self.empty.index(slot), count=1)", "pass")],
        "produce 2 in .*claim",
        (replace(SMALL, scheduler="dynamic"), 330),
    ),
    "two programs take the same tiles, others none": Bug(
        "Scheduler.following", [("programs - 1 - program, program", "program, program * 0")], WRONG
    ),
}  # fmt: skip


def right(case):
    """Whether the result of a bug's case is."""
    schedule, keys = case or USUAL
    inputs = qkv(150, keys, 4, 64)
    return all(x.ok for x in assess(*attend(schedule, *inputs), *inputs).values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", dict.fromkeys(x.case for x in BUGS.values()))
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
