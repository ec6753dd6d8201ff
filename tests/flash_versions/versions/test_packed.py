"""Sequences that are not rows of a rectangle: packed, left-padded, in pages."""

import random

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.request import make_request
from flash_versions.versions.tiles.varlen_scheduler import Tiling, lay_out
from tests.flash_versions.versions.test_attention import by_backward, by_dtype, check
from tests.helpers.kernels.budget import assert_gradients_right, assert_within_budget

# FA3 and FA4 leave packed sequences to FA2's kernels, but on a GPU.
by_version = pytest.mark.parametrize(
    "version", ["fa2", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("fa3", "fa4"))]
)

# The lengths of queries and keys, sequence by sequence; None: the same.
PACKED = {
    "ragged": ([30, 1, 70], None),
    "an empty sequence first, between, last": ([0, 20, 0, 0, 40, 0], None),
    "no sequence": ([], None),
    "only empty sequences": ([0, 0], None),
    "more keys than queries, and less": ([10, 1, 100], [40, 100, 33]),
    "queries without keys, keys without queries": ([20, 0, 30], [0, 25, 30]),
    "ends on a block": ([64, 64, 128], None),
    "more queries than a tile has rows": ([30, 0, 150, 77], [50, 0, 60, 110]),
}
OPTIONS = {
    "full": {},
    "window": {"causal": True, "window": (20, None)},
    "scores": {"causal": True, "softcap": 2.0, "dropout_p": 0.2},
}


def bounds(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def packed_inputs(lengths_q, lengths_k, device, heads=4, kv_heads=2, head_dim=32):
    q = torch.randn(sum(lengths_q), heads, head_dim, device=device)
    k, v = torch.randn(2, sum(lengths_k), kv_heads, head_dim, device=device)
    return q, k, v + 0.5


def check_packed(version, lengths_q, lengths_k, options, device):
    given = {"cu_seqlens_q": bounds(lengths_q, device)}
    if lengths_k:
        given["cu_seqlens_k"] = bounds(lengths_k, device)
    q, k, v = packed_inputs(lengths_q, lengths_k or lengths_q, device)
    check(version, q, k, v, **given, **options)


@pytest.mark.parametrize("lengths", PACKED)
@by_version
def test_packed(version, lengths, device):
    check_packed(version, *PACKED[lengths], {"causal": True}, device)


def test_rows_of_no_sequence_at_all(device):
    q, k, v = packed_inputs([3], [3], device)
    o, lse = attention(q, k, v, cu_seqlens_q=bounds([], device), return_lse=True)
    assert (o == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("options", OPTIONS)
@by_version
def test_packed_options(version, options, device):
    check_packed(version, [140, 0, 60], [10, 9, 90], OPTIONS[options], device)


@by_dtype
@by_version
def test_packed_dtypes_with_a_sink_and_slopes(version, dtype, device):
    q, k, v = (x.to(dtype) for x in packed_inputs([40, 3], [30, 60], device))
    check(
        version, q, k, v, causal=True,
        cu_seqlens_q=bounds([40, 3], device),
        cu_seqlens_k=bounds([30, 60], device),
        alibi_slopes=torch.rand(2, 4, device=device),
        sink=torch.randn(4, device=device, requires_grad=True),
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [1, 2])
@by_version
def test_rows_of_no_sequence_see_no_key(version, num_splits, device):
    """As in a batch of a fixed size that is not full: they are 0, and so are their gradients."""
    q, k, v = packed_inputs([30, 50], [30, 120], device)
    given = {
        "cu_seqlens_q": bounds([10, 0, 20], device) + 5,
        "cu_seqlens_k": bounds([10, 3, 90], device),
        "sink": torch.randn(4, device=device, requires_grad=True),
    }
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves, version=version, num_splits=num_splits, return_lse=True, **given)
    outside = [*range(5), *range(35, 80)]
    assert not o[outside].any() and (lse[:, outside] == -torch.inf).all()
    upstream = torch.randn_like(o), torch.randn_like(lse)
    gradients = torch.autograd.grad((o, lse), [*leaves, given["sink"]], upstream)
    assert not gradients[0][outside].any()
    assert not gradients[1][103:].any() and not gradients[2][103:].any()
    assert_gradients_right(make_request(*leaves, **given), gradients, *upstream)


@by_version
def test_packed_keys_of_which_the_first_few_are_used(version, device):
    """None, some, all, and more than there are. The others may be NaN; their gradients are 0."""
    lengths_q = [140, 0, 70, 50]
    q, k, v = packed_inputs(lengths_q, [60, 9, 50, 64], device, heads=2, kv_heads=1)
    given = {
        "cu_seqlens_q": bounds(lengths_q, device),
        "cu_seqlens_k": bounds([60, 9, 50, 64], device),
        "kv_lengths": torch.tensor([33, 9, 0, 99], device=device),
        "causal": True,
    }
    check(version, q, k, v, **given)
    clean = with_gradients(version, q, k, v, given)
    unused = [*range(33, 60), *range(69, 119)]
    k[unused] = v[unused] = torch.nan
    poisoned = with_gradients(version, q, k, v, given)
    assert all(torch.equal(x, y) for x, y in zip(clean, poisoned))
    assert not poisoned[2][unused].any() and not poisoned[3][unused].any()


def with_gradients(version, q, k, v, options, do=None):
    """(o, dq, dk, dv) of a call."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, version=version, deterministic=True, **options)
    return o, *torch.autograd.grad(o, leaves, torch.ones_like(o) if do is None else do)


@pytest.mark.parametrize(("M", "num_splits"), [(1, None), (20, None), (20, 3)])
def test_left_padding(M, num_splits, device):
    q = torch.randn(3, M, 4, 32, device=device)
    k, v = torch.randn(2, 3, 200, 2, 32, device=device)
    given = {
        "kv_starts": torch.tensor([0, 150, 60], device=device),
        "kv_lengths": torch.tensor([200, 170, 60], device=device),
        "causal": True,
        "alibi_slopes": torch.rand(4, device=device),
    }
    o, lse = attention(q, k, v, num_splits=num_splits, return_lse=True, version="fa2", **given)
    assert_within_budget(o, lse, q, k, v, **given)
    assert not o[2].any()


@by_backward
def test_padding_on_the_left_may_be_nan(version, device):
    """It changes no bit of a result, and its own gradients are 0."""
    starts = [3, 66, 70]
    q, k, v, do = torch.randn(4, 3, 70, 2, 32, device=device)
    options = {"causal": True, "kv_starts": torch.tensor(starts, device=device)}
    clean = with_gradients(version, q, k, v, options, do)
    for b, start in enumerate(starts):
        for x in (q, k, v, do):
            x[b, :start] = torch.nan
    poisoned = with_gradients(version, q, k, v, options, do)
    assert all(torch.equal(x, y) for x, y in zip(clean, poisoned))
    assert not any(x[b, :start].any() for x in poisoned for b, start in enumerate(starts))
    assert all(x[b, start:].any() for x in poisoned for b, start in enumerate(starts) if start < 70)


def in_pages(x, page_size, lengths=None):
    """(batch, N, ...) as shuffled pages, some of them of nobody, and the table that finds them.
    What belongs to no sequence is NaN; entries behind the last page of a sequence are -1.
    """
    batch, N = x.shape[:2]
    per_row = -(-N // page_size)
    pages = x.new_full((batch * per_row + 3, page_size, *x.shape[2:]), float("nan"))
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(page_size))
    table = order[: batch * per_row].view(batch, per_row).int().to(x.device)
    for b, length in enumerate([N] * batch if lengths is None else lengths):
        for i in range(-(-length // page_size)):
            part = x[b, i * page_size : min((i + 1) * page_size, length)]
            pages[table[b, i], : len(part)] = part
        table[b, -(-length // page_size) :] = -1
    return pages, table


@pytest.mark.parametrize(("page_size", "num_splits"), [(1, 1), (16, 3), (50, 1), (50, 3), (256, 1)])
@pytest.mark.parametrize("M", [1, 20])
def test_pages_are_the_dense_cache(M, page_size, num_splits, device):
    q = torch.randn(3, M, 4, 32, device=device)
    kv = torch.randn(3, 150, 2, 64, device=device)
    pages, table = in_pages(kv, page_size, lengths := [150, 33, 0])
    options = {"kv_lengths": torch.tensor(lengths, device=device), "num_splits": num_splits}
    options |= {"causal": True, "version": "fa2"}
    k, v = pages.split(32, -1)
    o = attention(q, k, v, block_table=table, **options)
    dense_k, dense_v = kv.split(32, -1)
    if num_splits == 1 or page_size == 50:  # the same number of blocks to share out
        assert torch.equal(o, attention(q, dense_k, dense_v, **options))
    del options["version"], options["num_splits"]
    assert_within_budget(o, None, q, dense_k, dense_v, **options)


@pytest.mark.parametrize("paged", [False, True])
def test_packed_queries_on_a_cache(paged, device):
    """A chunk of new tokens for each row of a cache that is filled to another length."""
    q, _, _ = packed_inputs([5, 1, 9], [1], device)
    kv, lengths = torch.randn(3, 80, 2, 64, device=device), [80, 17, 40]
    options = {"cu_seqlens_q": bounds([5, 1, 9], device), "causal": True}
    dense = {"kv_lengths": torch.tensor(lengths, device=device)} | options
    k, v = kv.split(32, -1)
    if not paged:
        check("fa2", q, k, v, **dense)
        return
    pages, table = in_pages(kv, 16)
    options |= {"block_table": table, "cu_seqlens_k": bounds(lengths, device)}
    o = attention(q, *pages.split(32, -1), version="fa2", **options)
    assert_within_budget(o, None, q, k, v, **dense)


def planned(lengths_q, lengths_k, device, block, group, causal, of_keys, first):
    """(lines of a plan up to the last tile, lines behind it), and what each tile weighs."""
    bounds_q, bounds_k = bounds(lengths_q, device) + first, bounds(lengths_k, device)
    q = torch.zeros(sum(lengths_q) + 2 * first, 2 * group, 16, device=device)
    k = torch.zeros(sum(lengths_k), 2, 16, device=device)
    given = {"cu_seqlens_q": bounds_q, "cu_seqlens_k": bounds_k, "causal": causal}
    (tiles,) = lay_out(make_request(q, k, k, **given), Tiling(block, group, of_keys))
    weights = {}
    for sequence, (queries, keys) in enumerate(zip(lengths_q, lengths_k)):
        own, other = (keys, queries) if of_keys else (queries * group, keys * group)
        for tile in range(-(-own // block)):
            if causal and of_keys:
                weight = other - max(0, tile * block - (own - other))
            else:
                weight = other - own + min((tile + 1) * block, own) if causal else other
            weights[sequence, tile] = weight
    number, lines = int(tiles.plan[0, 0]), tiles.plan[1:].tolist()
    starts = bounds_q.tolist(), lengths_q, bounds_k.tolist(), lengths_k
    assert all(line[2:6] == [x[line[0]] for x in starts] for line in lines[:number])
    return lines[:number], lines[number:], weights


@pytest.mark.parametrize(
    ("seed", "causal", "of_keys"),
    [(0, True, False), (1, False, True), (2, True, True), (3, True, False), (4, False, False),
     (5, True, True), (5, False, False)],
)  # fmt: skip
def test_a_plan_has_every_tile_once_the_heaviest_first(seed, causal, of_keys, device):
    rng = random.Random(seed)
    count = (1, 2, 7, 7, 7, 150)[seed]
    draw = [[rng.choice((0, 1, 64, 65, rng.randrange(300))) for _ in range(count)] for _ in "qk"]
    lengths_q, lengths_k = ([1, *x] for x in (draw if seed % 2 else draw[:1] * 2))
    group = 1 if of_keys else 1 + seed % 3
    given = (64, group, causal, of_keys, 3 * (seed % 2))
    lines, rest, weights = planned(lengths_q, lengths_k, device, *given)
    found = [(line[0], line[1]) for line in lines]
    assert sorted(found) == sorted(weights)
    assert [weights[tile] for tile in found] == sorted(weights.values(), reverse=True)
    assert all(line[0] == -1 for line in rest)
