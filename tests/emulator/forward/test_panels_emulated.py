"""Head dims in two panels in the kernels for Hopper, without a GPU."""

from itertools import product

import pytest
import torch

from flash_versions import masks
from flash_versions.dispatch.autograd.compute import in_vectors, narrowed
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import panel_widths
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.forward_and_backward.test_ragged_emulated import IN_TURN, poisoned_memory
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.kernels.budget import assert_ok

LOADED = gluon_emulator.load("flash_versions.versions.fa4.hopper.host")
FORWARD = {"fa3": LOADED["fa3.hopper.host"], "fa4": LOADED["fa4.hopper.host"]}
CONFIG = {
    "fa3": LOADED["fa3.hopper.config"].HopperConfig,
    "fa4": LOADED["fa4.hopper.config"].RolesConfig,
}
# Of q and k, and of v; with one panel on either side, too.
HEAD_DIMS = [
    (96, 96), (192, 192), (192, 128), (80, 80), (160, 160), (72, 72), (128, 192), (96, 64),
    (64, 96), (256, 160), (66, 130),
]  # fmt: skip
M, N, HEADS, KV_HEADS = 150, 300, 4, 2
LENGTHS = [70, 0, 1, 79]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window and softcap": {"window": (100, 20), "softcap": 5.0},
    "slopes and sink": {
        "causal": True,
        "alibi_slopes": torch.rand(HEADS) / 16,
        "sink": torch.randn(HEADS),
    },
    "rows of other lengths": {"causal": True, "kv_lengths": torch.tensor([37, 300]).int()},
    "packed": {"causal": True, "cu_seqlens_q": CU_SEQLENS},
    "intervals": masks.shared_prompt(150, [70, 30, 50]),
}


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, and memory that holds NaN until it is written."""
    monkeypatch.setattr(torch, "empty", poisoned_memory)
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


def request_of(dims, options, dtype=torch.bfloat16):
    """A call with as many rows as its options are about."""
    batch = 2 if "kv_lengths" in options else 1
    queries, keys = (300, 300) if "query_ends" in options else (M, N)
    shapes = [(batch, queries, HEADS), (batch, keys, KV_HEADS)]
    if "cu_seqlens_q" in options:
        shapes = [(sum(LENGTHS), HEADS), (sum(LENGTHS), KV_HEADS)]
    q = torch.randn(*shapes[0], dims[0], dtype=dtype)
    k = torch.randn(*shapes[1], dims[0], dtype=dtype)
    v = torch.randn(*shapes[1], dims[1], dtype=dtype)
    return make_request(q, k, v, num_splits=1, **options)


def assess(version, request, schedule=None):
    """The accuracy of o and of the LSE of an emulated kernel, called as by `attention`."""
    aligned = in_vectors(request)
    assert FORWARD["fa3"].left_to_portable(aligned) is None
    o, lse, _ = FORWARD[version].forward(aligned, schedule)
    return assess_request({"o": narrowed(o, request.v), "lse": lse}, request)


@pytest.mark.parametrize(
    ("dims", "options", "version"),
    [
        pytest.param(
            dims,
            OPTIONS[name],
            version,
            id=f"{dims[0]}-{dims[1]}-{name}-{version}",
            marks=pytest.mark.wide if (i + j + k) % len(FORWARD) else (),
        )
        for (i, dims), (j, name), (k, version) in product(
            enumerate(HEAD_DIMS), enumerate(OPTIONS), enumerate(FORWARD)
        )
    ],
)
def test_every_option_with_every_head_dim(dims, options, version):
    dtype = torch.float16 if version == "fa3" else torch.bfloat16
    assert_ok(assess(version, request_of(dims, options, dtype)))


SWITCHES = {
    "64 keys": {},
    "O in parts": {"q_stages": 1, "o_columns": 64},
    "three consumers": {"consumers": 3, "stages": 3, "scheduler": "dynamic"},
    "late wait, no turns": {"stages": 3, "late_wait": True, "ping_pong": False},
    "in order": {"overlap": False},
    "always rescale": {"threshold": 0.0, "scheduler": "grid"},
}
OWN = {"fa3": {"overlap", "late_wait"}, "fa4": {"threshold"}}  # which the other does not have


def has(version, switches):
    """Whether a version has all these switches."""
    return not any(OWN[x] & {*switches} for x in OWN if x != version)


@pytest.mark.parametrize("order", IN_TURN)
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_every_switch_in_every_order(switches, order, monkeypatch):
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    request = request_of((96, 96), OPTIONS["causal"])
    for version, config in CONFIG.items():
        if has(version, switches):
            assert_ok(assess(version, request, config(block_kv=64, **switches)))


@pytest.mark.parametrize("o_columns", [64, 128])
@pytest.mark.parametrize("version", FORWARD)
def test_o_leaves_in_parts(version, o_columns):
    """Of one panel or two; the last part may be narrower than the buffer, or partly beyond O."""
    schedule = CONFIG[version](block_kv=64, q_stages=1, o_columns=o_columns)
    for dims in [(64, 144), (64, 160), (64, 192), (64, 200), (64, 256)]:
        assert_ok(assess(version, request_of(dims, OPTIONS["causal"]), schedule))


@pytest.mark.parametrize("version", FORWARD)
def test_what_lies_beyond_the_head_dim_is_not_read(version):
    """Of 72 dims the second panel has 8; what comes next in memory is another head's, here NaN."""
    request = request_of((72, 72), OPTIONS["causal"])
    wide = [torch.full((*x.shape[:3], 80), torch.nan, dtype=x.dtype) for x in request[:3]]
    q, k, v = (place[..., :72] for place in wide)
    for narrow, x in zip((q, k, v), request[:3]):
        narrow.copy_(x)
    assert_ok(assess(version, request._replace(q=q, k=k, v=v)))


IN_FLIGHT = "a product is read while it is in flight"
FORGOTTEN = {
    "the second panel of acc is not rescaled": Bug(
        "Output.rescaled", [("second = second * per_row(alpha, second)[:, None]", "pass")], WRONG
    ),
    "the second panel of O is not divided by the row sum": Bug(
        "Output.finalized", [("second, _ = finalize(", "_ = finalize(")], WRONG
    ),
    "the second panel of O is the first again": Bug(
        "Output.parts", [("parts_of(self.second,", "parts_of(self.first,")], WRONG
    ),
    "the first half of an accumulator is the second": Bug(
        "parts_of", [("first, second = gl.split", "second, first = gl.split")], WRONG
    ),
    "the second panel comes from the first one's columns": Bug(
        "Boxes.beside", [("self.first.block_type.shape[-1]", "0")], WRONG
    ),
    "the second panel comes from too far to the right": Bug(
        "Boxes.beside", [("shape[-1]", "shape[-1] + 8")], WRONG
    ),
    "S lacks the second panel": Bug("multiply_qk", [("k_tile.PANELS == 2", "False")], WRONG),
    "S begins anew with the second panel": Bug(
        "multiply_qk", [("s_token, is_async", "s_token, use_acc=False, is_async")], WRONG
    ),
    "only the bytes of the first panel are expected": Bug(
        "Pipeline.load_with", [(" + values_desc.block_type.nbytes", "")], "dead-lock"
    ),
    "only the bytes of the panels are expected, not of the intervals": Bug(
        "PanelPipeline.load_with", [(" + values_desc.block_type.nbytes", "")], "dead-lock",
        "intervals",
    ),
    "a slot is filled before it is empty": Bug(
        "PanelPipeline.fill", [("self.first.wait_empty(stage)", "pass")], "more arrivals"
    ),
    "S is not waited for": Bug(
        "attend", [("_wait(acc.PANELS,", "_wait(acc.PANELS + 1,")], IN_FLIGHT
    ),
    "the second product of P and V is not waited for": Bug(
        "Output.wait", [("_wait(IN_FLIGHT, deps=[tokens[0], tokens[1]])",
                         "_wait(1, deps=[tokens[0], tokens[1]])")], IN_FLIGHT
    ),
}  # fmt: skip
# Of FA4 alone.
CORRECTED = Bug("corrected", [("second = correct(second, per_row(alpha, second))", "pass")], WRONG)
CASES = {None: (192, 160), "intervals": (96, 96)}


def is_right(version, case, schedule=None):
    """Whether the result of a bug's case is within the budget."""
    request = request_of(CASES[case], OPTIONS[case or "full"])
    schedule = schedule or CONFIG[version](block_kv=64, stages=2, o_columns=64)
    return all(x.ok for x in assess(version, request, schedule).values())


@pytest.mark.parametrize("bug", FORGOTTEN.values(), ids=FORGOTTEN)
def test_planted_bugs_are_found(bug, monkeypatch):
    loaded = {x: y for x, y in LOADED.items() if x != "fa4.hopper.forward"}
    plant(bug, loaded.values(), monkeypatch)
    assert_found(bug, lambda: is_right("fa3", bug.case), monkeypatch)


def test_a_panel_that_is_not_corrected_is_found(monkeypatch):
    plant(CORRECTED, LOADED.values(), monkeypatch)
    always = CONFIG["fa4"](block_kv=64, threshold=0.25)
    assert_found(CORRECTED, lambda: is_right("fa4", None, always), monkeypatch)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", FORWARD)
def test_nothing_is_found_where_no_bug_is(version, case, monkeypatch):
    assert list(outcomes(lambda: is_right(version, case), monkeypatch)) == ["", "", ""]


def test_panels_are_the_narrowest_that_hold_a_head_dim():
    """Against all pairs of powers of two."""
    powers = [64, 128, 256]
    pairs = [(x, y) for x in powers for y in (16, 32, 64, 128) if y < x]
    pairs += [(x,) for x in (32, *powers)]
    for head_dim in range(1, 257):
        widths = panel_widths(head_dim)
        assert widths in pairs
        assert sum(widths) == min(sum(x) for x in pairs if sum(x) >= head_dim)
