"""FlashAttention 2's functions: its signatures, and what each of them means to `attention`."""

import inspect

import pytest
import torch

from flash_versions import attention, flash_attn, masks
from flash_versions.dispatch.precision import DESCALES
from flash_versions.dispatch.request import make_request
from flash_versions.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_versions.versions.oracle.budget import assess, assess_request, compare

NEEDED = inspect.Parameter.empty
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


def needed(*names):
    return dict.fromkeys(names, NEEDED)


LENGTHS = needed("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": needed("q", "k", "v") | OPTIONS,
    "flash_attn_qkvpacked_func": needed("qkv") | OPTIONS,
    "flash_attn_kvpacked_func": needed("q", "kv") | OPTIONS,
    "flash_attn_varlen_func": needed("q", "k", "v") | LENGTHS | OPTIONS | {"block_table": None},
    "flash_attn_varlen_qkvpacked_func": needed("qkv", "cu_seqlens", "max_seqlen") | OPTIONS,
    "flash_attn_varlen_kvpacked_func": needed("q", "kv") | LENGTHS | OPTIONS,
    "flash_attn_with_kvcache": needed("q", "k_cache", "v_cache")
    | {
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}
# By keyword, None by default: a sink under its name in transformers, others of FlashAttention 3.
ADDED = {
    "flash_attn_func": ["s_aux", *DESCALES],
    "flash_attn_varlen_func": ["s_aux", "seqused_q", "seqused_k", *DESCALES],
    "flash_attn_with_kvcache": [
        "s_aux",
        *DESCALES,
        "cu_seqlens_q",
        "cu_seqlens_k_new",
        "max_seqlen_q",
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_flash_attention_2(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    ours = {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}
    assert list(ours.items()) == list(SIGNATURES[name].items())
    added = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    expected = dict.fromkeys(ADDED.get(name, ())) | {"attention_chunk": 0, "version": "auto"}
    assert added == expected


# ---- one call in FlashAttention's terms and in ours ----

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
CALLS = {
    "nothing": ({}, {}),
    "causal": ({"causal": True, "deterministic": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "window": ({"window_size": (4, 2)}, {"window": (4, 2)}),
    "window: a tensor": ({"window_size": torch.tensor([4, -1])}, {"window": (4, None)}),
    "window: any negative number": ({"window_size": (4, -7)}, {"window": (4, None)}),
    "window: two negative numbers": ({"window_size": (-2, -3)}, {}),
    "window: negative and causal": ({"window_size": (-9, -2), "causal": True}, {"causal": True}),
    "window: one key": ({"window_size": (0, 0)}, {"window": (0, 0)}),
    "window: left only": ({"window_size": (4, -1)}, {"window": (4, None)}),
    "window: right only": ({"window_size": [None, 0]}, {"causal": True}),
    "window: as transformers": (
        {"window_size": (4, 4), "causal": True},
        {"window": (4, None), "causal": True},
    ),
    "softcap": ({"softcap": 0.7}, {"softcap": 0.7}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    "alibi per sequence": (
        {"alibi_slopes": torch.stack((SLOPES, SLOPES * 3))},
        {"alibi_slopes": torch.stack((SLOPES, SLOPES * 3))},
    ),
    "sink": ({"s_aux": SINK}, {"sink": SINK}),
}
by_call = pytest.mark.parametrize("call", CALLS)
by_version = pytest.mark.parametrize("version", ["auto", "reference"])
PACKED = torch.tensor([0, 9, 21], dtype=torch.int32)
PACKED_K = torch.tensor([0, 14, 20], dtype=torch.int32)


def on(device, options):
    return {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in options.items()}


def dense(device):
    q = torch.randn(2, 9, 4, 16, device=device)
    kv = torch.randn(2, 14, 2, 2, 16, device=device)
    return q, kv


def packed(device):
    q = torch.randn(21, 4, 16, device=device)
    kv = torch.randn(20, 2, 2, 16, device=device)
    return q, kv


def assert_within_budget(result, q, k, v, **options):
    out, lse, nothing = result
    assert nothing is None
    for name, accuracy in assess(out, lse, q, k, v, **options).items():
        assert accuracy.ok, f"{name}: {accuracy}"


@by_call
@by_version
def test_dense(version, call, device):
    theirs, ours = (on(device, x) for x in CALLS[call])
    q, kv = dense(device)
    k, v = kv.unbind(2)
    given = {"version": version, "return_attn_probs": True, **theirs}
    result = flash_attn_func(q, k, v, **given)
    assert result[1].shape == (2, 4, 9)
    assert_within_budget(result, q, k, v, **ours)
    assert torch.equal(flash_attn_func(q, k, v, **theirs, version=version), result[0])


@by_call
@by_version
def test_varlen(version, call, device):
    theirs, ours = (on(device, x) for x in CALLS[call])
    q, kv = packed(device)
    k, v = kv.unbind(1)
    cu_q, cu_k = PACKED.to(device), PACKED_K.to(device)
    given = {"version": version, "return_attn_probs": True, **theirs}
    result = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 14, **given)
    assert result[1].shape == (4, 21)
    assert_within_budget(result, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **ours)


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[2] is expected[2] is None


def test_options_by_position(device):
    """Every function takes dropout_p, softmax_scale, causal, window_size, ... in this order."""
    q, kv = dense(device)
    k, v = kv.unbind(2)
    slopes = SLOPES.to(device)
    options = (0.0, 0.3, True, (5, -1), 2.0, slopes, False, True)
    ours = {"scale": 0.3, "causal": True, "window": (5, None), "softcap": 2.0}
    ours["alibi_slopes"] = slopes
    expected = (*attention(q, k, v, return_lse=True, **ours), None)
    assert_same(flash_attn_func(q, k, v, *options), expected)
    assert_same(flash_attn_kvpacked_func(q, kv, *options), expected)
    expected = (*attention(q, q, q, return_lse=True, **ours), None)
    assert_same(flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), *options), expected)
    q, kv = packed(device)
    k, v = kv.unbind(1)
    lengths = (PACKED.to(device), PACKED_K.to(device))
    ours |= {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1], "return_lse": True}
    expected = (*attention(q, k, v, **ours), None)
    assert_same(flash_attn_varlen_func(q, k, v, *lengths, 12, 14, *options), expected)
    assert_same(flash_attn_varlen_kvpacked_func(q, kv, *lengths, 12, 14, *options), expected)
    ours["cu_seqlens_k"] = lengths[0]
    expected = (*attention(q, q, q, **ours), None)
    qkv = torch.stack((q, q, q), 1)
    assert_same(flash_attn_varlen_qkvpacked_func(qkv, lengths[0], 12, *options), expected)


@pytest.mark.parametrize(("asked", "expected"), [(False, None), (True, True)])
def test_deterministic_is_handed_on(asked, expected, device, monkeypatch):
    """False is the default, and leaves it to torch's own setting."""
    found = []
    monkeypatch.setattr(
        "flash_versions.flash_attn.call.attention",
        lambda *x, **y: found.append(y["deterministic"]),
    )
    q, kv = dense(device)
    flash_attn_func(q, *kv.unbind(2), deterministic=asked)
    flash_attn_kvpacked_func(q, kv, deterministic=asked)
    flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), deterministic=asked)
    q, kv = packed(device)
    lengths = (PACKED, PACKED_K, 12, 14)
    flash_attn_varlen_func(q, *kv.unbind(1), *lengths, deterministic=asked)
    flash_attn_varlen_kvpacked_func(q, kv, *lengths, deterministic=asked)
    flash_attn_varlen_qkvpacked_func(torch.stack((q, q, q), 1), PACKED, 12, deterministic=asked)
    assert found == [expected] * 6


def test_dropout_is_drawn_as_by_attention(device):
    q, kv = dense(device)
    k, v = kv.unbind(2)
    torch.manual_seed(1)
    out = flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(1)
    assert torch.equal(out, attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(out, flash_attn_func(q, k, v, 0.5))


def test_max_seqlen_is_not_looked_at(device):
    """transformers passes a tensor, whose value would cost a synchronisation."""
    q, kv = packed(device)
    unreadable = torch.empty((), device="meta")
    lengths = (PACKED.to(device), PACKED_K.to(device))
    found = flash_attn_varlen_kvpacked_func(q, kv, *lengths, unreadable, unreadable)
    assert torch.equal(found, flash_attn_varlen_kvpacked_func(q, kv, *lengths, 12, 14))


def test_pages(device):
    q, kv = packed(device)
    lengths = (PACKED.to(device), PACKED_K.to(device))
    pages = torch.randn(5, 8, 2, 2, 16, device=device)  # of 8 keys: 14 keys are two, 6 are one
    pages[3], pages[1, :6], pages[4, :6] = kv[:8], kv[8:14], kv[14:]
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32, device=device)
    options = {"causal": True, "block_table": table, "return_attn_probs": True}
    result = flash_attn_varlen_func(q, *pages.unbind(2), *lengths, 12, 14, **options)
    in_rows = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
    assert_within_budget(result, q, *kv.unbind(1), causal=True, **in_rows)
    q.requires_grad_()
    out, lse, none = flash_attn_varlen_func(q, *pages.unbind(2), *lengths, 12, 14, **options)
    assert torch.equal(out, result[0]) and torch.equal(lse, result[1]) and none is None
    with pytest.raises(ValueError, match="attention to keys in pages has no backward"):
        out.sum().backward()


# ---- chunks: each sequence by itself with an interval mask, forward and backward ----

CHUNKED = {
    "causal": (4, {"causal": True}, {}),
    "causal, of one key": (1, {"causal": True}, {}),
    "causal, of all keys": (100, {"causal": True}, {}),
    "full": (4, {}, {}),
    "window, alibi, sink, softcap": (
        4,
        {"causal": True, "window_size": (3, -1), "softcap": 2.0},
        {"window": (3, None), "softcap": 2.0},
    ),
}
# q's, k's cu_seqlens: fewer queries than keys, more, none, a length that is a multiple of 4
SEQUENCES = {
    "dense": (None, None),
    "packed": (torch.tensor([0, 9, 13, 13, 21]), torch.tensor([0, 4, 12, 15, 20])),
    "packed, rows of no sequence": (PACKED - torch.tensor([0, 0, 3]), PACKED_K),
    "padded keys": (PACKED, None),
    "padded queries": (None, PACKED_K),
}


def chunks_of(k, q, size, causal):
    return masks.chunks(k.shape[1], size, queries=q.shape[1], causal=causal, device=q.device)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("call", CHUNKED)
@by_version
def test_chunks(version, call, name, device):
    size, theirs, ours = CHUNKED[call]
    cu_q, cu_k = (x if x is None else x.to(device) for x in SEQUENCES[name])
    q = (dense if cu_q is None else packed)(device)[0].requires_grad_()
    kv = (dense if cu_k is None else packed)(device)[1]
    k, v = (x.clone().requires_grad_() for x in kv.unbind(kv.dim() - 3))
    batch = 2 if cu_q is None else cu_q.shape[0] - 1
    slopes, sink = None, None
    if "alibi" in call:
        slopes = torch.rand(batch, 4, device=device)
        sink = SINK.to(device).requires_grad_()
    named = {"alibi_slopes": slopes, "s_aux": sink, "version": version, "return_attn_probs": True}
    named |= theirs | {"attention_chunk": size}
    if name == "dense":
        out, lse, _ = flash_attn_func(q, k, v, **named)
    else:
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 14, **named)
    assert out.shape == q.shape
    assert lse.shape == ((2, 4, 9) if cu_q is None else (4, 21))
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    for b in range(batch):
        of_q = b if cu_q is None else slice(*cu_q[b : b + 2].tolist())
        of_k = b if cu_k is None else slice(*cu_k[b : b + 2].tolist())
        own_q, own_out, own_dq, own_do = (x[of_q].view(1, -1, 4, 16) for x in (q, out, dq, do))
        own_k, own_v, own_dk, own_dv = (x[of_k].view(1, -1, 2, 16) for x in (k, v, dk, dv))
        own_lse, own_dlse = (x[b][None] if cu_q is None else x[None, :, of_q] for x in (lse, dlse))
        seen = chunks_of(own_k, own_q, size, theirs.get("causal", False))
        alibi = None if slopes is None else slopes[b]
        found = compare(
            own_out, own_q, own_k, own_v, **ours, **seen, alibi_slopes=alibi, sink=sink,
            lse=own_lse, do=own_do, dlse=own_dlse, dq=own_dq, dk=own_dk, dv=own_dv,
        )  # fmt: skip
        assert all(accuracy.ok for accuracy in found.values()), found
    if "no sequence" in name:
        assert not out[18:].any() and not dq[18:].any()


@pytest.mark.parametrize("causal", [True, False])
def test_chunks_in_pages(causal, device):
    """With the bits that packed keys give: a part's keys begin inside a page."""
    q, kv = packed(device)
    lengths = (PACKED.to(device), PACKED_K.to(device))
    pages = torch.randn(5, 8, 2, 2, 16, device=device)
    pages[3], pages[1, :6], pages[4, :6] = kv[:8], kv[8:14], kv[14:]
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32, device=device)
    options = {"causal": causal, "attention_chunk": 5, "return_attn_probs": True}
    expected = flash_attn_varlen_func(q, *kv.unbind(1), *lengths, 12, 14, **options)
    options["block_table"] = table
    found = flash_attn_varlen_func(q, *pages.unbind(2), *lengths, 12, 14, **options)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


USED = {  # used queries of each sequence: none, some, all; and more than there are
    "packed": (PACKED, [5, 12]),
    "packed, none": (PACKED, [0, 7]),
    "packed, too many": (PACKED, [9, 99]),
    "packed, rows of no sequence": (torch.tensor([0, 9, 18]), [4, 9]),
    "padded": (None, [4, 9]),
    "padded, none": (None, [9, 0]),
}


@pytest.mark.parametrize("keys", ["packed keys", "padded keys"])
@pytest.mark.parametrize("name", USED)
@by_version
def test_used_queries(version, name, keys, device):
    """Each sequence by itself with the queries that it uses, forward and backward; no trace of the
    others, whatever they hold.
    """
    cu_q, counts = USED[name]
    q = (dense if cu_q is None else packed)(device)[0].requires_grad_()
    kv = (packed if keys == "packed keys" else dense)(device)[1]
    k, v = (x.clone().requires_grad_() for x in kv.unbind(kv.dim() - 3))
    cu_q, cu_k = (x if x is None else x.to(device) for x in (cu_q, PACKED_K))
    rows = []  # of each sequence that are used
    for b, count in enumerate(counts):
        first, end = (0, 9) if cu_q is None else cu_q[b : b + 2].tolist()
        used = slice(first, min(first + count, end))
        rows.append((b, used) if cu_q is None else (used,))
    is_used = torch.zeros(q.shape[:-2], dtype=torch.bool, device=device)
    for row in rows:
        is_used[row] = True
    with torch.no_grad():
        q[~is_used] = float("nan")
    out, lse, nothing = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k if keys == "packed keys" else None, 12, 14, causal=True,
        seqused_q=torch.tensor(counts, dtype=torch.int32, device=device),
        return_attn_probs=True, version=version,
    )  # fmt: skip
    assert nothing is None and out.shape == q.shape
    assert lse.shape == ((2, 4, 9) if cu_q is None else (4, 21))
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    by_query = lse.mT
    assert not out[~is_used].any() and not dq[~is_used].any()
    assert (by_query[~is_used] == -torch.inf).all()
    for b, row in enumerate(rows):
        if row[-1].start == row[-1].stop:
            continue
        own = slice(*cu_k[b : b + 2].tolist()) if keys == "packed keys" else b
        own_k, own_v, own_dk, own_dv = (x[own].reshape(1, -1, 2, 16) for x in (k, v, dk, dv))
        found = compare(
            out[row][None], q[row][None], own_k, own_v, causal=True,
            lse=by_query[row].mT[None], do=do[row][None], dlse=dlse.mT[row].mT[None],
            dq=dq[row][None], dk=own_dk, dv=own_dv,
        )  # fmt: skip
        assert all(accuracy.ok for accuracy in found.values()), found


USED_KEYS = {  # cu_seqlens_q, cu_seqlens_k, used keys: none, some, all; and more than there are
    "packed": (PACKED, PACKED_K, [9, 6]),
    "packed, none": (PACKED, PACKED_K, [0, 5]),
    "packed, too many": (PACKED, PACKED_K, [99, 2]),
    "padded keys": (PACKED, None, [14, 3]),
    "padded": (None, None, [11, 0]),
}


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("name", USED_KEYS)
@by_version
def test_used_keys(version, name, chunk, device):
    """Each sequence by itself with the keys that it uses, forward and backward; no trace of the
    others, whatever they hold.
    """
    cu_q, cu_k, counts = USED_KEYS[name]
    q = (dense if cu_q is None else packed)(device)[0].requires_grad_()
    kv = (dense if cu_k is None else packed)(device)[1]
    k, v = (x.clone().requires_grad_() for x in kv.unbind(kv.dim() - 3))
    cu_q, cu_k = (x if x is None else x.to(device) for x in (cu_q, cu_k))
    is_used, rows = torch.zeros(k.shape[:-2], dtype=torch.bool, device=device), []
    for b, count in enumerate(counts):
        first, end = (0, 14) if cu_k is None else cu_k[b : b + 2].tolist()
        used = slice(first, min(first + count, end))
        rows.append((b, used) if cu_k is None else (used,))
        is_used[rows[-1]] = True
    with torch.no_grad():
        k[~is_used] = v[~is_used] = float("nan")
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 12, 14, causal=True, attention_chunk=chunk,
        seqused_k=torch.tensor(counts, dtype=torch.int32, device=device),
        return_attn_probs=True, version=version,
    )  # fmt: skip
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    assert not dk[~is_used].any() and not dv[~is_used].any()
    for b, row in enumerate(rows):
        of_q = b if cu_q is None else slice(*cu_q[b : b + 2].tolist())
        own_q, own_out, own_dq, own_do = (x[of_q].view(1, -1, 4, 16) for x in (q, out, dq, do))
        own_lse, own_dlse = (x[b][None] if cu_q is None else x[None, :, of_q] for x in (lse, dlse))
        own_k, own_v, own_dk, own_dv = (x[row][None] for x in (k, v, dk, dv))
        seen = chunks_of(own_k, own_q, chunk, True) if chunk else {"causal": True}
        found = compare(
            own_out, own_q, own_k, own_v, **seen,
            lse=own_lse, do=own_do, dlse=own_dlse, dq=own_dq, dk=own_dk, dv=own_dv,
        )  # fmt: skip
        assert all(accuracy.ok for accuracy in found.values()), found


@pytest.mark.parametrize("chunk", [0, 5])
def test_used_keys_in_pages(chunk, device):
    """The lengths that cu_seqlens_k gives end them, too, if there."""
    q, kv = packed(device)
    cu_q, cu_k = PACKED.to(device), PACKED_K.to(device)
    used = torch.tensor([11, 6], dtype=torch.int32, device=device)
    pages = torch.full((5, 8, 2, 2, 16), torch.nan, device=device)
    pages[3], pages[1, :3], pages[4, :6] = kv[:8], kv[8:11], kv[14:]
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32, device=device)
    options = {"causal": True, "attention_chunk": chunk, "return_attn_probs": True}
    for bounds, counts in ((None, used), (cu_k, used + torch.tensor([0, 9], device=device))):
        out, lse, _ = flash_attn_varlen_func(
            q,
            *pages.unbind(2),
            cu_q,
            bounds,
            12,
            14,
            seqused_k=counts,
            block_table=table,
            **options,
        )
        for b, (first, count) in enumerate(zip((0, 14), used.tolist())):
            of_q = slice(*cu_q[b : b + 2].tolist())
            own_q, own_out = (x[of_q].view(1, -1, 4, 16) for x in (q, out))
            own = [x[None] for x in kv[first : first + count].unbind(1)]
            seen = chunks_of(own[0], own_q, chunk, True) if chunk else {"causal": True}
            found = compare(own_out, own_q, *own, **seen, lse=lse[None, :, of_q])
            assert all(accuracy.ok for accuracy in found.values()), found


# ---- 8-bit inputs ----


def eight_bits(x):
    """x rounded to 8 bits, and the same with its scale multiplied in."""
    x8 = x.to(torch.float8_e4m3fn)
    return x8, x8.to(x.dtype)


@pytest.mark.parametrize("name", ["chunks", "used queries", "used keys", "dense chunks"])
def test_8_bits(name, device):
    """Each sequence by itself: out has the budget of bf16 tensors with the numbers that the 8-bit
    tensors and their scales encode.
    """
    is_dense = name == "dense chunks"
    q, kv = (dense if is_dense else packed)(device)
    (q8, q), (kv8, kv) = eight_bits(q), eight_bits(kv)
    bounds = {"cu_seqlens_q": PACKED.to(device), "cu_seqlens_k": PACKED_K.to(device)}
    scale = torch.tensor([[0.5, 2.0], [0.25, 4.0]], device=device)
    options = {"causal": True, "return_attn_probs": True} | dict.fromkeys(DESCALES, scale)
    used_q, used_k = [9, 12], [14, 6]
    if "chunks" in name:
        options["attention_chunk"] = 4
    elif name == "used queries":
        used_q = [5, 12]
        options["seqused_q"] = torch.tensor(used_q, device=device)
    else:
        used_k = [11, 5]
        options["seqused_k"] = torch.tensor(used_k, device=device)
    if is_dense:
        out, lse, _ = flash_attn_func(q8, *kv8.unbind(2), **options)
        first_q, first_k, used_q, used_k = [0, 9], [0, 14], [9, 9], [14, 14]
        q, kv, out, lse = (
            q.flatten(0, 1),
            kv.flatten(0, 1),
            out.flatten(0, 1),
            torch.cat((*lse,), 1),
        )
    else:
        lengths = {"max_seqlen_q": 12, "max_seqlen_k": 14}
        out, lse, _ = flash_attn_varlen_func(q8, *kv8.unbind(1), **bounds, **lengths, **options)
        first_q, first_k = PACKED.tolist(), PACKED_K.tolist()
    assert out.dtype == torch.bfloat16
    for b in range(2):
        of_q, of_k = (
            slice(first[b], first[b] + used[b])
            for first, used in ((first_q, used_q), (first_k, used_k))
        )
        own_q = (q[of_q] * scale[b].repeat_interleave(2)[:, None])[None]
        own_k, own_v = ((x[of_k] * scale[b][:, None])[None] for x in kv.unbind(1))
        seen = chunks_of(own_k, own_q, 4, True) if "chunks" in name else {"causal": True}
        own = own_q, own_k, own_v
        assert assess(out[None, of_q], None, *(x.bfloat16() for x in own), **seen)["o"].ok
        in_fp32 = make_request(*own, **seen)
        assert assess_request({"lse": lse[None, :, of_q]}, in_fp32)["lse"].ok


def test_last_dimension_that_is_not_contiguous(device):
    q, kv = dense(device)
    k, v = kv.unbind(2)
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in strided)
    assert torch.equal(flash_attn_func(*strided), flash_attn_func(q, k, v))


# ---- gradients: one tensor for stacked arguments, with the bits of separate ones ----

STACKED = {
    "kvpacked": (flash_attn_kvpacked_func, flash_attn_func, dense, ()),
    "qkvpacked": (flash_attn_qkvpacked_func, flash_attn_func, dense, ()),
    "varlen kvpacked": (
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_func,
        packed,
        (PACKED, PACKED_K, 12, 14),
    ),
    "varlen qkvpacked": (
        flash_attn_varlen_qkvpacked_func,
        flash_attn_varlen_func,
        packed,
        (PACKED, PACKED, 12, 12),
    ),
}


@pytest.mark.parametrize("door", STACKED)
@by_version
def test_gradient_of_stacked_tensors(version, door, device):
    stacked_door, plain_door, make, lengths = STACKED[door]
    lengths = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in lengths)
    q, kv = make(device)
    dim = kv.dim() - 3
    if "qkv" in door:
        arguments = (torch.stack((q, q + 1, q - 1), dim),)
        leaves = arguments[0].unbind(dim)
        stacked_lengths = lengths[1::2]
    else:
        arguments = (q, kv)
        leaves = (q, *kv.unbind(dim))
        stacked_lengths = lengths
    arguments = [x.clone().requires_grad_() for x in arguments]
    leaves = [x.clone().requires_grad_() for x in leaves]
    options = {"causal": True, "window_size": (6, -1), "return_attn_probs": True}
    options["version"] = version
    out, lse, _ = stacked_door(*arguments, *stacked_lengths, **options)
    grads = [torch.randn_like(out), torch.randn_like(lse)]
    found = torch.autograd.grad([out, lse], arguments, grads)
    out, lse, _ = plain_door(*leaves, *lengths, **options)
    dq, dk, dv = torch.autograd.grad([out, lse], leaves, grads)
    stack = torch.stack((dq, dk, dv) if "qkv" in door else (dk, dv), dim)
    assert torch.equal(found[-1], stack) and stack.any()
    assert torch.equal(found[0], stack if "qkv" in door else dq)


def test_gradient_of_a_sink(device):
    q, kv = dense(device)
    sink = SINK.to(device).requires_grad_()
    out = flash_attn_func(q, *kv.unbind(2), s_aux=sink)
    do = torch.randn_like(out)
    (dsink,) = torch.autograd.grad(out, sink, do)
    found = compare(out, q, *kv.unbind(2), sink=sink, do=do, dsink=dsink)
    assert all(accuracy.ok for accuracy in found.values())


# ---- refusals ----

X = torch.ones(1, 2, 2, 16)
REFUSED = {
    "window: a number": (flash_attn_func, (X, X, X), {"window_size": 5}, "window_size=5 must be"),
    "window: none": (flash_attn_func, (X, X, X), {"window_size": ()}, r"window_size=\(\) .*pair"),
    "window: three": (flash_attn_func, (X, X, X), {"window_size": (1, 2, 3)}, "window_size=.*pair"),
    "softcap below 0": (flash_attn_func, (X, X, X), {"softcap": -1.0}, "softcap=-1.0 must be"),
    "qkv: two": (flash_attn_qkvpacked_func, (torch.ones(1, 2, 2, 2, 16),), {}, "qkv has .* 3, h"),
    "qkv: rank": (flash_attn_qkvpacked_func, (X,), {}, r"qkv has shape \(1, 2, 2, 16\)"),
    "kv: three": (flash_attn_kvpacked_func, (X, torch.ones(1, 2, 3, 2, 16)), {}, "kv has shape"),
    "chunk: below 1": (flash_attn_func, (X, X, X), {"attention_chunk": -4}, "attention_chunk=-4 m"),
    "chunk: a fraction": (
        flash_attn_func,
        (X, X, X),
        {"attention_chunk": 0.5},
        "chunk=0.5 must be",
    ),
    "used queries: packed": (
        flash_attn_varlen_func,
        (X[0], X, X, None, None, 2, 2),
        {"seqused_q": PACKED[:1]},
        r"q has shape \(2, 2, 16\); with seqused_q and without cu_seqlens_q .*\(batch, length",
    ),
    "used queries: padded": (
        flash_attn_varlen_func,
        (X, X, X, PACKED, PACKED, 2, 2),
        {"seqused_q": PACKED[:2]},
        r"q has shape .* with seqused_q and with cu_seqlens_q it must be \(total",
    ),
    "used queries: shape": (
        flash_attn_varlen_func,
        (X, X, X, None, None, 2, 2),
        {"seqused_q": PACKED},
        r"seqused_q has shape \(3,\) .* of shape \(1,\)",
    ),
    "used keys: shape": (
        flash_attn_varlen_func,
        (X, X, X, None, None, 2, 2),
        {"seqused_k": PACKED},
        r"seqused_k has shape \(3,\) .* of shape \(1,\)",
    ),
    "version": (flash_attn_func, (X, X, X), {"version": "fa9"}, "version='fa9' is unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(name):
    function, arguments, options, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        function(*arguments, **options)
