"""Ragged sequences, sinks and slopes in the kernels for Hopper, without a GPU."""

import math
from itertools import pairwise

import pytest
import torch

from flash_versions.dispatch.autograd.compute import without_unseeing
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.rotation import in_turn
from tests.helpers.rotation import pairwise as pairs_of

FA3 = gluon_emulator.load("flash_versions.versions.fa4.hopper.backward")
FA4 = gluon_emulator.load("flash_versions.versions.fa4.hopper.host")
FORWARD = {"fa3": FA3["fa3.hopper.host"], "fa4": FA4["fa4.hopper.host"]}
BACKWARD = FA3["fa3.hopper.backward.kernel"]
# Lengths of queries and of keys; packed tensors begin with a row of no sequence, and end with one.
LENGTHS = {
    "alike": ([70, 0, 1, 130], [70, 0, 1, 130]),
    "different": ([40, 0, 65, 9], [128, 30, 7, 0]),
    "one": ([200], [200]),
}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (50, 20)},
    "softcap": {"causal": True, "softcap": 5.0},
}


def poisoned_memory(*shape, empty=torch.empty, **options):
    x = empty(*shape, **options)
    return x.fill_(math.nan) if x.is_floating_point() else x


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles, and memory that holds
    NaN until it is written.
    """
    monkeypatch.setattr(torch, "empty", poisoned_memory)
    for loaded in (FA3, FA4):
        monkeypatch.setattr(loaded["tiles.wgmma"], "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


def packed(lengths, heads=(2, 2), head_dim=64, poisoned=None, dtype=torch.bfloat16, **options):
    """A request, and what o's gradient is. A poisoned sequence is NaN throughout, and so are the
    rows of no sequence.
    """
    tensors = []
    bounds = [torch.tensor([1, *n]).cumsum(0).int() for n in lengths]
    for bound, head in ((bounds[0], heads[0]), (bounds[1], heads[1]), (bounds[1], heads[1])):
        tensors.append(torch.randn(int(bound[-1]) + 1, head, head_dim).to(dtype))
    tensors.append(torch.randn_like(tensors[0]))
    for x, bound in zip(tensors, (bounds[0], bounds[1], bounds[1], bounds[0])):
        own = torch.zeros(len(x), dtype=torch.bool)
        for sequence, (begin, end) in enumerate(pairwise(bound.tolist())):
            own[begin:end] = sequence != poisoned
        x[~own] = math.nan
    q, k, v, do = tensors
    cu_seqlens = {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
    request = make_request(q, k, v, num_splits=1, **cu_seqlens, **options)
    assert FORWARD["fa3"].left_to_portable(request) is None
    assert BACKWARD.left_to_portable(request) is None
    return request, do


def computed(request, do, version="fa3"):
    """Results and gradients of the emulated kernels, by name; FA4's backward is FA3's kernel, so
    its gradients are not computed again.
    """
    o, lse, _ = FORWARD[version].forward(request)
    if version == "fa4":
        return {"o": o}
    dq, dk, dv, _ = BACKWARD.backward(request, o, lse, None, do[None], None)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv}


def rows_of(bounds, poisoned):
    """(rows of sequences that are not poisoned, rows of no sequence)."""
    starts, none = bounds.tolist(), [0, int(bounds[-1])]
    kept = [
        row
        for sequence, (begin, end) in enumerate(pairwise(starts))
        for row in range(begin, end)
        if sequence != poisoned
    ]
    return torch.tensor(kept, dtype=torch.long), torch.tensor(none)


def within_budget(results, request, do, poisoned=None):
    """Whether all that is of no poisoned sequence is within the budget, as if the others were
    alone, and rows of no sequence are 0.
    """
    queries, no_query = rows_of(request.cu_seqlens_q, poisoned)
    keys, no_key = rows_of(request.cu_seqlens_k, poisoned)
    lengths = [bounds.diff().tolist() for bounds in (request.cu_seqlens_q, request.cu_seqlens_k)]
    cu_seqlens = [
        torch.tensor([0, *(n for i, n in enumerate(x) if i != poisoned)]).cumsum(0).int()
        for x in lengths
    ]
    alone = request._replace(
        q=request.q[:, queries], k=request.k[:, keys], v=request.v[:, keys],
        cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1],
    )  # fmt: skip
    of_queries = {"o": queries, "dq": queries}
    cut = {name: x[:, of_queries.get(name, keys)] for name, x in results.items()}
    outside = {"o": no_query, "dq": no_query}
    empty = [x[:, outside.get(name, no_key)] for name, x in results.items()]
    accuracies = assess_request(cut, alone, do[None, queries])
    return all(x.ok for x in accuracies.values()) and not any(x.any() for x in empty)


# `make test` takes the one order that has something of the others.
IN_TURN = [pytest.param(x, marks=[] if x == "any order" else pytest.mark.slow) for x in ORDERS]


@pytest.mark.parametrize(
    ("lengths", "options", "version", "order"), in_turn(LENGTHS, OPTIONS, FORWARD)
)
def test_every_mask(lengths, options, version, order, monkeypatch):
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    request, do = packed(LENGTHS[lengths], heads=(4, 2), **OPTIONS[options])
    assert within_budget(computed(request, do, version), request, do)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [80, 128, 192, 256])
def test_head_dims(head_dim, causal):
    """Up to 128, and the wider kernel of the backward."""
    request, do = packed(LENGTHS["alike"], heads=(2, 1), head_dim=head_dim, causal=causal)
    for version in FORWARD:
        assert within_budget(computed(request, do, version), request, do)


def padded(lengths, starts, q_length=70, head_dim=64, heads=(4, 2), transposed=False, **options):
    """A request of rows whose keys begin and end where they like, NaN before and behind them, the
    same without NaN, and what o's gradient is.
    """
    batch, kv_length = len(lengths), max(lengths) + 9
    q, do = torch.randn(2, batch, q_length, heads[0], head_dim, dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, kv_length, heads[1], head_dim, dtype=torch.bfloat16)
    options |= {"kv_lengths": torch.tensor(lengths)}
    if starts:
        options |= {"kv_starts": torch.tensor(starts)}
    exact = make_request(q, k, v, num_splits=1, **options)
    if transposed:  # as a cache of transformers lies
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    else:
        k, v = k.clone(), v.clone()
    for b, (begin, end) in enumerate(zip(starts or [0] * batch, lengths)):
        for x in (k, v):
            x[b, :begin], x[b, max(begin, end) :] = math.nan, math.nan
    return make_request(q, k, v, num_splits=1, **options), exact, do


def assert_right(request, exact, do, version):
    """Results and gradients of the emulated kernels are within the budget of the exact ones; of
    FA4, whose backward is FA3's kernel, the results.
    """
    assert FORWARD["fa3"].left_to_portable(request) is None
    assert BACKWARD.left_to_portable(request) is None
    o, lse, _ = FORWARD[version].forward(request)
    if version == "fa4":
        assert all(x.ok for x in assess_request({"o": o, "lse": lse}, exact).values())
        return
    dlse = torch.randn_like(lse)
    dq, dk, dv, dsink = BACKWARD.backward(request, o, lse, None, do, dlse)
    results = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if request.sink is not None:
        results["dsink"] = dsink
    accuracies = assess_request(results, exact, do, dlse)
    assert all(x.ok for x in accuracies.values()), accuracies


STARTS = {"ends": None, "starts and ends": [0, 64, 5, 30, 3]}


@pytest.mark.parametrize(("name", "starts", "version"), pairs_of(OPTIONS, STARTS, FORWARD))
def test_padded_rows(name, starts, version):
    request, exact, do = padded([130, 128, 0, 30, 7], STARTS[starts], **OPTIONS[name])
    assert_right(request, exact, do, version)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_queries_in_front_of_the_first_key_may_be_nan(head_dim):
    """As in a batch that is padded on the left: they have no gradient, and change no other."""
    request, exact, do = padded([70, 40], [5, 30], head_dim=head_dim, causal=True)
    q, poisoned = request.q.clone(), do.clone()
    for b, unseeing in enumerate((5, 60)):
        q[b, :unseeing] = poisoned[b, :unseeing] = math.nan
    request, poisoned = without_unseeing(request._replace(q=q), poisoned)
    o, lse, _ = FORWARD["fa3"].forward(request)
    gradients = BACKWARD.backward(request, o, lse, None, poisoned, None)
    assert not any(x[0, :5].any() or x[1, :30].any() for x in gradients[:3])
    results = {"o": o, **dict(zip(("dq", "dk", "dv"), gradients))}
    assert all(x.ok for x in assess_request(results, exact, do).values())


@pytest.mark.parametrize("head_dim", [80, 256])
def test_padded_caches_of_transformers(head_dim):
    """Keys of one sequence and head lie one behind the other."""
    request, exact, do = padded([130, 20], None, head_dim=head_dim, transposed=True, causal=True)
    assert_right(request, exact, do, "fa3")


def test_rows_at_no_common_distance_are_left_to_the_portable_kernel():
    request, _, _ = padded([130, 20], None)
    other = request._replace(v=request.v.transpose(1, 2).contiguous().transpose(1, 2))
    assert "one common number" in FORWARD["fa3"].left_to_portable(other)


@pytest.mark.parametrize("version", FORWARD)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_packed_keys_of_which_the_first_few_are_used(head_dim, version):
    """The others are NaN, and have no gradient."""
    used = {"kv_lengths": torch.tensor([40, 0, 9, 64])}  # of 70, 0, 1 and 130
    request, do = packed(LENGTHS["alike"], (4, 2), head_dim, causal=True, **used)
    exact = request._replace(**{name: getattr(request, name).nan_to_num() for name in "qkv"})
    unused = [*range(41, 71), *range(72 + 64, 72 + 130)]
    k, v = exact.k.clone(), exact.v.clone()
    k[:, unused] = v[:, unused] = math.nan
    assert_right(request._replace(k=k, v=v), exact, do[None].nan_to_num(), version)


@pytest.mark.parametrize("version", FORWARD)
def test_packed_queries_on_a_cache(version):
    """A chunk of new tokens for each row, which is filled to another length."""
    request, exact, _ = padded([130, 0, 99], None, causal=True)
    lengths = [70, 3, 65]
    q, do = torch.randn(2, 1, sum(lengths), 4, 64, dtype=torch.bfloat16)
    chunks = {"q": q, "cu_seqlens_q": torch.tensor([0, *lengths]).cumsum(0).int()}
    assert_right(request._replace(**chunks), exact._replace(**chunks), do, version)


@pytest.mark.parametrize(
    ("kind", "head_dim", "version"),
    pairs_of(["dense", "padded", "packed"], [64, 128, 256], FORWARD),
)
def test_sinks_and_slopes(kind, head_dim, version):
    """A slope for each head, and for each head of each sequence; a sink of -inf is none."""
    options = {
        "sink": torch.tensor([1.5, -math.inf, -2.0, 9.0]),
        "alibi_slopes": torch.rand(4),
        "causal": True,
    }
    if kind == "dense":
        q, do = torch.randn(2, 2, 70, 4, head_dim, dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, 90, 2, head_dim, dtype=torch.bfloat16)
        request = exact = make_request(q, k, v, num_splits=1, **options)
    elif kind == "padded":
        options["alibi_slopes"] = torch.rand(3, 4)
        request, exact, do = padded([100, 0, 30], [5, 0, 30], head_dim=head_dim, **options)
    else:
        options["alibi_slopes"] = torch.rand(4, 4)
        request, do = packed(LENGTHS["different"], heads=(4, 2), head_dim=head_dim, **options)
        clean = (x.nan_to_num() for x in (request.q, request.k, request.v))
        exact = request._replace(**dict(zip("qkv", clean)))
        do = do[None].nan_to_num()
    assert_right(request, exact, do, version)


@pytest.mark.parametrize("version", FORWARD)
@pytest.mark.parametrize("poisoned", [0, 2, 3])
def test_nan_stays_in_its_sequence(poisoned, version):
    request, do = packed(LENGTHS["alike"], poisoned=poisoned, causal=True)
    results = computed(request, do, version)
    assert within_budget(results, request, do, poisoned)
    own = slice(*request.cu_seqlens_q[poisoned : poisoned + 2].tolist())
    assert all(x[:, own].isnan().all() for x in results.values())  # and is not hidden


BUGS = {
    "a box ends a row too late": Bug(
        "box_in_sequence",
        [("first + length, head, FAR - length", "first + length + 1, head, FAR - length - 1")],
        WRONG,
    ),
    "a tile of another sequence's keys": Bug(
        "planned_tile", [("gl.load(line + 4)", "gl.load(line + 4) + 1")], WRONG
    ),
    "a tile of another sequence's queries": Bug(
        "planned_tile", [("gl.load(line + 2)", "gl.load(line + 2) + 1")], WRONG
    ),
    "two sequences share a row of dQ": Bug(
        "KeyProblem.of_tile", [("q_first + sequence * self.BLOCK_Q", "q_first")], WRONG
    ),
    "the last tiles are skipped": Bug(
        "planned_tiles", [("gl.load(plan)", "gl.load(plan) - 2")], WRONG
    ),
    "LSE of another sequence": Bug("QueryProblem.store_lse", [("+ self.q_first", "")], WRONG),
    "the last block of keys is skipped": Bug(
        "QueryProblem.of_tile",
        [("q_length, kv_length,", "q_length, kv_length // 64 * 64,")],
        WRONG,
    ),
}


BUGS_OF_PADDED_ROWS = {
    "keys of another row": Bug(
        "QueryProblem.locate", [("sequence * self.kv_apart", "sequence * 0")], WRONG
    ),
    "gradients for the keys of another row": Bug(
        "KeyProblem.of_tile", [("sequence * self.kv_apart", "sequence * 0")], WRONG
    ),
    "each of four threads counts a whole sink": Bug("RowSums.spread", [("x * 0.25", "x")], WRONG),
    "one sink for all heads": Bug("HeadMods.of_head", [("self.sinks + head", "self.sinks")], WRONG),
    "one slope for all heads": Bug(
        "HeadMods.of_head", [("head * self.head_stride", "head * 0")], WRONG
    ),
    "the slopes of another row": Bug("HeadMods.of_head", [("* self.batch_stride", "* 0")], WRONG),
    "a query is taken to be where the first key is": Bug(
        "KeyProblem.biased", [("query + self.kv_length - self.q_length", "query")], WRONG
    ),
}


def padded_right():
    """Whether padded rows with a sink and slopes are computed rightly."""
    torch.manual_seed(0)
    mods = {"sink": torch.randn(4), "alibi_slopes": torch.rand(2, 4)}
    request, exact, do = padded([70, 40], [0, 3], causal=True, **mods)
    o, lse, _ = FORWARD["fa3"].forward(request)
    gradients = BACKWARD.backward(request, o, lse, None, do, None)
    results = {"o": o, **dict(zip(("dq", "dk", "dv", "dsink"), gradients))}
    return all(x.ok for x in assess_request(results, exact, do).values())


def right():
    """Whether sequences with one of NaN between them are computed rightly."""
    torch.manual_seed(0)
    request, do = packed(([70, 5, 90], [70, 5, 90]), poisoned=1, causal=True)
    return within_budget(computed(request, do), request, do, 1)


PLANTED = {name: (bug, right) for name, bug in BUGS.items()}
PLANTED |= {name: (bug, padded_right) for name, bug in BUGS_OF_PADDED_ROWS.items()}


@pytest.mark.parametrize("bug, is_right", PLANTED.values(), ids=PLANTED)
def test_planted_bugs_are_found(bug, is_right, monkeypatch):
    plant(bug, FA3.values(), monkeypatch)
    assert_found(bug, is_right, monkeypatch)


@pytest.mark.parametrize("is_right", [right, padded_right])
def test_nothing_is_found_where_no_bug_is(is_right, monkeypatch):
    assert list(outcomes(is_right, monkeypatch)) == ["", "", ""]
