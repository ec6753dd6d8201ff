"""Tiles in which query heads of a group lie one behind the other, without a GPU."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, plant
from tests.helpers.rotation import in_turn

FA3 = gluon_emulator.load("flash_versions.versions.fa3.hopper.host")
FA4 = gluon_emulator.load("flash_versions.versions.fa4.hopper.host")
MODULES = {"fa3": FA3["fa3.hopper.host"], "fa4": FA4["fa4.hopper.host"]}
CONFIGS = {"fa3": FA3["fa3.hopper.config"], "fa4": FA4["fa4.hopper.config"]}
SEEN_BY_ALL = 2**20
OPTIONS = {
    "causal": {"causal": True},
    "window and sink": {"window": (70, 20), "sink": True},
    "softcap": {"softcap": 3.0},
    "packed": {"causal": True, "cu_seqlens_q": [1, 71, 71, 74, 189], "sink": True},
    "padded": {"causal": True, "kv_lengths": [190, 3]},
    "intervals": {"causal": True, "query_ends": [60] * 60 + [150] * 90 + [SEEN_BY_ALL] * 40},
}


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles."""
    for loaded in (FA3, FA4):
        monkeypatch.setattr(loaded["tiles.wgmma"], "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


def request_of(heads, kv_heads, options, head_dim=64):
    """190 queries and keys, in two rows or packed."""
    generator = torch.Generator().manual_seed(heads)
    batch = 1 if "cu_seqlens_q" in options or "query_ends" in options else 2
    q, k, v = (
        torch.randn(batch, 190, n, head_dim, generator=generator).bfloat16()
        for n in (heads, kv_heads, kv_heads)
    )
    if "cu_seqlens_q" in options:
        q, k, v = q[0], k[0], v[0]
    options = {
        name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x
        for name, x in options.items()
    }
    if "sink" in options:
        options["sink"] = torch.randn(heads, generator=generator)
    return in_vectors(make_request(q, k, v, **options))


def right(request, heads, version="fa3", **switches):
    """Whether o and the LSE are within the error budget with so many heads of a tile."""
    base = CONFIGS[version].default_config(request)
    config = replace(base, heads=heads, block_kv=64, scheduler="dynamic", **switches)
    o, lse, _ = MODULES[version].forward(request, config)
    found = assess_request({"o": narrowed(o, request.v), "lse": lse}, request)
    return all(accuracy.ok for accuracy in found.values())


@pytest.mark.parametrize(("name", "order"), in_turn(OPTIONS))
def test_all_heads_of_a_group(name, order, monkeypatch):
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    assert right(request_of(4, 1, OPTIONS[name]), 4)
    assert right(request_of(8, 2, OPTIONS[name]), 4, consumers=3, stages=3)


@pytest.mark.parametrize("version", MODULES)
@pytest.mark.parametrize("heads, kv_heads, of_tile", [(16, 1, 16), (6, 1, 2), (4, 2, 2)])
def test_groups_of_any_size(heads, kv_heads, of_tile, version):
    assert right(request_of(heads, kv_heads, OPTIONS["causal"]), of_tile, version)


@pytest.mark.parametrize("version", MODULES)
def test_two_panels(version):
    assert right(request_of(4, 1, OPTIONS["packed"], head_dim=96), 4, version)


@pytest.mark.parametrize("options, of_tile", [
    ({"causal": True}, 4), ({}, 4), ({"kv_lengths": [8192]}, 4), ({"window": (100, 0)}, 4),
    ({"causal": True, "alibi_slopes": [0.5] * 12}, 1),
], ids=str)  # fmt: skip
def test_which_share_a_tile_by_default(options, of_tile):
    q, k = torch.empty(1, 8192, 12, 64), torch.empty(1, 8192, 1, 64)
    options = {x: torch.tensor(y) if isinstance(y, list) else y for x, y in options.items()}
    request = make_request(q, k, k, **options)
    assert CONFIGS["fa3"].default_config(request).heads == of_tile
    few = make_request(q[:, :16], k, k, num_splits=1)
    assert CONFIGS["fa3"].default_config(few).heads == 4


def test_what_cannot_share_a_tile():
    request = request_of(6, 1, {})
    with pytest.raises(ValueError, match="heads=4 .* 6 query heads to a key head"):
        right(request, 4)
    with pytest.raises(ValueError, match="no slope"):
        right(request._replace(alibi_slopes=torch.ones(2, 6)), 2)
    with pytest.raises(ValueError, match="powers of two"):
        right(request, 3)


BUGS = {
    "rows of all heads are taken for queries": Bug(
        "QueryProblem.positions", [("rows % self.queries(ROWS)", "rows")], WRONG
    ),
    "the LSE of one head": Bug(
        "QueryProblem.store_lse",
        [("self.heads_of_rows(lse.shape[0], layout).to", "(0 * at).to")],
        WRONG,
    ),
    "the first head's sink": Bug(
        "QueryProblem.sinks",
        [("+ self.heads_of_rows(ROWS, layout)", "+ 0 * self.heads_of_rows(ROWS, layout)")],
        WRONG,
    ),
    "a consumer begins as if it had one head": Bug(
        "consume",
        [("CONSUMER * problem.queries(WARPGROUP_ROWS)", "CONSUMER * WARPGROUP_ROWS")],
        WRONG,
    ),
    "the next tile begins as if this had one head": Bug(
        "QueryProblem.locate",
        [("tile * queries, head, sequence * 0", "tile * self.BLOCK_Q, head, sequence * 0")],
        WRONG,
    ),
    "the second group's tiles are the first one's": Bug(
        "QueryProblem.locate", [("head = row * self.HEADS", "head = row * 0")], WRONG
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, FA3.values(), monkeypatch)
    assert_found(bug, lambda: right(request_of(8, 2, OPTIONS["packed"]), 4), monkeypatch)
