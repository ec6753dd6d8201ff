"""Interval masks in the kernels for Hopper, without a GPU."""

import pytest
import torch

from flash_versions import masks
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.forward_and_backward.test_ragged_emulated import poisoned_memory
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.rotation import in_turn

FA3 = gluon_emulator.load("flash_versions.versions.fa4.hopper.backward")
FA4 = gluon_emulator.load("flash_versions.versions.fa4.hopper.host")
FORWARD = {"fa3": FA3["fa3.hopper.host"], "fa4": FA4["fa4.hopper.host"]}
BACKWARD = FA3["fa3.hopper.backward.kernel"]
by_version = pytest.mark.parametrize("version", FORWARD)
LENGTHS = [70, 1, 0, 150, 64, 15]
MASKS = {
    "documents": masks.documents(LENGTHS),
    "documents, full": masks.documents(LENGTHS, causal=False),
    "a shared prompt": masks.shared_prompt(150, [70, 30, 50]),
    "a prefix": masks.prefix(130, 300),
    "chunks in a window": {**masks.documents([200, 100]), "window": (60, 0)},
    "no key is seen": {"query_ends": torch.zeros(300, dtype=torch.int32)},
    "every key is seen": {"query_ends": torch.full((300,), 300)},
    "rows and heads of their own": {
        "causal": True,
        "query_starts": torch.randint(150, (2, 300)),
        "query_ends": torch.randint(301, (2, 2, 300)),
    },
}


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, and memory that holds NaN until it is written."""
    monkeypatch.setattr(torch, "empty", poisoned_memory)
    for loaded in (FA3, FA4):
        monkeypatch.setattr(loaded["tiles.wgmma"], "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


def inputs(options, queries=300, keys=300, head_dim=64, heads=(4, 2), dtype=torch.bfloat16):
    """A request, and what o's gradient is."""
    by_row = any(isinstance(x, torch.Tensor) and x.dim() > 1 for x in options.values())
    batch = 2 if by_row else 1
    q, do = torch.randn(2, batch, queries, heads[0], head_dim, dtype=dtype)
    k, v = torch.randn(2, batch, keys, heads[1], head_dim, dtype=dtype)
    request = make_request(q, k, v, num_splits=1, **options)
    assert FORWARD["fa3"].left_to_portable(request) is None
    assert BACKWARD.left_to_portable(request) is None
    return request, do


def shares(request, do, version="fa3"):
    """What the errors of the emulated kernels take of their budgets, by result; FA4's backward is
    FA3's kernel, so its gradients are not computed again.
    """
    o, lse, _ = FORWARD[version].forward(request)
    if version == "fa4":
        return assess_request({"o": o, "lse": lse}, request)
    dlse = torch.randn_like(lse)
    dq, dk, dv, dsink = BACKWARD.backward(request, o, lse, None, do, dlse)
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if request.sink is not None:
        results["dsink"] = dsink
    return assess_request(results, request, do, dlse)


def is_right(request, do, version="fa3"):
    """Whether all of it is within the budget."""
    return all(x.ok for x in shares(request, do, version).values())


@pytest.mark.parametrize(("mask", "version", "order"), in_turn(MASKS, FORWARD))
def test_every_mask(mask, version, order, monkeypatch):
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    request, do = inputs(MASKS[mask])
    found = shares(request, do, version)
    assert all(x.ok for x in found.values()), found


@by_version
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_head_dims(head_dim, version):
    """128 keys in a block or 64, two consumers or three, and the wider kernel of the backward."""
    request, do = inputs(masks.documents(LENGTHS), head_dim=head_dim)
    assert is_right(request, do, version)


@by_version
@pytest.mark.parametrize("lengths", [(100, 300), (300, 70), (1, 200)])
def test_other_lengths(lengths, version):
    """More keys than queries and fewer: causal and windows count from the last ones."""
    queries, keys = lengths
    options = {
        "query_starts": torch.randint(queries, (keys,)),
        "query_ends": torch.randint(queries + 1, (keys,)),
        "window": (90, 10),
    }
    request, do = inputs(options, queries, keys)
    assert is_right(request, do, version)


@by_version
def test_with_all_that_scores_may_have(version):
    options = {
        **masks.documents(LENGTHS),
        "softcap": 5.0,
        "sink": torch.randn(4),
        "alibi_slopes": torch.rand(4),
    }
    request, do = inputs(options, dtype=torch.float16)
    assert is_right(request, do, version)


BUGS = {
    "ends are masked where starts are to be": Bug(
        "mask_listed", [("2 * CONSUMER + 1) & 1", "2 * CONSUMER) & 1")], WRONG
    ),
    "intervals of another block": Bug("fill_keys", [("0, block, 0", "0, block * 0, 0")], WRONG),
    "intervals of another head": Bug(
        "BlockLists.of_tile", [("kv_head * self.head_lines", "kv_head * 0")], WRONG
    ),
    "the last block of a list is skipped": Bug(
        "BlockLists.of_tile", [("gl.load(own)", "gl.maximum(gl.load(own) - 1, 1)")], WRONG
    ),
    "intervals are given back before they are read": Bug(
        "mask_listed",
        [
            ("    bounds.release_loaded(stage)\n", ""),
            ("    KEYS: gl.constexpr", "    bounds.release_loaded(stage)\n    KEYS: gl.constexpr"),
        ],
        f"{WRONG}|without a fence",
    ),
    "intervals are given back while they are on their way": Bug(
        "mask_listed",
        [("bounds.release_loaded(stage)", "bounds.release(stage)")],
        "TMA fills what was read without a fence",
    ),
    "intervals are overwritten while they are read": Bug(
        "fill_keys", [("buffers.bounds.wait_empty(stage)", "pass")], WRONG
    ),
    "intervals are never given back": Bug(
        "mask_listed", [("bounds.release_loaded(stage)", "pass")], "deadlock|dead-lock|waits"
    ),
    "the last queries that see a tile of keys are skipped": Bug(
        "KeySpans.query_blocks", [("last_end = gl.maximum(", "last_end = gl.minimum(")], WRONG
    ),
    "gradients by the intervals of another head": Bug(
        "KeySpans.of_head", [("kv_head * self.head_lines", "kv_head * 0")], WRONG
    ),
    "a half of the keys whose queries are those of the tile": Bug(
        "KeyProblem.masked", [("eight <= (last", "eight < (last")], WRONG
    ),
}


def right():
    """Whether a mask with intervals of each head's own is computed rightly."""
    torch.manual_seed(0)
    ends = torch.stack((masks.documents(LENGTHS)["query_ends"], torch.full((300,), 250)))
    request, do = inputs({"causal": True, "query_ends": ends.expand(2, 2, 300)})
    return is_right(request, do)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, FA3.values(), monkeypatch)
    assert_found(bug, right, monkeypatch)


def test_nothing_is_found_where_no_bug_is(monkeypatch):
    assert list(outcomes(right, monkeypatch)) == ["", "", ""]
