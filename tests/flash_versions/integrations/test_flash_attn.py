"""FlashAttention 2's functions: its signatures, and what each of them means to `attention`."""

import inspect

import pytest
import torch

from flash_versions import attention, flash_attn, masks
from flash_versions.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_versions.versions.oracle.budget import assess, compare
from tests.helpers.kernels.budget import assert_ok

OPTIONS = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
OPTIONS += "return_attn_probs"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {OPTIONS} block_table",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {OPTIONS}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_places_of_flash_attention_2(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == SIGNATURES[name].split()


# ---- one call in FlashAttention's terms and in ours ----

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
CALLS = {
    "nothing": ({}, {}),
    "causal": ({"causal": True, "deterministic": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "window": ({"window_size": (4, 2)}, {"window": (4, 2)}),
    "window: a tensor": ({"window_size": torch.tensor([4, -1])}, {"window": (4, None)}),
    "window: two negative numbers": ({"window_size": (-2, -3)}, {}),
    "window: right only": ({"window_size": [None, 0]}, {"causal": True}),
    "window: as transformers": (
        {"window_size": (4, 4), "causal": True},
        {"window": (4, None), "causal": True},
    ),
    "softcap": ({"softcap": 0.7}, {"softcap": 0.7}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    "sink": ({"s_aux": SINK}, {"sink": SINK}),
}
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
    assert_ok(assess(out, lse, q, k, v, **options))


@pytest.mark.parametrize("call", CALLS)
def test_dense(call, device):
    theirs, ours = (on(device, x) for x in CALLS[call])
    q, kv = dense(device)
    k, v = kv.unbind(2)
    result = flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    assert result[1].shape == (2, 4, 9)
    assert_within_budget(result, q, k, v, **ours)
    assert torch.equal(flash_attn_func(q, k, v, **theirs), result[0])


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
    # transformers passes a tensor, whose value would cost a synchronisation.
    lengths = (*lengths, *[torch.empty((), device="meta")] * 2)
    assert_same(flash_attn_varlen_func(q, k, v, *lengths, *options), expected)
    assert_same(flash_attn_varlen_kvpacked_func(q, kv, *lengths, *options), expected)
    ours["cu_seqlens_k"] = lengths[0]
    expected = (*attention(q, q, q, **ours), None)
    qkv = torch.stack((q, q, q), 1)
    assert_same(flash_attn_varlen_qkvpacked_func(qkv, lengths[0], 12, *options), expected)


def test_dropout_is_drawn_as_by_attention(device):
    q, kv = dense(device)
    k, v = kv.unbind(2)
    torch.manual_seed(1)
    out = flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(1)
    assert torch.equal(out, attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(out, flash_attn_func(q, k, v, 0.5))


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


# ---- chunks and used rows: each sequence by itself, forward and backward ----

MANY = torch.tensor([0, 9, 13, 13, 21]), torch.tensor([0, 4, 12, 15, 20])  # one without queries
NO_OWNER = PACKED - torch.tensor([0, 0, 3])  # the last three rows are of no sequence
CAUSAL = {"causal": True}
WINDOW = CAUSAL | {"window_size": (3, -1), "softcap": 2.0}
# cu_seqlens_q, cu_seqlens_k, the queries and keys that each sequence uses, chunk, other options
ALONE = {
    "chunks": (None, None, None, None, 4, CAUSAL),
    "full chunks": (None, None, None, None, 4, {}),
    "chunks, window, alibi, sink": (PACKED, PACKED_K, None, None, 4, WINDOW),
    "chunks of packed": (*MANY, None, None, 4, CAUSAL),
    "chunks of padded keys": (PACKED, None, None, None, 4, CAUSAL),
    "chunks: each begins in all": (PACKED, None, None, None, 12, CAUSAL),
    "chunks of padded queries": (None, PACKED_K, None, None, 4, CAUSAL),
    "no queries, too many": (PACKED, PACKED_K, [-2, 99], None, 0, CAUSAL),
    "queries, rows of no sequence": (NO_OWNER, None, [4, 9], None, 0, CAUSAL),
    "queries of padded": (None, None, [4, 0], None, 0, CAUSAL),
    "no keys, too many": (PACKED, PACKED_K, None, [-2, 99], 4, CAUSAL),
    "keys of padded": (None, None, None, [11, 0], 4, CAUSAL),
}


def rows_of(cu, used, batch, length):
    """Of each sequence, the index of the rows that it uses."""
    found = []
    for b in range(batch):
        first, end = (0, length) if cu is None else cu[b : b + 2].tolist()
        end = end if used is None else min(end, first + max(used[b], 0))
        found.append((b, slice(first, end)) if cu is None else (slice(first, end),))
    return found


def seen_of(k, q, chunk, causal=True):
    if not chunk:
        return {"causal": causal}
    return masks.chunks(k.shape[1], chunk, queries=q.shape[1], causal=causal, device=q.device)


@pytest.mark.parametrize("name", ALONE)
def test_each_sequence_by_itself(name, device):
    """With the rows that it uses; no trace of the others, whatever they hold."""
    cu_q, cu_k, used_q, used_k, chunk, theirs = ALONE[name]
    cu_q, cu_k = (x if x is None else x.to(device) for x in (cu_q, cu_k))
    q = (dense if cu_q is None else packed)(device)[0].requires_grad_()
    kv = (dense if cu_k is None else packed)(device)[1]
    k, v = (x.clone().requires_grad_() for x in kv.unbind(kv.dim() - 3))
    batch = 2 if cu_q is None else cu_q.shape[0] - 1
    rows = rows_of(cu_q, used_q, batch, 9), rows_of(cu_k, used_k, batch, 14)
    idle = [torch.ones(x.shape[:-2], dtype=torch.bool, device=device) for x in (q, k)]
    for of_tensor, where in zip(rows, idle):
        for row in of_tensor:
            where[row] = False
    with torch.no_grad():
        q[idle[0]] = k[idle[1]] = v[idle[1]] = float("nan")
    used = {"seqused_q": used_q, "seqused_k": used_k}
    used = {x: torch.tensor(n, device=device).int() for x, n in used.items() if n is not None}
    options = {"attention_chunk": chunk, "return_attn_probs": True} | theirs
    changed = "window" in name
    slopes = torch.rand(batch, 4, device=device)
    if changed:
        options |= {"alibi_slopes": slopes, "s_aux": SINK.to(device)}
    if name.startswith("chunk") and cu_q is cu_k is None:
        out, lse, nothing = flash_attn_func(q, k, v, **options)
    else:
        out, lse, nothing = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 12, 14, **used, **options)
    assert nothing is None and out.shape == q.shape
    assert lse.shape == ((2, 4, 9) if cu_q is None else (4, 21))
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    assert not (out[idle[0]].any() or dq[idle[0]].any() or dk[idle[1]].any() or dv[idle[1]].any())
    assert (lse.mT[idle[0]] == -torch.inf).all()
    ours = {"window": (3, None), "softcap": 2.0, "sink": SINK.to(device)} if changed else {}
    for b, (i, j) in enumerate(zip(*rows)):
        if i[-1].start == i[-1].stop:
            continue
        own = [x[i][None] for x in (out, q)] + [x[j][None] for x in (k, v)]
        found = compare(
            *own, **ours, **seen_of(own[2], own[1], chunk, "causal" in theirs),
            alibi_slopes=slopes[b] if changed else None,
            lse=lse.mT[i].mT[None], do=do[i][None], dlse=dlse.mT[i].mT[None],
            dq=dq[i][None], dk=dk[j][None], dv=dv[j][None],
        )  # fmt: skip
        assert_ok(found)


# ---- gradients: one tensor for stacked arguments, with the bits of separate ones ----

STACKED = {  # the functions of stacked and of separate tensors, which tensors, lengths of both
    "kvpacked": (flash_attn_kvpacked_func, flash_attn_func, dense, (), ()),
    "varlen kvpacked": (
        flash_attn_varlen_kvpacked_func, flash_attn_varlen_func, packed,
        (PACKED, PACKED_K, 12, 14), (PACKED, PACKED_K, 12, 14),
    ),
    "varlen qkvpacked": (
        flash_attn_varlen_qkvpacked_func, flash_attn_varlen_func, packed,
        (PACKED, 12), (PACKED, PACKED, 12, 12),
    ),
}  # fmt: skip


@pytest.mark.parametrize("door", STACKED)
def test_gradient_of_stacked_tensors(door, device):
    stacked_door, plain_door, make, *lengths = STACKED[door]
    theirs, ours = ([*on(device, dict(enumerate(x))).values()] for x in lengths)
    q, kv = make(device)
    dim = kv.dim() - 3
    apart = (q, q + 1, q - 1) if "qkv" in door else (q, *kv.unbind(dim))
    stacked = [torch.stack(apart, dim)] if "qkv" in door else [q, kv]
    leaves, stacked = ([x.clone().requires_grad_() for x in y] for y in (apart, stacked))
    options = {"causal": True, "window_size": (6, -1), "return_attn_probs": True}
    out, lse, _ = stacked_door(*stacked, *theirs, **options)
    grads = [torch.randn_like(out), torch.randn_like(lse)]
    found = torch.autograd.grad([out, lse], stacked, grads)
    out, lse, _ = plain_door(*leaves, *ours, **options)
    dq, dk, dv = torch.autograd.grad([out, lse], leaves, grads)
    stack = torch.stack((dq, dk, dv) if "qkv" in door else (dk, dv), dim)
    assert torch.equal(found[-1], stack) and stack.any()
    assert torch.equal(found[0], stack if "qkv" in door else dq)


# ---- refusals ----

X = torch.ones(1, 2, 2, 16)
REFUSED = {
    "window: a number": (flash_attn_func, (X, X, X), {"window_size": 5}, "window_size=5 must be"),
    "qkv: two": (flash_attn_qkvpacked_func, (torch.ones(1, 2, 2, 2, 16),), {}, "qkv has .* 3, h"),
    "chunk: below 1": (flash_attn_func, (X, X, X), {"attention_chunk": -4}, "attention_chunk=-4 m"),
    "used queries: packed": (
        flash_attn_varlen_func,
        (X[0], X, X, None, None, 2, 2),
        {"seqused_q": PACKED[:1]},
        r"q has shape \(2, 2, 16\); with seqused_q and without cu_seqlens_q .*\(batch, length",
    ),
    "used keys: shape": (
        flash_attn_varlen_func,
        (X, X, X, None, None, 2, 2),
        {"seqused_k": PACKED},
        r"seqused_k has shape \(3,\) .* of shape \(1,\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(name):
    function, arguments, options, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        function(*arguments, **options)
