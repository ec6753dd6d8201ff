"""Head dims in two panels in FA3's backward for Hopper, without a GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from flash_versions import masks
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.backward.test_hopper_backward_emulated import LOADED, config, differentiate
from tests.emulator.forward_and_backward.test_ragged_emulated import poisoned_memory
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.kernels.budget import assert_ok
from tests.helpers.rotation import in_turn, rotated

# Of q and k, and of v; with one panel on either side, too.
HEAD_DIMS = [
    (96, 96), (192, 192), (192, 128), (80, 80), (160, 160), (96, 64), (128, 192), (72, 72),
    (64, 96), (192, 96), (144, 256), (112, 112), (224, 224),
]  # fmt: skip
M, N, HEADS, KV_HEADS = 100, 150, 2, 1
LENGTHS = [70, 0, 1, 79]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window and softcap": {"window": (50, 20), "softcap": 5.0},
    "slopes and sink": {
        "causal": True,
        "alibi_slopes": torch.rand(HEADS) / 16,
        "sink": torch.randn(HEADS),
    },
    "rows of other lengths": {"causal": True, "kv_lengths": torch.tensor([37, 150]).int()},
    "packed": {"causal": True, "cu_seqlens_q": CU_SEQLENS},
    "intervals": masks.shared_prompt(50, [50, 20, 30]),
    "in turns": {"deterministic": True},
    "causal, in turns": {"causal": True, "deterministic": True},
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory holds NaN until it is written, and TMA is early. Programs walk from tile to tile."""
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))
    monkeypatch.setattr(torch, "empty", poisoned_memory)


def request_of(dims, options, dtype=torch.bfloat16):
    """A call with as many rows as its options are about."""
    batch = 2 if "kv_lengths" in options else 1
    queries, keys = (N, N) if "query_ends" in options else (M, N)
    shapes = [(batch, queries, HEADS), (batch, keys, KV_HEADS)]
    if "cu_seqlens_q" in options:
        shapes = [(sum(LENGTHS), HEADS), (sum(LENGTHS), KV_HEADS)]
    q = torch.randn(*shapes[0], dims[0], dtype=dtype)
    k = torch.randn(*shapes[1], dims[0], dtype=dtype)
    v = torch.randn(*shapes[1], dims[1], dtype=dtype)
    return make_request(q, k, v, **options)


def schedule(dims, **switches):
    """The configuration for head dims, of which some switches are set otherwise."""
    return replace(config.default_config(request_of(dims, {})), **switches)


def assess(request, chosen):
    """The accuracy of the gradients of an emulated kernel."""
    gradients, do = differentiate(chosen, request)
    return assess_request(gradients, request, do)


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        pytest.param(
            dims,
            OPTIONS[name],
            id=f"{dims[0]}-{dims[1]}-{name}",
            marks=pytest.mark.wide if (i - j) % len(HEAD_DIMS) and i > 1 else (),
        )
        for (i, dims), (j, name) in product(enumerate(HEAD_DIMS), enumerate(OPTIONS))
    ],
)
def test_every_option_with_every_head_dim(dims, options):
    """96 and 192 with every option; of the others one each, the rest is wide."""
    dtype = torch.float16 if dims[0] % 64 else torch.bfloat16
    assert_ok(assess(request_of(dims, options, dtype), schedule(dims)))


PAIR = {"halves": False, "pair": True}  # where halves fit, too
PADDED = {"block_kv": 64, "panels": False, "halves": False, "pair": False}
DIVISIONS = [
    ((160, 160), PAIR), ((128, 192), PAIR), ((256, 128), {}), ((96, 256), {}), ((192, 160), {}),
    ((192, 192), PADDED), ((160, 256), {}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "name"), rotated(DIVISIONS, list(OPTIONS), every=[0, 3]))
def test_every_option_with_every_division(case, name):
    dims, switches = case
    assert_ok(assess(request_of(dims, OPTIONS[name]), schedule(dims, **switches)))


SWITCHES = [
    ((96, 96), {}), ((96, 80), {"early": True, "stages": 3}), ((80, 64), {}), ((80, 80), {}),
    ((80, 80), {"early": True}), ((72, 96), {"block_q": 128}), ((192, 128), {}),
    ((192, 192), {}), ((256, 128), {}),
    ((192, 128), PADDED),
]  # fmt: skip


@pytest.mark.parametrize(("case", "order"), in_turn(SWITCHES))
def test_every_switch_in_every_order(case, order, monkeypatch):
    """In turns, too, which has other waits."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    dims, switches = case
    for options in ({"causal": True}, {"deterministic": True}):
        assert_ok(assess(request_of(dims, options), schedule(dims, **switches)))


@pytest.mark.parametrize("D", [72, 144])
def test_what_lies_beyond_the_head_dim_is_not_touched(D):
    """Of 72 dims the second panel has 8; what comes next in memory is another head's, here NaN."""
    request = request_of((D, D), {"causal": True})
    wide = [torch.full((*x.shape[:3], D + 8), torch.nan, dtype=x.dtype) for x in request[:3]]
    q, k, v = (place[..., :D] for place in wide)
    for narrow, x in zip((q, k, v), request[:3]):
        narrow.copy_(x)
    assert_ok(assess(request._replace(q=q, k=k, v=v), schedule((D, D))))


def test_the_widths_of_panels():
    """At most three quarters of a power of two: a half of it and a power of two for the rest."""
    for head_dim in range(8, 257, 8):
        power = max(64, 1 << (head_dim - 1).bit_length())
        assert config.tile_widths(head_dim, False) == (power,)
        two = power > 64 and head_dim <= power * 3 // 4
        rest = max(16, 1 << (head_dim - power // 2 - 1).bit_length()) if two else 0
        expected = (power // 2, rest) if two else (power,)
        assert config.tile_widths(head_dim, True) == expected
    assert config.tile_widths(160, True, by_halves=True) == (128, 32)
    assert config.tile_widths(144, True, by_halves=True) == (128, 32)
    assert config.tile_widths(192, True, by_halves=True) == (128, 64)


IN_FLIGHT = "a product is read while it is in flight"
OTHER_TILE = "a tile of another kind"
NO_FENCE = "a product without a fence"
LOADED_OVER = "TMA fills what was read without a fence"
# Not among them, as the emulator lets a warp run until it has to wait: with a pair, a slot of Q
# that is given back, filled or left by while dK reads it, as all of these come behind the dS of
# both consumers; at head_dim 80, dS that is given back while the second part of dQ reads it.
BUGS = {
    "S and dP lack the second panel": Bug(
        "multiply_rows",
        [("multiply_qk(rows.pair(), tile)", "multiply(rows.first, tile.first.permute((1, 0)))")],
        WRONG,
    ),
    "dK and dV lack the second panel": Bug(
        "Output.wait", [("Output(first, second,", "Output(first, self.second,")], WRONG
    ),
    "the second panel of dK is not scaled": Bug(
        "Output.scaled", [("self.second * factor", "self.second")], WRONG
    ),
    "the second panels of dK and dV are not stored": Bug(
        "store_panels", [("if boxes.PANELS == 2:", "if False:")], WRONG
    ),
    "the second panels of dK and dV are stored over the first": Bug(
        "store_panels", [("boxes.beside(coordinates)", "coordinates")], WRONG
    ),
    "panels of dQ change places": Bug(
        "add", [("part * WIDTH", "(1 - part) * WIDTH")], WRONG
    ),
    "both panels of dQ are of the first panel of K": Bug(
        "multiply_part", [("k_tile.panel(PART)", "k_tile.panel(0)")], OTHER_TILE
    ),
    "a panel of dQ is overwritten while it leaves": Bug(
        "Addends.release", [("self.PARTS - 1 - part)", "1)")], f"{WRONG}|stores in flight"
    ),
    "dP is read while it is in flight": Bug(
        "fold_queries", [("wait(do_tile.PANELS, deps", "wait(do_tile.PANELS + 1, deps")], IN_FLIGHT
    ),
    "dV is read while it is in flight": Bug(
        "fold_queries",
        [("wait(dv_tokens, q_tile.PANELS + BEHIND)", "wait(dv_tokens, q_tile.PANELS + 1)")],
        IN_FLIGHT,
    ),
    "early: dK is read while it is in flight": Bug(
        "fold_queries",
        [("wait(dk_tokens, BEHIND)", "wait(dk_tokens, BEHIND + 1)")],
        IN_FLIGHT,
        "early",
    ),
    "at once: a panel of dQ is read while it is in flight": Bug(
        "accumulate", [("1 if AHEAD and part == 0 else 0", "2 - part if AHEAD else 0")], IN_FLIGHT,
        "80",
    ),
    "at once: the narrow panel of dQ has the columns of a wide one": Bug(
        "exchanged", [("(0, 1, 3, 2, 4)", "(0, 1, 3, 2, 4) if EIGHTS == 4 else (0, 1, 2, 3, 4)")],
        WRONG, "80",
    ),
    # ---- halves
    "halves: S of the first half twice": Bug(
        "fold_by_halves",
        [("buffers, q_stage, 1, CONSUMER", "buffers, q_stage, 0, CONSUMER")], WRONG,
        "halves",
    ),
    "halves: LSE of the first half twice": Bug(
        "fold_by_halves",
        [("buffers.lse, q_stage.slot, s, half", "buffers.lse, q_stage.slot, s, 0")],
        WRONG, "halves",
    ),
    "halves: delta of the first half twice": Bug(
        "fold_by_halves",
        [("buffers.delta, do_stage.slot, s, half", "buffers.delta, do_stage.slot, s, 0")],
        WRONG, "halves",
    ),
    "halves: both halves of dS have one place": Bug(
        "fold_by_halves", [("ds_rows.slice(half * ROWS", "ds_rows.slice(0")], WRONG, "halves"
    ),
    "halves: dS is announced when half of it is written": Bug(
        "fold_by_halves",
        [("half == 1:\n            buffers.ds", "half == 0:\n            buffers.ds")],
        NO_FENCE, "halves",
    ),
    "halves: dS is written over one that is read": Bug(
        "fold_by_halves", [("buffers.ds.wait_empty(ds_stage)", "pass")], f"{WRONG}|more arrivals",
        "halves",
    ),
    "halves: dO is read before it is there": Bug(
        "fold_by_halves",
        [("buffers.do.wait(do_stage)", "pass")], f"{WRONG}|more arrivals", "halves"
    ),
    "halves: the next Q is read before it is there": Bug(
        "fold_by_halves", [("buffers.q.wait(q_stage.next(), more)", "pass")],
        f"{WRONG}|more arrivals|{LOADED_OVER}", "halves",
    ),
    "halves: a Q behind the last one is waited for": Bug(
        "fold_by_halves", [("stage.next(), more)", "stage.next(), True)")], "dead-lock", "halves"
    ),
    "halves: dV is read while it is in flight": Bug(
        "fold_by_halves",
        [("wait(dv_tokens, q_tile.PANELS)", "wait(dv_tokens, q_tile.PANELS + 1)")],
        IN_FLIGHT, "halves",
    ),
    "halves: dK is read while it is in flight": Bug(
        "fold_by_halves",
        [("wait(dk_tokens, q_tile.PANELS)", "wait(dk_tokens, q_tile.PANELS + 1)")],
        IN_FLIGHT, "halves",
    ),
    "halves: Q is released while dK reads it": Bug(
        "fold_by_halves",
        [("buffers.q.release(q_stage)", "pass"),
         ("    buffers.q.wait", "    buffers.q.release(q_stage)\n            buffers.q.wait")],
        WRONG, "halves",
    ),
    "halves: a slot of Q is filled before it is empty": Bug(
        "accumulate_and_load", [("buffers.q.wait_empty(stage)", "pass")], f"{WRONG}|more arrivals",
        "halves",
    ),
    "halves: a block too many is loaded": Bug(
        "accumulate_and_load", [("coming < steps", "coming <= steps")], WRONG, "halves"
    ),
    "halves: the slot of dS is not given back": Bug(
        "accumulate_and_load", [("buffers.ds.release(ds_stage)", "pass")], "dead-lock", "halves"
    ),
    "halves: dQ is overwritten while it leaves": Bug(
        "add_dq", [("store_wait(1)", "store_wait(2)")], WRONG, "halves"
    ),
    "halves: dQ has the first panel of K alone": Bug(
        "part_of_dims", [("tile.second.slice", "tile.first.slice")], WRONG, "halves"
    ),
    # ---- pair
    "pair: dS is read before it is written": Bug(
        "add_own_dq", [("buffers.ds.wait(ds_stage)", "pass")], f"{WRONG}|{NO_FENCE}", "pair"
    ),
    "pair: dS is written over one that is read": Bug(
        "fold_by_halves", [("buffers.ds.wait_empty(ds_stage)", "pass")], f"{WRONG}|more arrivals",
        "pair",
    ),
    "pair: dS is announced when half of it is written": Bug(
        "fold_by_halves",
        [("half == 1:\n            buffers.ds", "half == 0:\n            buffers.ds")],
        NO_FENCE, "pair",
    ),
    "pair: the slot of dS is not given back": Bug(
        "add_own_dq", [("buffers.ds.release(ds_stage)", "pass")], "dead-lock", "pair"
    ),
    "pair: the slot of dS is given back before it is read": Bug(
        "add_own_dq",
        [("if i == MINE - 1:", "if False:"),
         ("    buffers.ds.wait(ds_stage)\n",
          "    buffers.ds.wait(ds_stage)\n    buffers.ds.release(ds_stage)\n")],
        WRONG, "pair",
    ),
    "pair: dO is read before it is there": Bug(
        "fold_by_halves", [("buffers.do.wait(do_stage)", "pass")], f"{WRONG}|more arrivals", "pair"
    ),
    "pair: dO is released while dV reads it": Bug(
        "fold_by_halves",
        [("buffers.do.release(do_stage)", "pass"),
         ("        dv = dv.wait",
          "        if half == 1:\n            buffers.do.release(do_stage)\n        dv = dv.wait")],
        WRONG, "pair",
    ),
    "pair: a slot of dO is filled before it is empty": Bug(
        "load_do_of_step", [("buffers.do.wait_empty(stage)", "pass")], f"{WRONG}|more arrivals",
        "pair",
    ),
    "pair: dQ is overwritten while it leaves": Bug(
        "add_dq", [("store_wait(1)", "store_wait(2)")], WRONG, "pair"
    ),
    "pair: an odd number of parts has the same tiles in every block": Bug(
        "add_own_dq", [("ds_stage.phase ^ (i % 2)", "i % 2")], WRONG, "pair"
    ),
    "pair: both consumers have the same parts of dQ": Bug(
        "add_own_dq", [("2 * i + CONSUMER, WIDTH", "2 * i, WIDTH")], WRONG, "pair"
    ),
}  # fmt: skip
RUNS = {
    None: ((96, 96), {}),
    "early": ((96, 96), {"early": True}),
    "80": ((80, 80), {}),
    "halves": ((192, 128), {}),
    "pair": ((192, 192), {}),
}


def right(case):
    """Whether the gradients of a bug's run are."""
    dims, switches = RUNS[case]
    return all(x.ok for x in assess(request_of(dims, {}), schedule(dims, **switches)).values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", RUNS)
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
