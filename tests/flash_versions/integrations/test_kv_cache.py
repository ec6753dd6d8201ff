"""The cache that grows in place: what is written where, and attention over it step by step."""

from dataclasses import dataclass, field

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flash_versions import attention, masks
from flash_versions.flash_attn import flash_attn_with_kvcache
from flash_versions.flash_attn.kv_cache import append_op, append_to_cache, rotate
from tests.helpers.kernels.budget import assert_within_budget

HEADS, DIM, DIM_V, POSITIONS = 2, 24, 40, 64


def tables(device, rotary_dim, positions=POSITIONS):
    """Cosines and sines of random angles, so that no two pairs or positions are alike."""
    angles = torch.rand(positions, rotary_dim // 2, device=device) * 6.28
    return angles.cos(), angles.sin()


def rotated(x, cos, sin, positions, interleaved):
    """Rotary embedding as it is defined, in fp64: pairs are complex numbers that are multiplied."""
    x, pairs = x.double(), cos.shape[1]
    if interleaved:
        real, imaginary = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    else:
        real, imaginary = x[..., :pairs], x[..., pairs : 2 * pairs]
    turn = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    turned = torch.view_as_real(torch.complex(real, imaginary) * turn)
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat((turned, x[..., 2 * pairs :]), -1)


def assert_rounded_once(found, expected, x):
    """One rounding to the dtype, after two products and a sum in fp32."""
    size = x.double().abs().amax(-1, keepdim=True)
    bound = expected.abs() * torch.finfo(found.dtype).eps / 2 + size * 2.0**-22
    assert ((found.double() - expected).abs() <= bound).all()


# ---- rotate ----


@pytest.mark.parametrize("interleaved", [True, False], ids=["GPT-J", "GPT-NeoX"])
@pytest.mark.parametrize(
    ("dtype", "rotary_dim"), [(torch.float32, DIM), (torch.float16, 2), (torch.bfloat16, 16)]
)
def test_rotate(dtype, rotary_dim, interleaved, device):
    x = torch.randn(2, 5, 3, DIM, device=device).to(dtype)
    cos, sin = tables(device, rotary_dim)
    positions = torch.tensor([[0, 1, 9, 9, 40], [POSITIONS - 1, 3, 2, 1, 0]], device=device)
    found = rotate(x, cos, sin, positions, interleaved)
    assert found.dtype == dtype
    assert_rounded_once(found, rotated(x, cos, sin, positions, interleaved), x)
    assert torch.equal(found[..., rotary_dim:], x[..., rotary_dim:])
    positions[0, 0], positions[1, 0] = -5, POSITIONS + 5  # outside the table
    assert torch.equal(rotate(x, cos, sin, positions, interleaved), found)


@pytest.mark.parametrize("interleaved", [True, False], ids=["GPT-J", "GPT-NeoX"])
def test_gradient_of_rotate(interleaved):
    x = torch.randn(1, 2, 1, 6, dtype=torch.float64, requires_grad=True)
    tables_and_positions = (*tables("cpu", 4), torch.tensor([[0, 9]]))
    assert torch.autograd.gradcheck(lambda x: rotate(x, *tables_and_positions, interleaved), x)


# ---- append_to_cache ----


@dataclass(frozen=True)
class Append:
    """One append: `pages` of `size` slots, of which every sequence has those in its row of `table`
    (its own row without).
    """

    lengths: tuple[int, ...]
    new: int = 3
    pages: int = 3
    size: int = 12
    table: tuple[tuple[int, ...], ...] | None = None
    arguments: dict = field(default_factory=dict)

    def target(self, b, i):
        """(page, row) of token i of sequence b, or None if it is dropped."""
        slot = self.lengths[b] + i
        row = (b,) if self.table is None else self.table[b]
        if not 0 <= slot < len(row) * self.size:
            return None
        page = row[slot // self.size]
        return (page, slot % self.size) if 0 <= page < self.pages else None


APPENDS = {
    "dense": Append((0, 5, 7)),
    "one token": Append((0, 11, 7), new=1),
    "past both ends": Append((10, 12, -2)),
    "past 32 bits": Append((2**32 + 5, 2**40, -(2**40))),
    "pages": Append((4, 9, 0), pages=6, size=5, table=((2, 0), (4, 1), (3, 5))),
    "a page that does not exist": Append((4, 4, 9), size=5, table=((2, -1), (0, 3), (-1, 1))),
    "rows by index": Append((0, 5), pages=4, table=((3,), (1,))),
    "nothing new": Append((0, 5, 7), new=0),
}
ROTARY = {"plain": None, "GPT-J": True, "GPT-NeoX": False}


@pytest.mark.parametrize(
    ("dtype", "rotary", "name"),
    [(torch.float32, "GPT-J", name) for name in APPENDS]
    + [(torch.float32, "plain", "pages"), (torch.float16, "GPT-NeoX", "dense")]
    + [(torch.bfloat16, "GPT-J", "dense")],
)
def test_append(dtype, rotary, name, device):
    """Every new row lies where it should; all other memory keeps its bits.

    K and V are slices of one tensor, with a page more before and after them.
    """
    case = APPENDS[name]
    batch = len(case.lengths)
    memory = torch.randn(case.pages + 2, case.size, HEADS, DIM + DIM_V, device=device).to(dtype)
    k, v = torch.randn(batch, case.new, HEADS, DIM + DIM_V, device=device).to(dtype).split(
        [DIM, DIM_V], -1
    )  # fmt: skip
    integers = torch.int64 if max(case.lengths) > 2**31 else torch.int32
    lengths = torch.tensor(case.lengths, dtype=integers, device=device)
    options = {}
    if case.table is not None and len(case.table[0]) == 1:
        options["cache_batch_idx"] = torch.tensor(case.table, device=device)[:, 0]
    elif case.table is not None:
        options["block_table"] = torch.tensor(case.table, dtype=torch.int32, device=device)
    expected, new_k = memory.clone(), k.double()
    if rotary != "plain":
        cos, sin = tables(device, 16)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": ROTARY[rotary]}
        positions = lengths[:, None] + torch.arange(case.new, device=device)
        new_k = rotated(k, cos, sin, positions.clamp(0, POSITIONS - 1), ROTARY[rotary])

    k_cache, v_cache = memory[1:-1].split([DIM, DIM_V], -1)
    append_to_cache(k_cache, v_cache, k, v, lengths, **options)

    for b in range(batch):
        for i in range(case.new):
            if (target := case.target(b, i)) is None:
                continue
            page, row = target
            found = memory[1 + page, row, :, :DIM]
            assert_rounded_once(found, new_k[b, i], k[b, i])
            expected[1 + page, row, :, :DIM] = found
            expected[1 + page, row, :, DIM:] = v[b, i]
    assert torch.equal(memory, expected)


def test_append_is_a_well_formed_operator(device):
    k_cache, v_cache, k, v = torch.randn(4, 2, 3, HEADS, DIM, device=device).unbind(0)
    lengths = torch.tensor([0, 2], device=device)
    arguments = (k_cache, v_cache, k, v, lengths, None, None, *tables(device, 8), True)
    torch.library.opcheck(append_op, arguments)


# ---- flash_attn_with_kvcache ----

FP8 = torch.float8_e4m3fn


def inputs(device, M=3, batch=3, dtype=torch.float32):
    """q, and the k and v of the same tokens."""
    q = torch.randn(batch, M, 4, DIM, device=device).to(dtype)
    k = torch.randn(batch, M, HEADS, DIM, device=device).to(dtype)
    v = torch.randn(batch, M, HEADS, DIM_V, device=device).to(dtype) + 0.5
    return q, k, v


def filled_cache(device, lengths):
    """Caches of 32 slots, with NaN in every one that is free."""
    caches = []
    for dim in (DIM, DIM_V):
        cache = torch.randn(len(lengths), 32, HEADS, dim, device=device)
        for b, length in enumerate(lengths):
            cache[b, length:] = float("nan")
        caches.append(cache)
    return caches


def test_decoding_equals_prefill(device):
    """Token by token, with lengths that are known to the host."""
    q, k, v = inputs(device, M=5)
    k_cache, v_cache = filled_cache(device, [0, 0, 0])
    cos, sin = tables(device, 16)
    steps = [
        flash_attn_with_kvcache(
            q[:, i : i + 1], k_cache, v_cache, k[:, i : i + 1], v[:, i : i + 1], cos, sin,
            cache_seqlens=i, causal=True, rotary_interleaved=False,
        )
        for i in range(5)
    ]  # fmt: skip
    q = rotate(q, cos, sin, torch.arange(5, device=device).expand(3, 5), interleaved=False)
    assert_within_budget(torch.cat(steps, 1), None, q, k_cache[:, :5], v_cache[:, :5], causal=True)
    assert torch.equal(v_cache[:, :5], v) and k_cache[:, 5:].isnan().all()


def test_packed_tokens(device):
    """Sequences of which one appends three tokens, one none and one five; two rows are of none."""
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    lengths = torch.tensor([20, 7, 26], dtype=torch.int32, device=device)
    row = torch.tensor([2, 0, 1], device=device)
    q, k, v = (x[0] for x in inputs(device, M=10, batch=1))
    caches = filled_cache(device, lengths[row.argsort()].tolist())
    cos, sin = tables(device, 16)
    positions = torch.tensor([[20, 21, 22, 26, 27, 28, 29, 30]], device=device)
    seen_q = q.clone()
    seen_q[:8] = rotate(q[None, :8], cos, sin, positions)[0]
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, lengths, row, cu_seqlens_q=cu, cu_seqlens_k_new=cu,
        max_seqlen_q=5, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for b, end in enumerate((23, 7, 31)):
        new, own = slice(cu[b], cu[b + 1]), [cache[row[b]][None] for cache in caches]
        assert torch.equal(own[1][0, lengths[b] : end], v[new]) and own[1][0, end:].isnan().all()
        if new.start < new.stop:
            own = [x[:, :end] for x in own]
            found = out[None, new], lse[None, :, new]
            assert_within_budget(*found, seen_q[None, new], *own, causal=True)
    assert not out[8:].any() and (lse[:, 8:] == -torch.inf).all()


WHERE_QUERIES_ARE = {
    "causal": ({"causal": True}, {"causal": True}, True),
    "window on the left": ({"window_size": (9, -1)}, {"window": (9, None)}, True),
    "window on the right": ({"window_size": (-1, 9)}, {"window": (None, 9)}, True),
    "full": ({}, {}, False),
}


@pytest.mark.parametrize("name", WHERE_QUERIES_ARE)
def test_queries_turn_with_their_position_if_it_matters(name, device):
    """With neither causal nor a window, all are at the position of the first new token."""
    theirs, ours, one_by_one = WHERE_QUERIES_ARE[name]
    lengths = torch.tensor([20, 0, 29], device=device)
    q, k, v = inputs(device)
    caches = filled_cache(device, lengths.tolist())
    cos, sin = tables(device, 16, positions=32)
    out = flash_attn_with_kvcache(q, *caches, k, v, cos, sin, lengths, **theirs)
    positions = lengths[:, None] + torch.arange(3, device=device) * one_by_one
    seen_q = rotate(q, cos, sin, positions)
    assert_within_budget(out, None, seen_q, *caches, kv_lengths=lengths + 3, **ours)


def test_pages_and_rows_give_the_same_bits(device):
    """The same sequences in a dense cache, in pages of 8, and in other rows of a larger cache."""
    lengths = torch.tensor([20, 0, 25], dtype=torch.int32, device=device)
    q, k, v = inputs(device)
    dense = filled_cache(device, lengths.tolist())
    order = torch.randperm(14, device=device)[:12]
    table = order.view(3, 4).to(torch.int32)
    rows = torch.tensor([3, 0, 4], dtype=torch.int32, device=device)
    paged, spread = [], []
    for cache in dense:
        pages = torch.full((14, 8, *cache.shape[2:]), float("nan"), device=device)
        pages[order] = cache.view(12, 8, *cache.shape[2:])
        paged.append(pages)
        larger = torch.full((6, *cache.shape[1:]), float("nan"), device=device)
        larger[rows.long()] = cache
        spread.append(larger)
    options = {"cache_seqlens": lengths, "causal": True}
    expected = flash_attn_with_kvcache(q, *dense, k, v, **options)
    found = flash_attn_with_kvcache(q, *paged, k, v, block_table=table, **options)
    assert torch.equal(found, expected)
    found = flash_attn_with_kvcache(q, *spread, k, v, cache_batch_idx=rows, **options)
    assert torch.equal(found, expected)
    order_of_rows = torch.tensor([2, 0, 1], device=device)  # a table of rows in another order
    options |= {"block_table": table[order_of_rows], "cache_batch_idx": order_of_rows.argsort()}
    assert torch.equal(flash_attn_with_kvcache(q, *paged, k, v, **options), expected)
    for x, pages, larger in zip(dense, paged, spread):
        assert torch.equal(pages[order].view_as(x).nan_to_num(), x.nan_to_num())
        assert torch.equal(larger[rows.long()].nan_to_num(), x.nan_to_num())


@pytest.mark.parametrize(
    ("causal", "queries", "where"),
    [
        (True, 1, "rows"), (True, 3, "rows by index"), (False, 3, "pages"),
        (True, 9, "packed queries"),
    ],
)  # fmt: skip
def test_chunks(causal, queries, where, device):
    """Against an interval mask on each sequence: chunks are counted from the padding's end, and
    keys of other chunks are never multiplied. One sequence is shorter than its queries, and one
    ends with a chunk.
    """
    lengths, starts, size = [23, 2, 29], [3, 1, 0], 5
    q, _, _ = inputs(device, M=queries)
    caches = filled_cache(device, lengths)
    for cache in caches:
        for b, start in enumerate(starts):
            before = start + max(lengths[b] - start - queries, 0) // size * size
            cache[b, :before] = float("nan")
    given, seen_q = [x.clone() for x in caches], q
    options = {"cache_seqlens": torch.tensor(lengths, device=device)}
    if where == "rows by index":
        given = [x[[1, 2, 0]] for x in given]
        options["cache_batch_idx"] = torch.tensor([2, 0, 1], device=device)
    elif where == "pages":
        order = torch.randperm(12, device=device)
        for i, cache in enumerate(caches):
            given[i] = torch.empty(12, 8, *cache.shape[2:], device=device)
            given[i][order] = cache.view(12, 8, *cache.shape[2:])
        options["block_table"] = order.view(3, 4)
    elif where == "packed queries":
        seen_q = q.flatten(0, 1)
        options["cu_seqlens_q"] = torch.arange(4, device=device) * queries
    out, lse = flash_attn_with_kvcache(
        seen_q, *given, cache_leftpad=torch.tensor(starts, device=device), causal=causal,
        attention_chunk=size, return_softmax_lse=True, **options,
    )  # fmt: skip
    assert out.shape[:-1] == seen_q.shape[:-1]
    out = out.view(3, queries, 4, DIM_V)
    if where == "packed queries":
        lse = lse.unflatten(1, (3, queries)).transpose(0, 1)
    for b, (start, end) in enumerate(zip(starts, lengths)):
        keys, values = (cache[b : b + 1, start:end].nan_to_num() for cache in caches)
        seen = masks.chunks(end - start, size, queries=queries, causal=causal, device=device)
        own = slice(b, b + 1)
        assert_within_budget(out[own], lse[own], q[own], keys, values, **seen)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed tokens"])
def test_8_bits(packed, device):
    """Append and attend with scales of each head: the bits in the cache are those of k and v."""
    lengths = torch.tensor([20, 0, 25], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(3, 3, n, 32, device=device).to(FP8) for n in (4, 2, 2))
    caches = [torch.randn(3, 32, 2, 32, device=device).to(FP8).view(torch.int8) for _ in range(2)]
    options = {f"{x}_descale": torch.rand(3, 2, device=device) + 0.5 for x in "qkv"}
    options["causal"] = True
    expected = [x.clone() for x in caches]
    for cache, new in zip(expected, (k, v)):
        for b, length in enumerate(lengths.tolist()):
            cache[b, length : length + 3] = new[b].view(torch.int8)
    theirs, bounds = {}, torch.arange(4, device=device) * 3
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        options["cu_seqlens_q"] = theirs["cu_seqlens_k_new"] = bounds
    given = [x.view(FP8) for x in caches]
    out = flash_attn_with_kvcache(q, *given, k, v, cache_seqlens=lengths, **options, **theirs)
    assert out.dtype == torch.bfloat16
    assert all(torch.equal(x, y) for x, y in zip(caches, expected))
    right = attention(q, *(x.view(FP8) for x in expected), kv_lengths=lengths + 3, **options)
    assert torch.equal(out, right)


def test_compiled_step(device):
    """One graph for all lengths, and the cache is updated by it."""

    def step(q, k_cache, v_cache, k, v, cos, sin, lengths):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True, return_softmax_lse=True
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    q, k, v = inputs(device, M=1)
    cos, sin = tables(device, 16, positions=32)
    lengths = torch.tensor([20, 0, 29], device=device)
    eager_caches = filled_cache(device, lengths.tolist())
    caches = [x.clone() for x in eager_caches]
    for i in range(2):
        arguments = (k, v, cos, sin, lengths + i)
        expected = step(q, *eager_caches, *arguments)
        found = compiled(q, *caches, *arguments)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        for x, y in zip(caches, eager_caches):
            assert torch.equal(x.nan_to_num(), y.nan_to_num())
    assert counter.frame_count == 1


def test_inputs_may_want_a_gradient_that_is_refused_when_asked_for(device):
    """As in a model in evaluation whose weights require grad."""
    q, k, v = inputs(device)
    caches = filled_cache(device, [20, 6, 29])
    lengths = torch.tensor([20, 6, 29], device=device)
    expected = flash_attn_with_kvcache(q, *[x.clone() for x in caches], k, v, cache_seqlens=lengths)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = flash_attn_with_kvcache(leaves[0], *caches, *leaves[1:], cache_seqlens=lengths)
    assert torch.equal(found, expected) and not any(x.requires_grad for x in caches)
    with pytest.raises(ValueError, match="a step on a cache has no backward"):
        found.sum().backward()
    caches = filled_cache(device, [20, 6, 29])
    copies = [x.clone() for x in caches]
    expected = flash_attn_with_kvcache(q, *copies, k, v, cache_seqlens=lengths)
    with torch.inference_mode():
        assert torch.equal(
            flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths), expected
        )


CACHE, NEW, LENGTHS = torch.ones(2, 8, 2, 16), torch.ones(2, 3, 2, 16), torch.tensor([0, 1])
TABLE = torch.ones(8, 8)
NAMES = ("k_cache", "v_cache", "k", "v")
GIVEN = dict(zip(NAMES, (CACHE, CACHE, NEW, NEW))) | {"q": NEW, "cache_seqlens": LENGTHS}
NOTHING_NEW = {"k": None, "v": None}
ROTARY_TABLES = {"rotary_cos": TABLE, "rotary_sin": TABLE}
REFUSED = {
    "cache: rank": ({"k_cache": CACHE[0]}, r"k_cache has shape \(8, 2, 16\); it must be \(batch"),
    "k: other heads": ({"k": NEW[:, :, :1]}, r"k has shape .* it must be \(2, 3, 2, 16\)"),
    "k alone": ({"v": None}, "k and v go together"),
    "fewer sequences": (
        {x: GIVEN[x][:1] for x in ("q", "k", "v", "cache_seqlens")},
        "k has 1 sequences and k_cache 2",
    ),
    "no lengths": ({"cache_seqlens": None}, "cache_seqlens is None; appending k needs"),
    "too long": ({"cache_seqlens": 6}, "cache_seqlens=6 and 3 new tokens; the cache has 8 slots"),
    "packed keys without k": (
        NOTHING_NEW | {"cu_seqlens_k_new": torch.tensor([0, 1, 3])},
        "cu_seqlens_k_new was given without k",
    ),
    "rotary: 8 bits": (
        {name: GIVEN[name].to(FP8) for name in NAMES} | ROTARY_TABLES,
        "rotary_cos was given and k has dtype torch.float8_e4m3fn, .* before they are quantised",
    ),
    "rotary: too short": (dict.fromkeys(ROTARY_TABLES, TABLE[1:]), "7 positions; the cache has 8"),
    "rotary: too wide": (
        dict.fromkeys(ROTARY_TABLES, torch.ones(8, 9)),
        r"rotary_cos has shape \(8, 9\).*head_dim 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(name):
    changes, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        flash_attn_with_kvcache(**(GIVEN | changes))
