"""Groups divided over programs in FA3's backward for Hopper, in the emulator: the parts of a tile
meet in memory, and the one that comes last adds them up.
"""

from dataclasses import replace

import pytest
import torch

from flash_versions import masks
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.hopper.backward import rows
from flash_versions.versions.oracle.budget import assess_request
from flash_versions.versions.oracle.suite import CASES
from tests.emulator.backward.test_hopper_backward_emulated import (
    DTYPES,
    LOADED,
    backward_hopper,
    config,
    differentiate,
    qkv,
)
from tests.emulator.backward.test_turns_emulated import GRIDS, set_grid
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.rotation import rotated

PROBLEM = LOADED["fa3.hopper.backward.problem"]
new_meeting = rows.new_meeting


@pytest.fixture(autouse=True)
def four_programs(monkeypatch):
    """Programs walk from tile to tile."""
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=4))


def stale_meeting(*given):
    """`rows.new_meeting`, in memory that others have used."""
    sums, arrivals = new_meeting(*given)
    if sums is not None:
        sums.fill_(float("nan"))
        arrivals.fill_(7)
    return sums, arrivals


@pytest.fixture(autouse=True)
def stale_memory(monkeypatch):
    monkeypatch.setattr(rows, "new_meeting", stale_meeting)


@pytest.fixture
def all_divided(monkeypatch):
    """Divide tiles of a single step, too."""
    monkeypatch.setattr(PROBLEM, "LEAST_STEPS", 1)


def divided(request, parts):
    """The default schedule with a group in parts."""
    return replace(config.default_config(in_vectors(request)), parts=parts)


def gradients_of(parts, request, do=None):
    """The gradients, and whether all are within the budget."""
    found, do = differentiate(divided(request, parts), request, do)
    return found, all(x.ok for x in assess_request(found, request, do).values())


def is_right(parts, *inputs, **options):
    return gradients_of(parts, make_request(*inputs, **options))[1]


@pytest.mark.parametrize(("case", "dtype"), rotated(CASES, DTYPES))
def test_every_case_with_a_group(case, dtype, monkeypatch, all_divided):
    """All query heads of a group are parts."""
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    inputs, options = case.inputs(dtype, "cpu"), case.all_options("cpu")
    request = make_request(*inputs, **options)
    if not all(x.numel() for x in inputs) or request.group == 1:
        pytest.skip("no group is divided")
    if reason := backward_hopper.left_to_portable(in_vectors(request)):
        pytest.skip(reason)
    assert gradients_of(request.group, request)[1]


GROUPS = [  # (query heads, parts, dims)
    (2, 2, (64, 64)), (3, 3, (128, 128)), (4, 2, (96, 96)), (4, 4, (64, 128)), (6, 3, (128, 64)),
    (8, 2, (64, 64)), (8, 8, (128, 128)), (4, 2, (256, 256)), (3, 3, (224, 256)),
    (4, 2, (192, 192)), (3, 3, (256, 128)), (4, 4, (160, 160)), (6, 2, (192, 128)),
]  # fmt: skip


@pytest.mark.parametrize(("group", "causal"), rotated(GROUPS, (True, False)))
def test_groups(group, causal):
    """Two key heads; under a causal mask, tiles that few queries see may not be divided."""
    heads, parts, dims = group
    inputs = qkv(200, 260, 2 * heads, dims[0], kv_heads=2, D_v=dims[1])
    assert is_right(parts, *inputs, causal=causal)


MASKS = {
    "documents": masks.documents([70, 1, 0, 150, 64, 15]),
    "a shared prompt": masks.shared_prompt(150, [70, 30, 50]),
    "no key is seen": {"query_ends": torch.zeros(300, dtype=torch.int32)},
    "heads of their own": {
        "causal": True,
        "query_starts": torch.randint(150, (1, 300)),
        "query_ends": torch.randint(301, (1, 2, 300)),
    },
}


@pytest.mark.parametrize(("mask", "least"), rotated(MASKS, (12, 1)))
def test_interval_masks(mask, least, monkeypatch):
    monkeypatch.setattr(PROBLEM, "LEAST_STEPS", least)
    assert is_right(4, *qkv(300, 300, 8, 64, kv_heads=2), **MASKS[mask])


WIDE = [(192, 192), (160, 160), (256, 256)]  # a pair, halves, divided dims


@pytest.mark.parametrize(("options", "dims"), rotated([
    {"cu_seqlens_q": torch.tensor([3, 3, 60, 131]), "causal": True},
    {"kv_lengths": torch.tensor([100]), "sink": torch.zeros(4), "window": (70, 10)},
    {"causal": True, "deterministic": True},
    {"query_ends": torch.arange(140), "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
], WIDE))  # fmt: skip
def test_above_128_dims(options, dims, all_divided):
    inputs = qkv(140, 140, 4, dims[0], kv_heads=1, D_v=dims[1])
    if "cu_seqlens_q" in options:
        inputs = [x[0] for x in inputs]
    assert is_right(2, *inputs, **options)


@pytest.mark.parametrize(("deterministic", "least"), [(False, 12), (True, 1)])
def test_packed_sequences(deterministic, least, monkeypatch):
    """Also empty ones, one with keys only and one with queries only; rows of none at both ends."""
    monkeypatch.setattr(PROBLEM, "LEAST_STEPS", least)
    q, k, v = (x[0] for x in qkv(420, 420, 4, 64, kv_heads=2))
    options = {
        "cu_seqlens_q": torch.tensor([3, 3, 130, 130, 330, 331, 400]),
        "cu_seqlens_k": torch.tensor([5, 5, 129, 140, 340, 340, 410]),
        "causal": True,
        "deterministic": deterministic,
    }
    assert is_right(2, q, k, v, **options)


def test_lengths(all_divided):
    inputs = qkv(200, 300, 4, 64, kv_heads=2, batch=3)
    lengths = torch.tensor([300, 0, 150])
    assert is_right(2, *inputs, kv_lengths=lengths, causal=True)
    starts = torch.tensor([0, 100, 299])
    assert is_right(2, *inputs, kv_starts=starts, sink=torch.randn(4), window=(70, 10))


@pytest.mark.parametrize(
    ("grid", "options"), rotated(GRIDS, [{"causal": True}, {}, {"window": (100, 30)}])
)
def test_turns(grid, options, monkeypatch):
    """With additions to dQ in turns, no program waits forever, and all gradients have the bits of
    another grid. Under a causal mask, the last tile is left to the first part.
    """
    monkeypatch.setattr(PROBLEM, "LEAST_STEPS", 6)
    request = make_request(*qkv(260, 260, 4, 64, kv_heads=2), deterministic=True, **options)
    do = torch.randn_like(request.q)
    set_grid("one by one", monkeypatch)
    expected, right = gradients_of(2, request, do)
    assert right
    set_grid(grid, monkeypatch)
    found, _ = gradients_of(2, request, do)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_of_all_orders_only_dq_may_know(monkeypatch):
    """Whichever part is the last one, it adds the parts up in their order."""
    request = make_request(*qkv(200, 130, 4, 64, kv_heads=1), causal=True)
    do, results = torch.randn_like(request.q), []
    for order, grid in zip((*ORDERS.values(), ORDERS["any order"]._replace(seed=9)) * 2, GRIDS):
        monkeypatch.setattr(gluon_machine, "order", order)
        set_grid(grid, monkeypatch)
        found, right = gradients_of(4, request, do)
        assert right
        results.append(found)
    for result in results[1:]:
        assert torch.equal(result["dk"], results[0]["dk"])
        assert torch.equal(result["dv"], results[0]["dv"])


def test_parts_that_are_not_possible():
    request = make_request(*qkv(8, 8, 6, 64, kv_heads=2))
    with pytest.raises(ValueError, match="parts=2 must divide the 3 heads of a group"):
        differentiate(divided(request, 2), request)


CAUSAL, PROMPT = {"causal": True}, masks.shared_prompt(2048, [256] * 16)
CHOSEN = [  # (head_dim, queries, heads, key heads, options, parts)
    (128, 2048, 16, 4, CAUSAL, 4), (128, 2048, 32, 8, CAUSAL, 2), (128, 4096, 16, 4, CAUSAL, 2),
    (128, 8192, 32, 8, CAUSAL, 2), (128, 2048, 16, 4, {}, 2), (128, 4096, 16, 4, {}, 1),
    (128, 512, 16, 4, {}, 4), (128, 512, 64, 8, {}, 4), (128, 512, 6, 2, {}, 3),
    (128, 512, 10, 2, {}, 5), (128, 8192, 16, 16, CAUSAL, 1), (128, 6144, 16, 4, PROMPT, 2),
    (128, 6144, 64, 16, PROMPT, 2), (256, 512, 16, 4, CAUSAL, 4), (256, 2048, 16, 4, CAUSAL, 2),
    (256, 2048, 32, 8, CAUSAL, 2), (256, 8192, 32, 8, CAUSAL, 1), (256, 512, 16, 4, {}, 4),
    (256, 2048, 32, 8, {}, 1), (192, 512, 16, 4, CAUSAL, 4),
    (192, 2048, 32, 8, CAUSAL, 2), (192, 8192, 32, 8, {}, 1), (160, 2048, 16, 4, CAUSAL, 4),
    (192, 8192, 32, 8, CAUSAL, 2), (96, 8192, 32, 8, CAUSAL, 1),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "tokens", "heads", "kv_heads", "options", "parts"), CHOSEN)
def test_what_is_chosen(head_dim, tokens, heads, kv_heads, options, parts):
    """On a GPU of 132 SMs; the CPU, which has one, divides nothing."""
    q = torch.empty(1, tokens, heads, head_dim, dtype=torch.bfloat16)
    k = q[:, :, :kv_heads]
    request = make_request(q, k, k, **options)
    assert config.default_config(request).parts == 1
    with devices.assume(Properties(num_sms=132)):
        assert config.default_config(request).parts == parts


@pytest.mark.parametrize(("tokens", "options", "key_heads"), [
    (2048, CAUSAL, 8),  # 128 tiles: those of all heads
    (8192, CAUSAL, 1),  # 512: of as many heads as fit in the cache
    (6144, PROMPT, 8), (2048, {}, 1),
])  # fmt: skip
def test_where_the_heaviest_tiles_of_all_heads_come_first(tokens, options, key_heads):
    q = torch.empty(1, tokens, 32, 192, dtype=torch.bfloat16)
    request = make_request(q, q[:, :, :8], q[:, :, :8], **options)
    with devices.assume(Properties(num_sms=132)):
        chosen = config.default_config(request)
        assert config.heads_of_section(request, chosen) == key_heads * chosen.parts


BUGS = {
    "a part is left out": Bug("added_panel", [("range(1, PARTS)", "range(2, PARTS)")], WRONG),
    "a part is added twice": Bug("added_panel", [("range(1, PARTS)", "range(PARTS)"),
        ("        pointers += APART\n        total += gl.load(pointers",
         "        total += gl.load(pointers")], WRONG),
    "the first part is added for each": Bug(
        "added_panel", [("        pointers += APART\n", "")], WRONG
    ),
    "the sums of another consumer": Bug(
        "Parts.add_up", [("PARTS * CONSUMERS) + CONSUMER", "PARTS * CONSUMERS)")], WRONG
    ),
    "dK and dV change places": Bug(
        "Parts.add_up", [("leave(mine, dv)", "leave(mine, dk)"),
                         ("dv.width(), dk)", "dv.width(), dv)")], WRONG
    ),
    "consumers count together": Bug(
        "Parts.add_up", [("tile * CONSUMERS + CONSUMER),", "tile * CONSUMERS),")], WRONG
    ),
    "heads count together": Bug(
        "KeyProblem.place", [("tile * self.kv_heads + kv_head", "tile * self.kv_heads")], WRONG
    ),
    "tiles count together": Bug("KeyProblem.place", [("key // self.BLOCK_KV", "key * 0")], WRONG),
    "sums are counted before they are there": Bug(
        "Parts.add_up",
        [("    leave(mine, dv)\n    leave(mine + WARPGROUP_ROWS * dv.width(), dk)\n", ""),
         ("    is_last =", "    for _ in range(100):\n        thread_barrier()\n"
          "    leave(mine, dv)\n    leave(mine + WARPGROUP_ROWS * dv.width(), dk)\n    is_last =")],
        WRONG,
    ),
    "the last one but one adds up": Bug(
        "Parts.add_up", [("problem.PARTS - 1", "problem.PARTS - 2")], WRONG
    ),
    "every part stores its own": Bug(
        "Parts.add_up", [("return dk, dv, is_last", "return dk, dv, True"),
                         ("if is_last:", "if False:")], WRONG
    ),
    "a part has the keys of another head": Bug(
        "KeyProblem.whole", [("kv_head // self.PARTS", "kv_head % 2")], WRONG
    ),
    "a pair walks over the heads of a part only": Bug(
        "consume_pair", [("steps = heads * (end", "steps = problem.GROUP * (end")],
        f"{WRONG}|dead-lock|arrivals", "pair",
    ),
    "a pair loads for the heads of a part only": Bug(
        "consume_pair", [("next_do, begin, end, steps", "next_do, begin, end, steps // 2")],
        "dead-lock", "pair",
    ),
    "halves load for the heads of a part only": Bug(
        "accumulate_and_load", [("steps = heads * (end", "steps = problem.GROUP * (end")],
        f"{WRONG}|dead-lock|arrivals", "halves",
    ),
    "each part has all heads": Bug(
        "KeyProblem.share", [("where(divided, self.GROUP,", "where(divided, 2 * self.GROUP,")],
        f"{WRONG}|in front|past the ends|out of bounds|out of range",
    ),
    "tiles that are not divided have the first part's heads only": Bug(
        "KeyProblem.share", [("gl.where(is_first, self.GROUP * self.PARTS, 0)", "self.GROUP")],
        f"{WRONG}|dead-lock|arrivals", "causal",
    ),
    "other parts of a tile that is not divided store zeros": Bug(
        "Parts.combine", [("kv_head % problem.PARTS == 0", "True")], WRONG, "causal"
    ),
    "a part without heads waits for keys": Bug(
        "KeyProblem.share", [("gl.where(divided | is_first, end, begin)", "end")],
        f"dead-lock|loads in flight|{WRONG}", "causal",
    ),
}  # fmt: skip


def right(case):
    """Whether the gradients of a bug's run are, of tiles that are all divided, or some."""
    lengths = (200, 140) if case is None else (300, 300)
    dims = {"pair": 192, "halves": 160}.get(case, 64)
    return is_right(2, *qkv(*lengths, 8, dims, kv_heads=2), causal=case is not None)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", [None, "causal", "pair", "halves"])
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
