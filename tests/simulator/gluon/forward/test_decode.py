"""The decoding kernel for Hopper, without a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.request import make_request
from flash_versions.simulator.checking import Watch
from flash_versions.versions.fa3.hopper.decode import host as HOST
from flash_versions.versions.oracle.budget import assess_request
from tests.flash_versions.versions.test_packed import in_pages
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon.hopper import poisoned, qkv
from tests.simulator.gluon.orders import by_order, in_turn

CONFIG = HOST.DecodeConfig(slots=3)  # an odd number: K and V take turns in a slot


def requests(
    lengths, page_size=None, starts=None, queries=1, heads=(4, 2), dims=(64, 64), transposed=False,
    dtype=torch.bfloat16, n=200, **options
):  # fmt: skip
    """A request with NaN wherever no sequence has a key, and the same in rows without NaN."""
    inputs = qkv(queries, n, heads[0], dims[0], heads[1], len(lengths), dtype, dims[1])
    request, exact = poisoned(*inputs, lengths, starts, **{"causal": True} | options)
    if page_size is not None:
        (k, table), (v, _) = (in_pages(x, page_size, lengths) for x in (request.k, request.v))
        request = request._replace(k=k, v=v, block_table=table)
    if transposed:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (request.k, request.v))
        request = request._replace(k=k, v=v)
    return request, exact


def check(request, exact, config=CONFIG, shares=3):
    """Results are within the budget, and no access is out of order."""
    assert HOST.left_to_gathering(request) is None
    with Watch({}).watching():
        o, lse, _ = HOST.forward(request, config, shares)
    assert_ok(assess_request({"o": o, "lse": lse}, exact))


LENGTHS = [
    ([0, 1, 65, 200, 0], 1, None), ([0, 1, 65, 200, 0], 3, 16), ([0, 1, 65, 200, 0], 7, 64),
    ([3, 5, 200, 2, 1], 3, None), ([3, 5, 200, 2, 1], 7, 16), ([200] * 5, 7, None),
    ([0] * 5, 3, 64), ([64, 128, 192, 64, 128], 3, None), ([64, 128, 192, 64, 128], 7, 16),
]  # fmt: skip


@in_turn("lengths shares page_size", LENGTHS)
def test_lengths(lengths, shares, page_size, order):
    """Nothing, one, one past a block; one long among short; whole blocks."""
    check(*requests(lengths, page_size), shares=shares)


@by_order
def test_every_order(order, monkeypatch):
    """One launch after the other with the same counters: a sequence in several shares, several in
    one, pages shorter than a block; and a sequence in more shares than are combined at once.
    """
    counters = torch.zeros(HOST.MOST_COUNTERS, dtype=torch.int32)
    monkeypatch.setattr(HOST.counters, "take", lambda *given: counters)
    check(*requests([200, 10, 130, 40], 32, heads=(4, 2)), shares=3)
    check(*requests([700], 32, heads=(4, 2), n=700), shares=11)


@pytest.mark.parametrize(
    ("heads", "queries", "page_size"),
    [((2, 2), 1, 32), ((4, 1), 4, None), ((6, 2), 1, 32), ((64, 1), 1, None), ((1, 1), 64, 32)],
)
def test_groups_and_queries(heads, queries, page_size):
    check(*requests([70, 150, 2], page_size, heads=heads, queries=queries))


DIMS = [
    ((96, 96), None, 64), ((128, 128), 16, 128), ((192, 128), 128, 64), ((256, 256), 16, 64),
    ((64, 128), None, 128),
]  # fmt: skip


@in_turn("dims page_size block_kv", DIMS)
def test_head_dims(dims, page_size, block_kv, order):
    check(*requests([130, 1, 200], page_size, dims=dims), replace(CONFIG, block_kv=block_kv))


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


@in_turn("name", OPTIONS)
def test_options(name, order):
    """In pages, and in rows that begin somewhere. Rounded up to whole pages, a cache has more keys
    than rows that are too short.
    """
    lengths, starts = [200, 141, 2, 0, 200], [3, 140, 0, 0, 199]
    if name != "too long":
        check(*requests(lengths, 64, queries=2, **OPTIONS[name]), shares=5)
    check(*requests(lengths, starts=starts, queries=2, **OPTIONS[name]), shares=1)


@pytest.mark.parametrize("page_size", [None, 64])
def test_keys_of_a_head_behind_each_other(page_size):
    """As in a cache of transformers, and as pages lie in some engines."""
    check(*requests([150, 1, 17, 128], page_size, transposed=True))


def test_all_of_one_length():
    """Without lengths, in rows and in pages; cu_seqlens_k gives lengths of keys in pages."""
    q = torch.randn(3, 1, 4, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 3, 192, 2, 64, dtype=torch.bfloat16)
    exact = make_request(q, k, v, causal=True)
    check(exact, exact)
    (k, table), (v, _) = (in_pages(x, 64, [192] * 3) for x in (k, v))
    check(make_request(q, k, v, causal=True, block_table=table), exact)


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
    assert_ok(assess_request({"o": o[others], "lse": lse[others]}, alone))


def test_more_sequences_than_are_scanned_at_once():
    lengths = [int(x) for x in torch.randint(0, 20, (70,))]
    check(*requests(lengths, heads=(1, 1), n=20), shares=9)


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


def test_what_does_not_fit():
    """Pages of 192 keys are whole blocks of 64 keys, not of 128; values at another distance."""
    request, _ = requests([150, 1], 192)
    with pytest.raises(ValueError, match="pages of 192 keys.*blocks of 128"):
        HOST.forward(request, HOST.DecodeConfig(block_kv=128, programs=1))
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
    assert HOST.serves(requests([70, 80], **options)[0]) == expected


def test_more_counters_than_are_kept(monkeypatch):
    monkeypatch.setattr(HOST.counters, "numbers", 2)
    check(*requests([200, 10, 130, 40]), shares=3)
