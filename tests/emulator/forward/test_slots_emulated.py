"""Without a GPU: fewer slots of V than of K in the kernels for Hopper, and slots that a consumer
gives back unread.
"""

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from tests.emulator.forward.test_panels_emulated import (
    CONFIG,
    FORWARD,
    LOADED,
    OPTIONS,
    OWN,
    assess,
    request_of,
    small_hopper,
)
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.kernels.budget import assert_ok
from tests.helpers.rotation import in_turn, rotated

__all__ = ["small_hopper"]  # a fixture, for all tests here
ONE_V = {"stages": 2, "v_stages": 1}
SCHEDULES = {
    "as it is": {},
    "no turns": {"ping_pong": False},
    "late wait": {"late_wait": True},
    "late wait, no turns": {"late_wait": True, "ping_pong": False},
    "in order": {"overlap": False},
    "in order, no turns": {"overlap": False, "ping_pong": False},
    "O in parts": {"q_stages": 1, "o_columns": 64},
    "three of K, two of V": {"stages": 3, "v_stages": 2},
    "three of K, one of V, three consumers": {"stages": 3, "consumers": 3, "scheduler": "dynamic"},
    "always rescale": {"threshold": 0.0, "scheduler": "grid"},
}


def has(version, switches):
    """Whether a version has all these switches."""
    return not ({*OWN.values()} - {OWN[version]}) & {*switches}


@pytest.mark.parametrize(("name", "order"), in_turn(SCHEDULES))
def test_every_schedule_in_every_order(name, order, monkeypatch):
    """Five blocks of keys for a tile, and more tiles than programs."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    switches = SCHEDULES[name]
    request = request_of((96, 96), OPTIONS["causal"])
    for version, config in CONFIG.items():
        if has(version, switches):
            schedule = config(block_kv=64, **(ONE_V | switches))
            assert_ok(assess(version, request, schedule))


@pytest.mark.parametrize(("name", "version"), rotated(OPTIONS, FORWARD))
def test_head_dim_192_with_128_keys(name, version):
    """The tiles for which one slot is left out: two slots of V do not fit beside them."""
    switches = {"q_stages": 1, "scheduler": "dynamic"}
    schedule = CONFIG[version](**ONE_V, **switches)
    assert schedule.fits(192, 192)
    assert not CONFIG[version](**switches).fits(192, 192)
    assert_ok(assess(version, request_of((192, 192), OPTIONS[name]), schedule))


@pytest.mark.parametrize("version", FORWARD)
def test_the_same_bits_as_with_as_many_slots(version):
    """Another order of loads and waits is no other order of sums."""
    for switches in ({}, {"late_wait": True}):
        for name in ("causal", "intervals"):
            request = in_vectors(request_of((64, 64), OPTIONS[name]))
            one, two = (
                FORWARD[version].forward(request, CONFIG[version](block_kv=64, **slots, **switches))
                for slots in (ONE_V, {})
            )
            assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("version", FORWARD)
@pytest.mark.parametrize("v_stages", [0, 3])
def test_a_number_of_slots_that_is_not_possible_is_refused(version, v_stages):
    with pytest.raises(ValueError, match=f"v_stages={v_stages} .* use v_stages from 1 to 2"):
        CONFIG[version](v_stages=v_stages)


USUAL, LATE = {}, {"late_wait": True, "ping_pong": False}
PRODUCER = {"fa3": "produce", "fa4": "load"}
DONE = "acc = wait_pv(buffers, acc, acc_token)\n            buffers.v.release(before.v)"
BEFORE, THIS = (f"kv_head, {key})\n                    values" for key in ("key_before", "key"))
LAST, NONE = (f"        if {x}:\n            fill_values(" for x in ("schedule.V_BEHIND", "False"))
BUGS = {
    "V is given back while it is read": Bug(
        "attend",
        [(DONE, "buffers.v.release(before.v)\n            acc = wait_pv(buffers, acc, acc_token)")],
        WRONG,
    ),
    "V is not given back": Bug(
        "attend", [(DONE, "acc = wait_pv(buffers, acc, acc_token)")], "{} 2 in .*fill"
    ),
    "V has the phase of K": Bug(
        "Stages.next",
        [("only_slot(self.v.next())", "Stage(self.v.slot, k.phase, self.v.STAGES)")],
        "dead-lock|more arrivals",
    ),
    "V has the slot of K": Bug(
        "only_slot", [("Stage(phase >> 1,", "Stage(phase,")], "slot .* of 1"
    ),
    "V stays in its first phase": Bug(
        "Stages.next", [("only_slot(self.v.next())", "self.v")], "dead-lock|more arrivals"
    ),
    "V is filled before K of the next block": Bug(
        "producer",
        [("if place < end - 1:", "if True:"), (BEFORE, THIS), (LAST, NONE)],
        "{} 2 in .*fill",
        LATE,
    ),
    "the last V of a tile is left out": Bug(
        "producer",
        [(LAST, NONE)],
        "dead-lock",
    ),
    "V comes from the next block": Bug(
        "producer",
        [(BEFORE, THIS)],
        WRONG,
    ),
    "the turn is passed on twice": Bug(
        "attend", [("PING_PONG and not schedule.V_BEHIND", "PING_PONG")], "named_barrier|arriv"
    ),
    "the turn is not passed on": Bug(
        "attend", [("PING_PONG and schedule.V_BEHIND", "PING_PONG and False")],
        "consume 1 in .*named_barrier_sync",
    ),
}  # fmt: skip


def is_right(version, switches):
    """Whether the result of a bug's case is within the budget."""
    schedule = CONFIG[version](block_kv=64, **ONE_V, **(switches or USUAL))
    request = request_of((64, 64), OPTIONS["full"])
    return all(x.ok for x in assess(version, request, schedule).values())


@pytest.mark.parametrize("version", FORWARD)
@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, version, monkeypatch):
    producer = PRODUCER[version]
    function = producer if bug.function == "producer" else bug.function
    bug = bug._replace(function=function, found=bug.found.replace("{}", producer))
    loaded = {x: y for x, y in LOADED.items() if version == "fa4" or x != "fa4.hopper.forward"}
    plant(bug, loaded.values(), monkeypatch)
    assert_found(bug, lambda: is_right(version, bug.case), monkeypatch)


@pytest.mark.parametrize("switches", [USUAL, LATE], ids=["as it is", "late wait"])
@pytest.mark.parametrize("version", FORWARD)
def test_nothing_is_found_where_no_bug_is(version, switches, monkeypatch):
    assert list(outcomes(lambda: is_right(version, switches), monkeypatch)) == ["", "", ""]


# ------------------------------------------------------------------------------- blocks passed over
MASKS = {
    "causal": {"causal": True}, "window": {"window": (70, 0)}, "both bounds": {"window": (70, 30)},
    "packed": {"causal": True, "cu_seqlens_q": torch.tensor([0, 5, 64, 200, 201, 330]).int()},
}  # fmt: skip
PASSING = {
    "two consumers": {},
    "three consumers": {"consumers": 3, "stages": 3},
    "late wait": {"late_wait": True},
    "in order": {"overlap": False},
    "no turns": {"ping_pong": False},
    "one of V": {"v_stages": 1},
}
ONE_SLOT = {"stages": 1, "ping_pong": False}
EARLY = f"more arrivals|dead-lock|{WRONG}"  # a slot is filled while another consumer reads it
HOLES = {
    "K is not waited for": Bug(
        "pass_over", [("buffers.k.wait(stage.k)", "pass")], EARLY, ONE_SLOT
    ),
    "V is not waited for": Bug(
        "pass_over", [("buffers.v.wait(stage.v)", "pass")], EARLY, ONE_SLOT
    ),
    "K is not given back": Bug(
        "pass_over", [("buffers.k.release(stage.k)", "pass")], "fill|dead-lock"
    ),
    "V is not given back": Bug(
        "pass_over", [("buffers.v.release(stage.v)", "pass")], "fill|dead-lock"
    ),
    "its turn is not passed on": Bug(
        "pass_over", [("named_barrier_arrive(CONSUMER, schedule.CONSUMERS)", "pass")],
        "named_barrier_sync",
    ),
    "a turn is passed on that another one has": Bug(
        "pass_over", [("named_barrier_sync(CONSUMER)", "pass")], "arriv|named_barrier"
    ),
    "the last block that is seen is passed over": Bug(
        "QueryProblem.seen", [("gl.minimum(end, own_end)", "gl.minimum(end, own_end - 1)")], WRONG
    ),
    "the first block that is seen is passed over": Bug(
        "QueryProblem.seen",
        [("gl.maximum(begin, own_begin)", "gl.maximum(begin, own_begin + 1)")], WRONG
    ),
}  # fmt: skip


def passes_right(version, mask, switches):
    """Whether a call whose consumers see unlike parts of a tile's blocks is within the budget."""
    q, k, v = torch.randn(3, 1, 330, 2, 64, dtype=torch.bfloat16)
    if "cu_seqlens_q" in MASKS[mask]:
        q, k, v = q[0], k[0], v[0]
    request = make_request(q, k, v, **MASKS[mask])
    schedule = CONFIG[version](block_kv=64, **switches)
    return all(x.ok for x in assess(version, request, schedule).values())


@pytest.mark.parametrize(("mask", "name"), rotated(MASKS, PASSING))
def test_blocks_that_a_consumer_does_not_see(mask, name, monkeypatch):
    for version in FORWARD:
        if has(version, PASSING[name]):
            found = outcomes(lambda v=version: passes_right(v, mask, PASSING[name]), monkeypatch)
            assert list(found) == ["", "", ""]


@pytest.mark.parametrize("bug", HOLES.values(), ids=HOLES)
def test_bugs_in_passing_over_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: passes_right("fa3", "window", bug.case or {}), monkeypatch)
