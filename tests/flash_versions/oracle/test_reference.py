"""The oracle against independent ones, in fp64: torch's SDPA, loops over single numbers, itself on
the same data in another form."""

import math

import pytest
import torch

from flash_versions import attention_reference
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.oracle.reference import SDPA, dropout_keep, philox, sdpa_forward


def inputs(m=7, n=9, heads=4, kv_heads=2, dim=6, dim_v=6, batch=2):
    """q, k, v in fp64."""
    q = torch.randn(batch, m, heads, dim, dtype=torch.float64)
    k = torch.randn(batch, n, kv_heads, dim, dtype=torch.float64)
    return q, k, torch.randn(batch, n, kv_heads, dim_v, dtype=torch.float64)


def same(x, y):
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def torch_sdpa(q, k, v, bias=None):
    heads = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=bias, enable_gqa=True)
    return o.transpose(1, 2)


def bias_of(m, n, allowed):
    """0 where allowed(query, key), -inf elsewhere."""
    rows = [[0.0 if allowed(i, j) else -math.inf for j in range(n)] for i in range(m)]
    return torch.tensor(rows, dtype=torch.float64)


MASKS = {
    "full": ({}, lambda i, j, ahead: True),
    "causal": ({"causal": True}, lambda i, j, ahead: j <= i + ahead),
    "window": ({"window": (2, 1)}, lambda i, j, ahead: -2 <= j - i - ahead <= 1),
    "left only": ({"window": (3, None)}, lambda i, j, ahead: j >= i + ahead - 3),
    "right only": ({"window": (None, 2)}, lambda i, j, ahead: j <= i + ahead + 2),
    "both": ({"window": (2, 5), "causal": True}, lambda i, j, ahead: 0 <= i + ahead - j <= 2),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("m", "n"), [(7, 7), (5, 9), (1, 6)])
def test_masks_are_torchs(name, m, n):
    options, allowed = MASKS[name]
    q, k, v = inputs(m, n, dim_v=5)
    bias = bias_of(m, n, lambda i, j: allowed(i, j, n - m))
    o, lse = attention_reference(q, k, v, **options)
    same(o, torch_sdpa(q, k, v, bias))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, 2)) * 6**-0.5
    same(lse, (scores + bias).logsumexp(-1))


def test_alibi_is_torchs_additive_bias():
    q, k, v = inputs(5, 8)
    slopes = torch.rand(2, 4)
    behind = torch.tensor([[float(abs(i + 3 - j)) for j in range(8)] for i in range(5)])
    bias = -slopes.double()[..., None, None] * behind
    same(attention_reference(q, k, v, alibi_slopes=slopes)[0], torch_sdpa(q, k, v, bias))


@pytest.mark.parametrize(
    ("softcap", "sink", "slope"), [(None, 0.3, None), (0.7, 0.3, None), (0.7, None, 0.5)]
)
def test_softcap_alibi_and_sink_of_one_query(softcap, sink, slope):
    q, k, v = inputs(1, 5, heads=1, kv_heads=1, dim_v=1, batch=1)
    s = 0.9 * (k[0, :, 0] @ q[0, 0, 0])
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s - (slope or 0) * torch.arange(4, -1, -1)
    total = s.exp().sum() + (0 if sink is None else math.exp(sink))
    options = {
        "sink": None if sink is None else torch.tensor([sink], dtype=torch.float64),
        "alibi_slopes": None if slope is None else torch.tensor([slope]),
    }
    o, lse = attention_reference(q, k, v, scale=0.9, softcap=softcap, **options)
    same(o.flatten(), (s.exp() / total @ v.flatten())[None])
    same(lse.flatten(), total.log()[None])


def test_a_query_without_a_key():
    q, k, v = inputs(5, 3)
    o, lse = attention_reference(q, k, v, causal=True)
    assert (o[:, :2] == 0).all() and (lse[:, :, :2] == -math.inf).all() and o[:, 2:].all()
    sink = torch.tensor([0.5, -1.0, 2.0, -math.inf], dtype=torch.float64)
    o, lse = attention_reference(q, k, v, causal=True, sink=sink)
    assert (o[:, :2] == 0).all() and (lse[:, :, :2] == sink[:, None]).all() and not o.isnan().any()
    without = attention_reference(q, k, v, causal=True)
    same(o[:, :, 3], without[0][:, :, 3])  # a sink of -inf is none


# ---- where the sequences lie ----

SLOPES = torch.tensor([[0.5, 0.1, 1.0, 0.0], [0.2, 0.4, 0.0, 2.0]])
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1), "softcap": 1.5},
    "alibi, sink": {"alibi_slopes": SLOPES, "sink": torch.tensor([0.5, -1, 2, 0]), "causal": True},
}


def options_of(name, b):
    """The options of sequence b alone."""
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][b]
    return options


def single(q, k, v, b, name):
    """(o, lse) of one sequence: (m, heads, dim) and (heads, m)."""
    o, lse = attention_reference(q[None], k[None], v[None], **options_of(name, b))
    return o[0], lse[0]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [((3, 4), (5, 2)), ((0, 4), (6, 0))])
def test_packed_sequences_are_calls_of_their_own(name, lengths):
    q, k, v = (x[0] for x in inputs(10, 8))
    cu_q, cu_k = (torch.tensor([0, x, x + y]) for x, y in lengths)
    o, lse = attention_reference(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **OPTIONS[name])
    assert o.shape == (10, 4, 6) and lse.shape == (4, 10)
    for b in range(2):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        expected = single(q[rows], k[keys], v[keys], b, name)
        same(o[rows], expected[0])
        same(lse[:, rows], expected[1])
    rest = cu_q[-1]  # rows of no sequence
    assert (o[rest:] == 0).all() and (lse[:, rest:] == -math.inf).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_starts_and_lengths_are_slices(name):
    q, k, v = inputs(3, 9)
    starts, ends = torch.tensor([2, -1]), torch.tensor([7, 99])
    o, lse = attention_reference(q, k, v, kv_starts=starts, kv_lengths=ends, **OPTIONS[name])
    for b, keys in enumerate((slice(2, 7), slice(0, 9))):
        expected = single(q[b], k[b, keys], v[b, keys], b, name)
        same(o[b], expected[0])
        same(lse[b], expected[1])
    o, lse = attention_reference(q, k, v, kv_starts=torch.tensor([8, 9]), kv_lengths=ends - 2)
    assert (o[0] == 0).all() and (lse[0] == -math.inf).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths_in", ["kv_lengths", "cu_seqlens_k"])
def test_pages_are_gathered(packed, lengths_in):
    q, _, _ = inputs(3)
    k, v = torch.full((2, 5, 4, 2, 6), math.nan, dtype=torch.float64)  # pages of 4 slots
    table = torch.tensor([[3, 0, -1], [1, 4, 2]])
    k[[3, 0, 1, 4, 2]], v[[3, 0, 1, 4, 2]] = torch.randn(2, 5, 4, 2, 6, dtype=torch.float64)
    lengths = torch.tensor([6, 11])
    k[0, 2:], v[0, 2:], k[2, 3:], v[2, 3:] = [math.nan] * 4  # past the ends
    given = {"kv_lengths": lengths, "cu_seqlens_k": torch.tensor([0, 6, 17])}[lengths_in]
    options = {"block_table": table, lengths_in: given, "causal": True}
    if packed:
        options["cu_seqlens_q"] = torch.tensor([0, 3, 6])
        o, lse = attention_reference(q.flatten(0, 1), k, v, **options)
        o, lse = o.unflatten(0, (2, 3)), lse.unflatten(1, (2, 3)).transpose(0, 1)
    else:
        o, lse = attention_reference(q, k, v, **options)
    for b, pages in enumerate(([3, 0], [1, 4, 2])):
        dense_k, dense_v = (torch.cat([x[p] for p in pages])[: lengths[b]] for x in (k, v))
        expected = single(q[b], dense_k, dense_v, b, "causal")
        same(o[b], expected[0])
        same(lse[b], expected[1])


# ---- dropout ----


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["ones", "pi"],
)  # fmt: skip
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers of Random123, the library of Philox's authors."""
    assert tuple(int(word) for word in philox(key, counter)) == words


def test_dropout_draws_what_the_specification_says():
    q, k, v = inputs(40, 50)
    request = Request(q, k, v, dropout_p=0.3, dropout_seed=torch.tensor([(3 << 32) + 5]))
    keep = dropout_keep(request, 0, 2, 40, 50)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 7, 31), (0, 3, 39, 49), (1, 0, 12, 0)]:
        word = philox((5, 3), (i, j, b * 4 + h, 0))[0]
        assert keep[b, h, i, j].item() == (int(word) >= round(0.3 * 2**32))


def test_dropout_drops_p_and_leaves_the_lse():
    q, k, v = inputs(5, 6)
    torch.manual_seed(7)
    o, lse = attention_reference(q, k, v, dropout_p=0.4)
    torch.manual_seed(7)
    keep = dropout_keep(make_request(q, k, v, dropout_p=0.4), 0, 2, 5, 6)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, 2)) * 6**-0.5
    p = scores.softmax(-1) * keep / 0.6
    same(o, torch.einsum("bhmn,bnhd->bmhd", p, v.repeat_interleave(2, 2)))
    same(lse, scores.logsumexp(-1))
    assert not torch.equal(o, attention_reference(q, k, v, dropout_p=0.4)[0])  # another seed


# ---- gradients ----

FEATURES = {
    "plain": {},
    "causal, rows without a key": {"causal": True},
    "window": {"window": (1, 0)},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.3, 1.0])},
    "dropout": {"dropout_p": 0.4},
    "lengths": {"kv_lengths": torch.tensor([1])},
    "all": {"causal": True, "softcap": 2.0, "alibi_slopes": SLOPES[0, :2], "dropout_p": 0.3},
}


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_are_those_of_finite_differences(name):
    leaves = [
        x.requires_grad_() for x in inputs(4, 2, heads=2, kv_heads=1, dim=3, dim_v=2, batch=1)
    ]
    if name not in ("plain", "causal, rows without a key"):
        leaves.append(torch.randn(2, dtype=torch.float64, requires_grad=True))  # a sink

    def run(q, k, v, sink=None):
        torch.manual_seed(1)
        o, lse = attention_reference(q, k, v, sink=sink, **FEATURES[name])
        return o, lse.nan_to_num(neginf=0.0)

    torch.autograd.gradcheck(run, leaves)


# ---- torch's SDPA as a baseline ----

SDPA_CASES = {
    "causal, more queries": ({"causal": True}, 9, 5),
    "window": ({"window": (2, 1)}, 7, 7),
    "right only, square": ({"window": (None, 2)}, 7, 7),
    "lengths, causal": ({"kv_lengths": torch.tensor([12, 0]), "causal": True}, 3, 9),
}


@pytest.mark.parametrize("name", SDPA_CASES)
def test_sdpa_means_the_same(name):
    options, m, n = SDPA_CASES[name]
    leaves = [x.requires_grad_() for x in inputs(m, n, dim_v=5)]
    request = make_request(*leaves, **options)
    assert SDPA.unsupported(request) is None
    o, _, _ = sdpa_forward(request)
    expected, _ = attention_reference(*leaves, **options)
    same(o, expected)
    do = torch.randn_like(o)
    for x, y in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(expected, leaves, do)):
        same(x, y)


def test_fp8_rounds_the_inputs_and_p_and_nothing_else():
    """In single numbers: one query, two keys whose scores differ by ln 3, values 1 and 0. P is 1
    and 1/3, times 2^8 256 and 85.33, which e4m3 rounds to 88.
    """
    q, k, v = torch.zeros(1, 1, 1, 16), *torch.zeros(2, 1, 2, 1, 16)
    v[:, 1] = 1.0
    q, k, v, other = (x.to(torch.float8_e4m3fn) for x in (q, k, v, 1 - v))
    sink = torch.tensor([-(3.0**0.5)])
    options = {"alibi_slopes": torch.tensor([3.0]).log(), "v_descale": torch.tensor(0.5)}
    for value, largest in ((v, 256), (other, 88)):
        o, lse = attention_reference(q, k, value, **options)
        assert o.dtype == torch.bfloat16
        expected = torch.full_like(o, 0.5 * largest / (256 * 4 / 3))
        torch.testing.assert_close(o, expected, atol=2**-11 * largest / 64, rtol=0)
        torch.testing.assert_close(lse, torch.full((1, 1, 1), math.log(4 / 3)))
    _, lse = attention_reference(q, k, v, sink=sink, **options)
    torch.testing.assert_close(lse, torch.full((1, 1, 1), math.log(4 / 3 + math.exp(sink))))
