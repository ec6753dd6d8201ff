"""Masks that are intervals, against masks that are written out and against packed sequences."""

import copy

import pytest
import torch

from flash_versions import attention, attention_reference, masks
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from flash_versions.versions.tiles.intervals import Intervals
from tests.flash_versions.versions.test_attention import check
from tests.flash_versions.versions.test_packed import bounds, by_version
from tests.helpers.kernels.budget import assert_within_budget
from tests.helpers.rotation import rotated


def inputs(n, heads=2, kv_heads=2, head_dim=32, dtype=torch.float64, device="cpu"):
    q = torch.randn(1, n, heads, head_dim, dtype=dtype, device=device)
    k, v = torch.randn(2, 1, n, kv_heads, head_dim, dtype=dtype, device=device)
    return q, k, v


def seen(n, options, queries=None):
    """Which keys each query sees, through the reference: o with one-hot values is p."""
    q = torch.zeros(1, n if queries is None else queries, 1, 4, dtype=torch.float64)
    k = torch.zeros(1, n, 1, 4, dtype=torch.float64)
    o, _ = attention_reference(q, k, torch.eye(n, dtype=torch.float64)[None, :, None], **options)
    return o[0, :, 0] > 0


def test_documents_see_themselves():
    lengths = [3, 1, 0, 4]
    document = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])
    same = document[:, None] == document
    assert torch.equal(seen(8, masks.documents(lengths)), same.tril())
    assert torch.equal(seen(8, masks.documents(torch.tensor(lengths), causal=False)), same)


def test_answers_see_the_prompt_and_themselves():
    found = seen(9, masks.shared_prompt(3, [2, 4]))
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    expected = ((owner == 0) | (owner[:, None] == owner)).tril()
    assert torch.equal(found, expected)


def test_a_tree_sees_its_ancestors():
    parents = [-1, 0, 1, 1, 0, 4, -1, 6]
    expected = torch.zeros(8, 8, dtype=torch.bool)
    for i in range(8):
        j = i
        while j >= 0:
            expected[i, j] = True
            j = parents[j]
    assert torch.equal(seen(8, masks.tree(parents)), expected)
    assert masks.tree([])["query_ends"].shape == (0,)


def test_a_prefix_sees_itself():
    i, j = torch.arange(6)[:, None], torch.arange(6)
    for length in (0, 4, 6):
        assert torch.equal(seen(6, masks.prefix(length, 6)), (j < length) | (j <= i))


@pytest.mark.parametrize(("causal", "columns"), [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_flashmask_means_the_same(causal, columns):
    """Against FlashMask's own words: rows [start, end) below the diagonal are masked, and above."""
    n = 7
    x = torch.randint(n + 1, (1, 1, n, columns))
    if columns == 4 or (causal and columns == 2):
        x[..., 1] = n
    if columns == 4:
        x[..., 2] = 0
    i, j = torch.arange(n)[:, None], torch.arange(n)
    expected = (i < x[0, 0, :, 0]) & (j <= i if causal else i >= x[0, 0, :, -1])
    assert torch.equal(seen(n, masks.from_flashmask(x, causal=causal)), expected)
    of_heads = masks.from_flashmask(x.repeat(2, 3, 1, 1), causal=causal)
    assert of_heads["query_ends"].shape == (2, 3, n)
    if columns == 4 or (causal and columns == 2):
        for column, row in ((1, n - 1), (2, 1))[: columns // 2]:  # one row is seen again
            wrong = x.clone()
            wrong[0, 0, 2, column] = row
            with pytest.raises(ValueError, match="an interval cannot"):
                masks.from_flashmask(wrong, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("keys", "queries"), [(8, None), (8, 5), (5, 8), (8, 0)])
@pytest.mark.parametrize("size", [1, 3, 8, 2**40])
def test_chunks_see_themselves(size, keys, queries, causal):
    options = masks.chunks(keys, size, queries=queries, causal=causal)
    m = keys if queries is None else queries
    i, j = torch.arange(m)[:, None], torch.arange(keys)
    p = i + keys - m
    expected = (p // size == j // size) & ((j <= p) | (not causal))
    assert torch.equal(seen(keys, options, m), expected)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: masks.tree([-1, 0, 0, 1]), "depth-first"),
        (lambda: masks.tree([0]), "depth-first"),
        (lambda: masks.tree([-1, -2]), "depth-first"),
        (lambda: masks.prefix(7, 6), "length=7 must lie from 0 to total=6"),
        (lambda: masks.chunks(8, 0), "size=0 must be at least 1"),
        (lambda: masks.shared_prompt(-1, [2]), "prompt=-1 must be at least 0"),
        (lambda: masks.documents([0.5]), "lengths has shape .* give integers"),
        (lambda: masks.from_flashmask(torch.zeros(1, 1, 7, 1).int(), causal=False), "has shape"),
        (lambda: masks.plan_mask({"causal": True}), "has causal; query_ends is missing"),
        (lambda: masks.plan_mask([1]), "options is a list"),
    ],
)
def test_what_is_no_mask_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@by_version
@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_packed_sequences(version, causal, device):
    """The same numbers, up to rounding, as the same documents packed."""
    lengths = [70, 1, 130, 64]
    q, k, v = inputs(sum(lengths), heads=4, dtype=torch.float32, device=device)
    options = masks.documents(lengths, causal=causal, device=device)
    o = attention(q, k, v, version=version, **options)
    flat = (x[0] for x in (q, k, v))
    given = {"cu_seqlens_q": bounds(lengths, device), "causal": causal}
    packed = attention(*flat, version=version, **given)
    torch.testing.assert_close(o[0], packed, rtol=1e-5, atol=1e-5)


MASKS = {
    "a shared prompt": lambda n, device: masks.shared_prompt(100, [60, n - 160], device=device),
    "a tree": lambda n, device: masks.tree([-1] + [(i - 1) // 40 * 40 if i % 40 == 1 else i - 1
                                            for i in range(1, n)], device=device),
    "nobody": lambda n, device: {"query_ends": torch.zeros(n, dtype=torch.int32, device=device)},
    "starts after their ends": lambda n, device: {
        "query_starts": torch.full((n,), 90, device=device),
        "query_ends": torch.full((n,), 30, device=device),
    },
    "numbers far out of range": lambda n, device: {
        "query_starts": torch.full((n,), -(2**40), device=device),
        "query_ends": torch.full((n,), 2**40, device=device),
    },
}  # fmt: skip


@pytest.mark.parametrize("edge", [63, 64, 65, 127, 128])
def test_intervals_that_end_and_start_beside_a_block(edge, device):
    """A block of queries that ends with the last query that sees the first 128 keys, or one before
    or behind; all of these alike, so that no other key of their blocks needs the mask. Each query
    sees the others.
    """
    q, k, v = inputs(256, dtype=torch.float32, heads=1, kv_heads=1, device=device)
    of_first = torch.arange(256, device=device) < 128
    for options in ({"query_ends": torch.where(of_first, edge, 256)},
                    {"query_starts": torch.where(of_first, edge, 0)}):  # fmt: skip
        for version in ("fa2", "fa3"):
            check(version, q, k, v, **options)


@pytest.mark.parametrize(("name", "num_splits"), rotated(MASKS, [2, 5]))
def test_masks_with_split_keys(name, num_splits, device):
    """Each split has its part of the masked blocks and of the full ones."""
    q, k, v = inputs(400, heads=2, kv_heads=1, dtype=torch.float32, device=device)
    options = MASKS[name](400, device)
    o, lse = attention(q, k, v, version="fa2", num_splits=num_splits, return_lse=True, **options)
    assert_within_budget(o, lse, q, k, v, **options)


@pytest.mark.parametrize("size", [64, 2])
def test_blocks_that_nobody_sees_are_not_listed(size, device):
    """Two documents of four tiles each: a tile of queries has its own document's blocks only, those
    on the diagonal with a mask. Of small blocks, the kernel sees 64 at once.
    """
    q, k, v = inputs(512, dtype=torch.float32, device=device)
    request = make_request(q, k, v, **masks.documents([256, 256], device=device))
    lists, of_tile = Intervals.of(request, size, 64).lists, 64 // size
    assert lists.shape == (1, 8, 2 + 8 * of_tile)
    for tile, line in enumerate(lists[0].tolist()):
        masked, others = line[:2]
        own = tile * of_tile
        assert line[2 : 2 + masked] == list(range(own, own + of_tile))
        assert line[len(line) - others :][::-1] == list(range(tile // 4 * 4 * of_tile, own))


def counted(monkeypatch):
    """How often lists are made."""
    made = []
    monkeypatch.setattr(
        Intervals,
        "made",
        classmethod(lambda cls, *given, make=Intervals.made: made.append(given) or make(*given)),
    )
    return made


def test_a_planned_mask_is_listed_once(device, monkeypatch):
    """By the first layer, for all others and for all backwards; a kernel has lists of its own."""
    made = counted(monkeypatch)
    q, k, v = inputs(200, dtype=torch.float32, device=device)
    mask = masks.documents([150, 50], device=device)
    planned = masks.plan_mask(mask)

    def step(options):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attention(*leaves, version="fa2", **options)
        return o, *torch.autograd.grad(o.sum(), leaves)

    expected = step(mask)
    alone = len(made)
    for _ in range(3):
        assert all(map(torch.equal, step(planned), expected))
    assert len(made) == 2 * alone
    planned["query_ends"].fill_(0)
    assert not step(planned)[0].any()  # another mask
    attention(q[:, :100], k, v, version="fa2", **planned)  # another shape
    assert len(made) == 3 * alone + 1


def right(options, device):
    """Whether FA2's result is within the error budget."""
    torch.manual_seed(0)
    q, k, v = inputs(128, dtype=torch.float32, device=device)
    o = attention(q, k, v, version="fa2", **options)
    return assess_request({"o": o}, make_request(q, k, v, **options))["o"].ok


def ends_at(n, device):
    return torch.full((128,), n, device=device)


def test_a_plan_is_of_its_own_mask_only(device):
    """Not of a mask that has one of its tensors, of a changed one, or of a changed copy."""
    tensors = {"query_starts": ends_at(0, device), "query_ends": ends_at(64, device)}
    mask = masks.plan_mask(tensors)
    assert right(mask, device)
    assert right({**mask, "query_ends": ends_at(100, device)}, device)
    for name in mask:
        assert right({name: mask[name]}, device)
    for window in ((None, None), (5, None), (5, 3)):
        assert right({**mask, "window": window}, device)
    mask["query_ends"].fill_(30)
    assert right(mask, device)
    for n in (90, 50):
        copied = copy.deepcopy(mask)
        copied["query_ends"].fill_(n)
        assert right(copied, device)
    assert right(mask, device)
    (kept,) = mask["query_ends"].flash_versions_plans.values()
    assert len(kept[1]) == 1, "plans of the mask before are dropped"
    spread = masks.plan_mask({"query_ends": ends_at(64, device)[:, None].repeat(1, 2)[:, 0]})
    for n in (64, 30):  # kernels get a copy of it
        spread["query_ends"].fill_(n)
        assert right(spread, device)
    with torch.inference_mode():
        served = masks.plan_mask({"query_ends": ends_at(128, device)})
        assert right(served, device)
        served["query_ends"].fill_(64)
        assert right(served, device)


def test_a_planned_mask_is_saved_without_its_plan(device, tmp_path):
    mask = masks.plan_mask({"query_ends": ends_at(64, device)})
    assert right(mask, device)
    torch.save(mask, tmp_path / "mask.pt")
    assert right(torch.load(tmp_path / "mask.pt"), device)
