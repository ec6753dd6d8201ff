"""Without a GPU: slots of K and V in the kernels for Hopper that a consumer gives back unread."""

import pytest
import torch

from flash_versions.dispatch.request import make_request
from tests.emulator.forward.test_panels_emulated import (
    CONFIG,
    FORWARD,
    LOADED,
    assess,
    has,
    small_hopper,
)
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.rotation import rotated

__all__ = ["small_hopper"]  # a fixture, for all tests here
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
    "one slot": {"stages": 1},
    "one Q, dynamic": {"q_stages": 1, "scheduler": "dynamic"},
}
ONE_SLOT = {"stages": 1, "ping_pong": False}
EARLY = f"more arrivals|dead-lock|{WRONG}"  # a slot is filled while another consumer reads it
HOLES = {
    "K is not waited for": Bug(
        "pass_over", [("buffers.k.wait(stage)", "pass")], EARLY, ONE_SLOT
    ),
    "V is not waited for": Bug(
        "pass_over", [("buffers.v.wait(stage)", "pass")], EARLY, ONE_SLOT
    ),
    "K is not given back": Bug(
        "pass_over", [("buffers.k.release(stage)", "pass")], "fill|dead-lock"
    ),
    "V is not given back": Bug(
        "pass_over", [("buffers.v.release(stage)", "pass")], "fill|dead-lock"
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
    return all_right(version, request, CONFIG[version](block_kv=64, **switches))


def all_right(version, request, schedule):
    """Whether o and lse are within the budget."""
    return all(x.ok for x in assess(version, request, schedule).values())


@pytest.mark.parametrize(("name", "mask"), rotated(PASSING, MASKS))
def test_blocks_that_a_consumer_does_not_see(name, mask, monkeypatch):
    for version in FORWARD:
        if has(version, PASSING[name]):
            found = outcomes(lambda v=version: passes_right(v, mask, PASSING[name]), monkeypatch)
            assert list(found) == ["", "", ""]


@pytest.mark.parametrize("version", FORWARD)
def test_a_consumer_without_rows_waits_for_a_turn(version, monkeypatch):
    """With one slot of K, for which the consumer that has the turn waits."""
    q = torch.randn(40, 2, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 380, 2, 64, dtype=torch.bfloat16)
    ends = {"cu_seqlens_q": torch.tensor([0, 20, 40]), "cu_seqlens_k": torch.tensor([0, 190, 380])}
    request = make_request(q, k, v, **{name: x.int() for name, x in ends.items()})
    schedule = CONFIG[version](block_kv=64, stages=1)
    assert list(outcomes(lambda: all_right(version, request, schedule), monkeypatch)) == [""] * 3


@pytest.mark.parametrize("switches", [{}, ONE_SLOT], ids=["as it is", "one slot, no turns"])
def test_nothing_is_found_where_no_bug_is(switches, monkeypatch):
    found = outcomes(lambda: passes_right("fa3", "window", switches), monkeypatch)
    assert list(found) == ["", "", ""]


@pytest.mark.parametrize("bug", HOLES.values(), ids=HOLES)
def test_bugs_in_passing_over_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: passes_right("fa3", "window", bug.case or {}), monkeypatch)
