"""The decoding kernel for Hopper, without a GPU."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.rotation import in_turn, pairwise, rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa3.hopper.decode.host")
HOST = LOADED["fa3.hopper.decode.host"]
CONFIG = HOST.DecodeConfig(slots=3)  # an odd number: K and V take turns in a slot
LENGTHS = {
    "nothing, one, one past a block": [0, 1, 65, 200, 0],
    "one long among short": [3, 5, 200, 2, 1],
    "all full": [200] * 5,
    "all empty": [0] * 5,
    "whole blocks": [64, 128, 192, 64, 128],
}
SHARES = [1, 3, 7]


def poisoned_memory(*given, empty=torch.empty, **options):
    x = empty(*given, **options)
    return x.fill_(math.nan) if x.is_floating_point() else x


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, and memory that holds NaN until it is written."""
    monkeypatch.setattr(torch, "empty", poisoned_memory)
    poisoned = partial(poisoned_memory, empty=torch.Tensor.new_empty)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **how: poisoned(*given, **how))
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


def in_pages(x, page_size, lengths):
    """(batch, N, ...) as shuffled pages and the table that finds them; what belongs to no sequence
    is NaN, and the entries of unused pages are those of no page.
    """
    batch, n = x.shape[:2]
    of_each = -(-n // page_size)
    pages = x.new_full((batch * of_each + 3, page_size, *x.shape[2:]), math.nan)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(page_size))
    table = order[: batch * of_each].view(batch, of_each).int()
    for b, length in enumerate(lengths):
        for i in range(-(-length // page_size)):
            part = x[b, i * page_size : min((i + 1) * page_size, length)]
            pages[table[b, i], : len(part)] = part
        table[b, -(-length // page_size) :] = -1
    return pages, table


def requests(
    lengths, page_size=None, starts=None, queries=1, heads=(4, 2), dims=(64, 64), transposed=False,
    dtype=torch.bfloat16, n=200, **options
):  # fmt: skip
    """A request with NaN wherever no sequence has a key, and the same in rows without NaN."""
    batch = len(lengths)
    q = torch.randn(batch, queries, heads[0], dims[0], dtype=dtype)
    k, v = (torch.randn(batch, n, heads[1], dim, dtype=dtype) for dim in dims)
    options = {"causal": True, "kv_lengths": torch.tensor(lengths)} | options
    if starts is not None:
        options["kv_starts"] = torch.tensor(starts)
    exact = make_request(q, k, v, **options)
    k, v = k.clone(), v.clone()
    for b, length in enumerate(lengths):
        for x in (k, v):
            x[b, length:] = math.nan
            x[b, : min(starts[b], length) if starts else 0] = math.nan
    if page_size is not None:
        (k, table), (v, _) = (in_pages(x, page_size, lengths) for x in (k, v))
        options["block_table"] = table
    if transposed:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return make_request(q, k, v, **options), exact


def is_right(request, exact, config=CONFIG, shares=3):
    """Whether the results are within the budget, and the same if computed again."""
    assert HOST.left_to_gathering(request) is None
    o, lse, _ = HOST.forward(request, config, shares)
    return all(x.ok for x in assess_request({"o": o, "lse": lse}, exact).values())


@pytest.mark.parametrize(
    ("lengths", "shares", "page_size", "order"),
    in_turn(LENGTHS, SHARES, [None, 16, 64], pairs=True),
)
def test_lengths(lengths, shares, page_size, order, monkeypatch):
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    assert is_right(*requests(LENGTHS[lengths], page_size), shares=shares)


@pytest.mark.parametrize("page_size", [None, 32])
@pytest.mark.parametrize(
    ("heads", "queries"),
    [((2, 2), 1), ((4, 1), 4), ((16, 1), 2), ((6, 2), 1), ((64, 1), 1), ((1, 1), 64)],
)
def test_groups_and_queries(heads, queries, page_size):
    assert is_right(*requests([70, 150, 2], page_size, heads=heads, queries=queries))


DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128)]


@pytest.mark.parametrize(
    ("dims", "page_size", "block_kv"), pairwise(DIMS, [None, 16, 128], [64, 128])
)
def test_head_dims(dims, page_size, block_kv):
    config = replace(CONFIG, block_kv=block_kv)
    assert is_right(*requests([130, 1, 200], page_size, dims=dims), config)


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 192, 256])
@pytest.mark.parametrize("shares", [2, 5])
def test_pages(page_size, shares):
    """Shorter and longer than a block; those of 48 keys are left to FA2."""
    request, exact = requests([150, 1, 17, 0, 128, 64], page_size)
    if page_size == 48:
        assert "pages of 48 keys" in HOST.left_to_gathering(request)
    else:
        assert is_right(request, exact, shares=shares)


OPTIONS = {
    "full": {"causal": False},
    "window": {"window": (40, None)},
    "window ahead": {"causal": False, "window": (20, 10)},
    "softcap": {"softcap": 3.0},
    "sink": {"sink": torch.tensor([3.0, -5.0, 0.0, -math.inf])},
    "slopes": {"alibi_slopes": torch.rand(4)},
    "slopes of each sequence": {"alibi_slopes": torch.rand(5, 4)},
    "fp16": {"dtype": torch.float16},
    "int32": {"kv_lengths": torch.tensor([200, 141, 2, 0, 200], dtype=torch.int32)},
    "too long": {"kv_lengths": torch.tensor([10**12, 141, 2, -3, 200])},
}


@pytest.mark.parametrize(("name", "page_size", "shares"), pairwise(OPTIONS, [None, 64], [1, 5]))
def test_options(name, page_size, shares):
    options = OPTIONS[name]
    if page_size is not None and name == "too long":
        options = {}  # rounded up to whole pages, a cache has more keys than the rows
    assert is_right(
        *requests([200, 141, 2, 0, 200], page_size, queries=2, **options), shares=shares
    )


@pytest.mark.parametrize(("name", "shares"), rotated(OPTIONS, [1, 5]))
def test_starts(name, shares):
    lengths, starts = [200, 141, 2, 0, 200], [3, 140, 0, 0, 199]
    assert is_right(*requests(lengths, starts=starts, queries=2, **OPTIONS[name]), shares=shares)


@pytest.mark.parametrize("page_size", [None, 64])
def test_keys_of_a_head_behind_each_other(page_size):
    """As in a cache of transformers, and as pages lie in some engines."""
    assert is_right(*requests([150, 1, 17, 128], page_size, transposed=True))


def test_all_of_one_length():
    """Without lengths, in rows and in pages; cu_seqlens_k gives lengths of keys in pages."""
    q = torch.randn(3, 1, 4, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 3, 192, 2, 64, dtype=torch.bfloat16)
    exact = make_request(q, k, v, causal=True)
    assert is_right(exact, exact)
    (k, table), (v, _) = (in_pages(x, 64, [192] * 3) for x in (k, v))
    assert is_right(make_request(q, k, v, causal=True, block_table=table), exact)


def test_lengths_from_packed_keys():
    lengths = [150, 70, 0]
    request, exact = requests(lengths, 64)
    cuts = torch.tensor([0, *lengths]).cumsum(0).int()
    assert is_right(request._replace(kv_lengths=None, cu_seqlens_k=cuts), exact)


@pytest.mark.parametrize("page_size", [None, 64])
def test_nan_stays_in_its_sequence(page_size):
    """What is NaN in a sequence reaches its own results, and no other's."""
    lengths = [70, 130, 64]
    request, exact = requests(lengths, page_size)
    k, v = request.k.clone(), request.v.clone()
    own = request.block_table[1, :3] if page_size else [1]
    for x in (k, v):
        x[own] = math.nan
    o, lse, _ = HOST.forward(request._replace(k=k, v=v), CONFIG, 3)
    assert o[1].isnan().all() and lse[1].isnan().all()
    others = [0, 2]
    alone = exact._replace(
        **{name: getattr(exact, name)[others] for name in ("q", "k", "v", "kv_lengths")}
    )
    found = assess_request({"o": o[others], "lse": lse[others]}, alone)
    assert all(x.ok for x in found.values())


def test_more_sequences_than_are_scanned_at_once(monkeypatch):
    lengths = [int(x) for x in torch.randint(0, 40, (150,))]
    for shares in (1, 9):
        assert is_right(*requests(lengths, heads=(1, 1)), shares=shares)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_slots(slots):
    assert is_right(*requests([200, 3, 130], 16), replace(CONFIG, slots=slots), 2)


def test_results_do_not_depend_on_the_layout():
    """The same bits in rows and in pages."""
    lengths = [150, 1, 17, 0, 128]
    given = {"queries": 2, "heads": (8, 2)}
    torch.manual_seed(0)
    rows, _ = requests(lengths, **given)
    torch.manual_seed(0)
    pages, _ = requests(lengths, 16, **given)
    for a, b in zip(HOST.forward(rows, CONFIG, 4)[:2], HOST.forward(pages, CONFIG, 4)[:2]):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_splits": 2}, "num_splits was given"),
        ({"dropout_p": 0.1}, "dropout_p are left"),
        ({"heads": (65, 1)}, "65 query rows"),
        ({"dims": (512, 64)}, "head_dim 512"),
        ({"dtype": torch.float32}, "dtype torch.float32"),
        ({"page_size": 64, "starts": [1, 2]}, "kv_starts with pages"),
        ({"page_size": 24}, "pages of 24 keys"),
    ],
)
def test_what_is_left_to_others(change, sentence):
    assert sentence in HOST.left_to_gathering(requests([70, 80], **change)[0])


def test_pages_have_to_fit_the_blocks_of_a_configuration():
    """Pages of 192 keys are whole blocks of 64 keys, not of 128."""
    request, _ = requests([150, 1], 192)
    assert HOST.left_to_gathering(request) is None
    with pytest.raises(ValueError, match="pages of 192 keys.*blocks of 128"):
        HOST.make_plan(request, HOST.DecodeConfig(block_kv=128, programs=1))


def test_values_at_another_distance_are_left_to_others():
    request, _ = requests([70, 80])
    other = request._replace(v=request.v.transpose(1, 2).contiguous().transpose(1, 2))
    assert "one common number" in HOST.left_to_gathering(other)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True), ({"kv_lengths": None}, False), ({"kv_lengths": None, "page_size": 64}, True),
        ({"dims": (128, 128)}, True), ({"n": 90, "kv_lengths": None}, False),
    ],
)  # fmt: skip
def test_where_it_pays(options, expected, monkeypatch):
    monkeypatch.setattr(HOST, "LONG", 64)
    assert (HOST.planned(requests([70, 80], **options)[0]) is not None) == expected


def test_many_pieces_of_many_rows_are_left_to_gathering():
    """One key head of 32 query heads and 2 queries: 264 programs have pieces of its only sequence,
    which FA2 combines on all multiprocessors.
    """
    with devices.assume(Properties(num_sms=132)):
        few, _ = requests([200] * 16, 64, queries=2, heads=(8, 2))
        assert HOST.rounds_to_combine(few) == 4 and HOST.pays(few)
        many, _ = requests([200], 64, queries=2, heads=(32, 1))
        assert HOST.rounds_to_combine(many) == 16 * 34 and not HOST.pays(many)


def test_more_counters_than_are_kept(monkeypatch):
    monkeypatch.setattr(HOST.counters, "numbers", 2)
    assert is_right(*requests([200, 10, 130, 40]), shares=3)


BUGS = {
    "a box ends a row too late": Bug(
        "box_in_sequence",
        [("first + length, head, FAR - length", "first + length + 1, head, FAR - length - 1")],
        WRONG,
    ),
    "a page ends with its memory": Bug(
        "KeyRows.box", [("gl.maximum(length - before, 0)", "self.PAGE_SIZE")], WRONG
    ),
    "the page before": Bug(
        "KeyRows.box", [("key // self.PAGE_SIZE", "key // self.PAGE_SIZE - (key > 0)")], WRONG
    ),
    "a page that does not exist is looked up": Bug(
        "KeyRows.page", [("mask=exists", "mask=True")], "outside of the tensor|past the ends|box at"
    ),
    "the table of another sequence": Bug(
        "KeyRows.page", [("sequence.to(gl.int64) *", "0 *")], "outside of the tensor|box at|wrong"
    ),
    "the boxes of a block change places": Bug(
        "fill", [("+ box\n", "+ (1 - box if ring.BOXES > 1 else 0)\n")], "slot|wrong"
    ),
    "V of the block before": Bug("produce", [("stage, v, places", "stage, k, places")], WRONG),
    "a slot is filled before it is empty": Bug(
        "fill", [("ring.slots.wait_empty(stage)", "pass")], "more arrivals|consume 0 in .*wait"
    ),
    "K is released before its product is done": Bug(
        "attend_piece",
        [
            (
                "        s = warpgroup_mma_wait(0, deps=[s])\n        ring.slots.release(stage)\n",
                "        ring.slots.release(stage)\n        s = warpgroup_mma_wait(0, deps=[s])\n",
            ),
        ],
        WRONG,
    ),
    "K is not waited for": Bug(
        "attend_piece",
        [("        ring.slots.wait(stage)\n        s = gl", "        s = gl")],
        "more arrivals",
    ),
    "V is not waited for": Bug(
        "attend_piece",
        [("        ring.slots.wait(stage)\n        tokens", "        tokens")],
        "more arrivals",
    ),
    "V is never given back": Bug(
        "attend_piece",
        [("V)\n        ring.slots.release(stage)", "V)")],
        "produce 1 in .*wait_empty",
    ),
    "Q without a fence": Bug(
        "load_queries", [("    fence_async_shared()\n", "")], "a product without a fence"
    ),
    "the end is not masked": Bug("attend_piece", [("| (block >= piece.full_end)", "")], WRONG),
    "the accumulator is not rescaled": Bug("attend_piece", [("* alpha[:, None]", "* 1")], WRONG),
    "a slot of the workspace is written twice": Bug(
        "Output.slot", [(" + begins.to(gl.int32)", "")], WRONG
    ),
    "a part is taken for the whole": Bug("store_piece", [("if begins & ends", "if begins")], WRONG),
    "a piece too few is combined": Bug("store_piece", [("- first + 1", "- first")], WRONG),
    "a program combines before the last has counted": Bug(
        "store_piece", [("== pieces - 1", "== pieces - 2")], WRONG
    ),
    "a counter is not cleared for the next launch": Bug(
        "store_piece", [("            gl.store(counter, 0)\n", "")], WRONG
    ),
    "pieces of another head are counted, too": Bug(
        "store_piece", [(" + problem.kv_head)", ")")], WRONG
    ),
    "more pieces than are loaded together": Bug(
        "combine_pieces", [("range(0, pieces, AT_ONCE)", "range(0, 1)")], WRONG
    ),
    "the share after is begun": Bug(
        "DecodeProblem.piece", [("share.end - start", "share.end - start + 1")], WRONG
    ),
    "a share begins with its sequence": Bug(
        "DecodeProblem.piece", [("gl.maximum(share.begin - start, 0)", "0")], WRONG
    ),
    "another head's query": Bug("DecodeProblem.heads_of", [("row % self.GROUP", "row * 0")], WRONG),
}


def case_is_right():
    """Whether the results of the bugs' cases are right, one after the other with the same counters:
    a sequence in several shares, several in one, pages shorter than a block, each block in two
    boxes; and a sequence in more shares than are combined at once.
    """
    torch.manual_seed(0)
    counters = torch.zeros(HOST.MOST_COUNTERS, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HOST.counters, "take", lambda *given: counters)
        return all(
            is_right(*requests(lengths, 32, heads=(4, 2), n=n), shares=shares)
            for lengths, n, shares in (([200, 10, 130, 40], 200, 3), ([700], 700, 11))
        )


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    forward = ("fa3.hopper.forward", "fa3.hopper.panels")  # which have functions of the same names
    loaded = [module for name, module in LOADED.items() if name not in forward]
    plant(bug, loaded, monkeypatch)
    assert_found(bug, case_is_right, monkeypatch)


def test_nothing_is_found_where_no_bug_is(monkeypatch):
    assert list(outcomes(case_is_right, monkeypatch)) == ["", "", ""]
