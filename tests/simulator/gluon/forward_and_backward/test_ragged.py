"""Sequences and masks of their own lengths in the kernels for Hopper, without a GPU: packed and
padded rows, sinks and slopes, interval masks. What belongs to no sequence is NaN.
"""

import math
from itertools import pairwise

import pytest
import torch

from flash_versions import masks
from flash_versions.dispatch.autograd.compute import without_unseeing
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon.hopper import (
    BACKWARD,
    HOSTS,
    VERSIONS,
    assert_right,
    attend,
    padded,
    qkv,
)
from tests.simulator.gluon.orders import by_order, in_turn

by_version = pytest.mark.parametrize("version", VERSIONS)
# Lengths of queries and of keys; packed tensors begin with a row of no sequence, and end with one.
ALIKE = [70, 0, 1, 130], [70, 0, 1, 130]
DIFFERENT = [40, 0, 65, 9], [128, 30, 7, 0]


def packed(lengths, heads=(2, 2), head_dim=64, poisoned=None, **options):
    """A request, and what o's gradient is. A poisoned sequence is NaN throughout, and so are the
    rows of no sequence.
    """
    bounds = [torch.tensor([1, *n]).cumsum(0).int() for n in lengths]
    tensors, of_tensors = [], (bounds[0], bounds[1], bounds[1], bounds[0])
    for bound, head in zip(of_tensors, (heads[0], heads[1], heads[1], heads[0])):
        x = torch.randn(int(bound[-1]) + 1, head, head_dim, dtype=torch.bfloat16)
        own = torch.zeros(len(x), dtype=torch.bool)
        for sequence, (begin, end) in enumerate(pairwise(bound.tolist())):
            own[begin:end] = sequence != poisoned
        x[~own] = math.nan
        tensors.append(x)
    q, k, v, do = tensors
    cu_seqlens = {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}
    return make_request(q, k, v, num_splits=1, **cu_seqlens, **options), do


def computed(request, do, version="fa3"):
    """Results and gradients of the simulated kernels, by name; FA4's backward is FA3's kernel, so
    its gradients are not computed again.
    """
    found = attend(version, request)
    lse = found.pop("lse")
    if version == "fa3":
        gradients = BACKWARD.backward(request, found["o"], lse, None, do[None], None)
        found |= dict(zip(("dq", "dk", "dv"), gradients))
    return found


def rows_of(bounds, poisoned):
    """(rows of sequences that are not poisoned, rows of no sequence)."""
    starts = bounds.tolist()
    kept = [
        row
        for sequence, (begin, end) in enumerate(pairwise(starts))
        for row in range(begin, end)
        if sequence != poisoned
    ]
    return torch.tensor(kept, dtype=torch.long), torch.tensor([0, starts[-1]])


def assert_packed_right(results, request, do, poisoned=None):
    """All that is of no poisoned sequence is within the budget, as if the others were alone, and
    rows of no sequence are 0.
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
    outside = {"o": no_query, "dq": no_query}
    cut = {name: x[:, of_queries.get(name, keys)] for name, x in results.items()}
    assert_ok(assess_request(cut, alone, do[None, queries]))
    for name, x in results.items():
        assert not x[:, outside.get(name, no_key)].any(), name


PACKED = [
    (ALIKE, {}), (ALIKE, {"causal": True}), (DIFFERENT, {"window": (50, 20)}),
    (DIFFERENT, {"causal": True, "softcap": 5.0}), (([200], [200]), {"causal": True}),
]  # fmt: skip


@in_turn("lengths options", PACKED)
def test_packed_sequences(lengths, options, order):
    request, do = packed(lengths, heads=(4, 2), **options)
    for version in VERSIONS:
        assert_packed_right(computed(request, do, version), request, do)


@by_order
@by_version
def test_nan_stays_in_its_sequence(version, order):
    request, do = packed(([70, 5, 90], [70, 5, 90]), poisoned=1, causal=True)
    results = computed(request, do, version)
    assert_packed_right(results, request, do, 1)
    own = slice(*request.cu_seqlens_q[1:3].tolist())
    assert all(x[:, own].isnan().all() for x in results.values())  # and is not hidden


# ------------------------------------------------------------------------------- padded rows
ENDS, OF_BLOCKS, BEGINS = [130, 127, 0, 30, 7], [64, 65, 63, 128, 1], [0, 64, 5, 30, 3]
PADDED = [
    (OF_BLOCKS, None, {}), (ENDS, BEGINS, {}), (OF_BLOCKS, None, {"causal": True}),
    (ENDS, BEGINS, {"causal": True}), (OF_BLOCKS, None, {"window": (50, 20)}),
    (ENDS, BEGINS, {"causal": True, "softcap": 5.0}),
]  # fmt: skip


@in_turn("lengths starts options", PADDED)
def test_padded_rows(lengths, starts, options, order):
    """NaN in k and v past `kv_lengths`, and before `kv_starts`, reaches nothing; ends are those of
    blocks, too.
    """
    request, exact, do = padded(lengths, starts, q_length=50, heads=(2, 1), **options)
    for version in VERSIONS:
        assert_right(request, exact, do, version)


@by_order
def test_padded_rows_with_a_sink_and_slopes(order):
    mods = {"sink": torch.randn(4), "alibi_slopes": torch.rand(2, 4)}
    request, exact, do = padded([70, 40], [0, 3], causal=True, **mods)
    for version in VERSIONS:
        assert_right(request, exact, do, version)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_queries_in_front_of_the_first_key_may_be_nan(head_dim):
    """As in a batch that is padded on the left: they have no gradient, and change no other."""
    request, exact, do = padded([70, 40], [5, 30], head_dim=head_dim, causal=True)
    q, poisoned = request.q.clone(), do.clone()
    for b, unseeing in enumerate((5, 60)):
        q[b, :unseeing] = poisoned[b, :unseeing] = math.nan
    request, poisoned = without_unseeing(request._replace(q=q), poisoned)
    o, lse, _ = HOSTS["fa3"].forward(request)
    gradients = BACKWARD.backward(request, o, lse, None, poisoned, None)
    assert not any(x[0, :5].any() or x[1, :30].any() for x in gradients[:3])
    results = {"o": o, **dict(zip(("dq", "dk", "dv"), gradients))}
    assert_ok(assess_request(results, exact, do))


@pytest.mark.parametrize("both", [True, False])
def test_padded_caches_of_transformers(both):
    """Keys of one sequence and head lie one behind the other."""
    request, exact, do = padded([130, 20], head_dim=80, causal=True)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (request.k, request.v))
    if both:
        assert_right(request._replace(k=k, v=v), exact, do)
    else:
        other = request._replace(v=v)
        assert "one common number" in HOSTS["fa3"].left_to_portable(other)


@by_version
@pytest.mark.parametrize("head_dim", [64, 256])
def test_packed_keys_of_which_the_first_few_are_used(head_dim, version):
    """The others are NaN, and have no gradient."""
    used = {"kv_lengths": torch.tensor([40, 0, 9, 64])}  # of 70, 0, 1 and 130
    request, do = packed(ALIKE, (4, 2), head_dim, causal=True, **used)
    exact = request._replace(**{name: getattr(request, name).nan_to_num() for name in "qkv"})
    unused = [*range(41, 71), *range(72 + 64, 72 + 130)]
    k, v = exact.k.clone(), exact.v.clone()
    k[:, unused] = v[:, unused] = math.nan
    assert_right(exact._replace(k=k, v=v), exact, do[None].nan_to_num(), version)


@in_turn("kind head_dim version", [
    ("dense", 64, "fa3"), ("dense", 256, "fa4"), ("packed", 128, "fa3"), ("packed", 64, "fa4"),
    ("packed", 256, "fa3"),
])  # fmt: skip
def test_sinks_and_slopes(kind, head_dim, version, order):
    """A slope for each head, and for each head of each sequence; a sink of -inf is none."""
    options = {"sink": torch.tensor([1.5, -math.inf, -2.0, 9.0]), "causal": True}
    if kind == "dense":
        q, do = torch.randn(2, 2, 70, 4, head_dim, dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, 90, 2, head_dim, dtype=torch.bfloat16)
        request = exact = make_request(q, k, v, alibi_slopes=torch.rand(4), **options)
    else:
        slopes = torch.rand(4, 4)
        request, do = packed(DIFFERENT, (4, 2), head_dim, alibi_slopes=slopes, **options)
        exact = request._replace(**{name: getattr(request, name).nan_to_num() for name in "qkv"})
        do = do[None].nan_to_num()
    assert_right(request, exact, do, version)


# ------------------------------------------------------------------------------- intervals
LENGTHS = [70, 1, 0, 150, 64, 15]
OF_HEADS = torch.stack((masks.documents(LENGTHS)["query_ends"], torch.full((300,), 250)))
MASKS = {
    "documents, full": masks.documents(LENGTHS, causal=False),
    "a shared prompt": masks.shared_prompt(150, [70, 30, 50]),
    "a prefix": masks.prefix(130, 300),
    "chunks in a window": {**masks.documents([200, 100]), "window": (60, 0)},
    "no key is seen": {"query_ends": torch.zeros(300, dtype=torch.int32)},
    "every key is seen": {"query_ends": torch.full((300,), 300)},
    "rows of their own": {"causal": True, "query_starts": torch.randint(150, (2, 300))},
    "softcap, sink, slopes": {
        **masks.documents(LENGTHS), "softcap": 5.0, "sink": torch.randn(2),
        "alibi_slopes": torch.rand(2),
    },
}  # fmt: skip


def intervals(options, M=300, N=300, heads=(2, 1), batch=1):
    """A request, and what o's gradient is."""
    inputs = qkv(M, N, heads[0], 64, heads[1], batch)
    return make_request(*inputs, num_splits=1, **options), torch.randn_like(inputs[0])


@in_turn("mask version", [(mask, VERSIONS[i % 2]) for i, mask in enumerate(MASKS)])
def test_interval_masks(mask, version, order):
    request, do = intervals(MASKS[mask], batch=2 if mask == "rows of their own" else 1)
    assert_right(request, request, do, version)


@by_order
@by_version
def test_intervals_of_heads_in_every_order(version, order):
    options = {"causal": True, "query_ends": OF_HEADS.expand(2, 2, 300)}
    request, do = intervals(options, heads=(2, 2), batch=2)
    assert_right(request, request, do, version)


@pytest.mark.parametrize("edge", [63, 64, 65, 127, 128])
def test_intervals_that_end_and_start_beside_a_block(edge):
    """A block of queries that ends with the last query that sees the first 128 keys, or one before
    or behind; all of these alike, so that no other key of their blocks needs the mask. Each query
    sees the others.
    """
    of_first = torch.arange(256) < 128
    for options in ({"query_ends": torch.where(of_first, edge, 192)},
                    {"query_starts": torch.where(of_first, edge, 0)}):  # fmt: skip
        request, do = intervals(options, 192, 256, heads=(1, 1))
        for version in VERSIONS:
            assert_right(request, request, do, version)


@in_turn("M N version", [(100, 300, "fa3"), (300, 70, "fa4"), (1, 200, "fa3")])
def test_other_lengths_of_intervals(M, N, version, order):
    """More keys than queries and fewer: causal and windows count from the last ones."""
    starts, ends = torch.randint(M, (N,)), torch.randint(M + 1, (N,))
    options = {"query_starts": starts, "query_ends": ends, "window": (90, 10)}
    request, do = intervals(options, M, N)
    assert_right(request, request, do, version)


def test_a_plan_is_one_of_a_window_and_of_lengths():
    """Of calls with the same tensors, one after the other; the plan is made once for each."""
    planned = masks.plan_mask({"query_ends": torch.tensor([40] * 30 + [100] * 70)})
    ways = [{}, {"causal": True}, {"window": (20, None)}, {"window": (30, None)}, {"causal": True}]
    for queries, options in [*((100, way) for way in ways), (80, {"causal": True})]:
        request, do = intervals({**planned, **options}, queries, 100, heads=(1, 1))
        assert_right(request, request, do)


def test_tiles_are_planned_anew_for_each_call():
    """Of packed sequences with the same tensors, with a mask and without."""
    request, do = packed(([130, 70], [130, 70]), heads=(1, 1))
    for window in ((None, None), (None, 0), (None, None)):
        masked = request._replace(window_left=window[0], window_right=window[1])
        assert_packed_right(computed(masked, do), masked, do)
