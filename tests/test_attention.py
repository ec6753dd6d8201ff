"""Every version against the fp64 oracle, within the error budget: the equivalence suite."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flash_versions import VERSIONS, attention, attention_reference
from flash_versions.budget import assess
from flash_versions.version import Request

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """Shape and options of one call: M queries, N keys."""

    name: str
    M: int
    N: int
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    causal: bool = False
    batch: int = 1
    scale: float | None = None
    kv_lengths: tuple[int, ...] | None = None

    def inputs(self, dtype, device):
        """q, k, v with a non-zero mean in v, so that an output of zeros is far from right."""
        q = torch.randn(self.batch, self.M, self.heads, self.head_dim, device=device)
        k, v = torch.randn(2, self.batch, self.N, self.kv_heads, self.head_dim, device=device)
        return tuple(x.to(dtype) for x in (q, k, v + 0.5))

    def options(self, device):
        lengths = self.kv_lengths and torch.tensor(self.kv_lengths, device=device)
        return {"causal": self.causal, "scale": self.scale, "kv_lengths": lengths}


CASES = [
    Case("one query, one key", 1, 1, causal=True),
    Case("one query, many keys", 1, 200, heads=4),
    Case("full, several blocks", 150, 200),
    Case("causal, several blocks", 200, 200, causal=True),
    Case("one past a block", 129, 129, causal=True, heads=1, kv_heads=1),
    Case("exactly one block", 64, 64, causal=True),
    Case("fewer queries than keys", 40, 170, causal=True),
    Case("more queries than keys: rows without a key", 170, 40, causal=True),
    Case("no keys at all", 3, 0),
    Case("no keys at all, causal", 3, 0, causal=True),
    Case("no queries", 0, 5),
    Case("empty batch", 4, 5, batch=0),
    Case("grouped heads 8:4", 33, 70, heads=8, kv_heads=4, causal=True),
    Case("multi-query 8:1", 33, 70, heads=8, kv_heads=1, causal=True),
    Case("grouped heads 6:2, not a power of two", 50, 50, heads=6, kv_heads=2, causal=True),
    Case("head dim 1", 20, 30, head_dim=1),
    Case("head dim 24", 40, 70, head_dim=24, causal=True),
    Case("head dim 80", 40, 70, head_dim=80, causal=True),
    Case("head dim 128", 70, 100, head_dim=128, causal=True),
    Case("head dim 192", 40, 70, head_dim=192),
    Case("head dim 256", 40, 70, head_dim=256, causal=True, heads=1, kv_heads=1),
    Case("batch of 3", 20, 70, batch=3, causal=True),
    Case("large scale: nearly one-hot", 70, 70, causal=True, scale=3.0),
    Case("tiny scale: nearly uniform", 70, 70, scale=1e-4),
    Case("lengths per row", 20, 150, batch=4, kv_lengths=(150, 64, 1, 0)),
    Case("lengths per row, causal", 20, 150, batch=4, causal=True, kv_lengths=(150, 64, 10, 0)),
    Case("lengths per row, one query", 1, 150, batch=3, heads=4, kv_lengths=(150, 65, 1)),
    Case("lengths past the end and below 0", 5, 20, batch=2, kv_lengths=(99, -3)),
]  # fmt: skip
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_version = pytest.mark.parametrize("version", VERSIONS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def assert_within_budget(o, lse, q, k, v, **options):
    for name, accuracy in assess(o, lse, q, k, v, **options).items():
        assert accuracy.ok, f"{name}: {accuracy}"


@by_name
@by_dtype
@by_version
def test_equivalence(version, dtype, case, device):
    q, k, v = case.inputs(dtype, device)
    options = case.options(device)
    o, lse = attention(q, k, v, version=version, return_lse=True, **options)
    assert o.shape == q.shape and o.dtype == dtype
    assert lse.shape == (case.batch, case.heads, case.M) and lse.dtype == torch.float32
    assert_within_budget(o, lse, q, k, v, **options)


@by_dtype
@by_version
def test_huge_scores_do_not_overflow(version, dtype, device):
    """In fp16 plain PyTorch overflows on these; the kernels' scores are fp32."""
    q, k, v = Case("", 40, 70, causal=True).inputs(dtype, device)
    q, k = q * 300, k * 300
    o, lse = attention(q, k, v, version=version, causal=True, return_lse=True)
    assert o.isfinite().all() and lse.isfinite().all()
    assert_within_budget(o, lse, q, k, v, causal=True)


LENGTHS = {
    "every other": lambda device: torch.tensor([70, 9, 30, 9], device=device)[::2],
    "one for all": lambda device: torch.tensor([30], device=device).expand(2),
    "64-bit, past 32 bits": lambda device: torch.tensor([2**32, -(2**33) + 5], device=device),
    "32-bit, at the limits": lambda device: torch.tensor(
        [2**31 - 1, -(2**31)], dtype=torch.int32, device=device
    ),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@by_version
def test_lengths_of_any_layout_and_size(version, causal, lengths, device):
    q, k, v = Case("", 40, 70, batch=2).inputs(torch.float32, device)
    given = LENGTHS[lengths](device)
    options = {"causal": causal, "kv_lengths": given}
    o, lse = attention(q, k, v, version=version, return_lse=True, **options)
    clamped = given.clamp(0, 70)
    assert_within_budget(o, lse, q, k, v, causal=causal, kv_lengths=clamped)


LAYOUTS = {
    "(B, H, S, D) transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "slice of a packed QKV": lambda x: torch.stack((x, x, x), 2)[:, :, 1],
    "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "part of a wider head": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@by_version
def test_any_strides(version, layout, device):
    q, k, v = Case("", 50, 70, heads=4, kv_heads=2, batch=2).inputs(torch.float32, device)
    q, k, v = (LAYOUTS[layout](x) for x in (q, k, v))
    o, lse = attention(q, k, v, version=version, causal=True, return_lse=True)
    assert_within_budget(o, lse, q, k, v, causal=True)


@by_version
def test_expanded_keys_with_stride_zero(version, device):
    q, k, v = Case("", 30, 40, heads=4, kv_heads=1).inputs(torch.float32, device)
    q = q.expand(3, -1, -1, -1)
    k, v = (x.expand(3, -1, 4, -1) for x in (k, v))
    assert k.stride(0) == 0 and k.stride(2) == 0
    o, lse = attention(q, k, v, version=version, return_lse=True)
    assert_within_budget(o, lse, q, k, v)


@by_version
@pytest.mark.parametrize("far", ["batch", "row", "head"])
def test_offsets_past_32_bits(version, far, device):
    """Index and stride both fit 32 bits, their product does not; the buffer is mostly untouched."""
    q, k, v = Case("", 3, 3, heads=3, kv_heads=3, batch=3).inputs(torch.float16, device)
    apart = 2**30 + 64
    strides = {"batch": (apart, 256, 64), "row": (256, apart, 64), "head": (1024, 256, apart)}[far]
    if device == "cuda":
        buffer = torch.zeros(2 * apart + 4096, dtype=torch.float16, device=device)
    else:
        buffer = torch.from_numpy(np.zeros(2 * apart + 4096, dtype=np.float16))  # lazily mapped
    far_k = buffer.as_strided(k.shape, (*strides, 1))
    far_k.copy_(k)
    o, lse = attention(q, far_k, v, version=version, return_lse=True)
    assert_within_budget(o, lse, q, k, v)


@by_version
def test_future_keys_change_nothing(version, device):
    q, k, v = Case("", 70, 70).inputs(torch.bfloat16, device)
    before = attention(q, k, v, version=version, causal=True)[:, :40]
    k[:, 40:], v[:, 40:] = 7.0, -7.0
    after = attention(q, k, v, version=version, causal=True)[:, :40]
    assert torch.equal(before, after)


@by_version
def test_keys_past_the_length_are_never_read(version, device):
    q, k, v = Case("", 5, 100, batch=2).inputs(torch.float32, device)
    lengths = torch.tensor([70, 3], device=device)
    clean = attention(q, k, v, version=version, kv_lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        k[row, length:], v[row, length:] = float("nan"), float("nan")
    assert torch.equal(attention(q, k, v, version=version, kv_lengths=lengths), clean)


@by_version
def test_padding_of_the_head_dim_is_never_read(version, device):
    """24 dims are padded to 32 inside; in memory, what follows them belongs to somebody else."""
    q, k, v = Case("", 70, 140, head_dim=24).inputs(torch.float32, device)
    wide = [torch.full((*x.shape[:3], 32), float("nan"), device=device) for x in (q, k, v)]
    for x, y in zip((q, k, v), wide):
        y[..., :24] = x
    o = attention(*(x[..., :24] for x in wide), version=version)
    assert torch.equal(o, attention(q, k, v, version=version))


@by_version
def test_batch_rows_are_independent(version, device):
    q, k, v = Case("", 30, 60, batch=3, heads=4).inputs(torch.bfloat16, device)
    order = [2, 0, 1]
    o = attention(q, k, v, version=version, causal=True)
    shuffled = attention(q[order], k[order], v[order], version=version, causal=True)
    assert torch.equal(shuffled, o[order])


@by_version
def test_same_inputs_same_bits(version, device):
    q, k, v = Case("", 100, 100, heads=4).inputs(torch.bfloat16, device)
    results = [attention(q, k, v, version=version, causal=True) for _ in range(3)]
    assert all(torch.equal(o, results[0]) for o in results)


def test_auto_takes_the_newest_version_that_can(device):
    q, k, v = Case("", 8, 8).inputs(torch.float32, device)
    newest = list(VERSIONS)[-1]
    assert torch.equal(attention(q, k, v), attention(q, k, v, version=newest))


# ---- refusals: every one a sentence that names the tensor, what was given and what would work ----


def arguments(**changes):
    q, k, v = Case("", 4, 4).inputs(torch.float32, "cpu")
    return {"q": q, "k": k, "v": v} | changes


ones = torch.ones
REFUSED = {
    "q is 3-D": (arguments(q=ones(4, 2, 64)), r"q has shape \(4, 2, 64\).*\(batch, length"),
    "v unlike k": (arguments(v=ones(1, 5, 2, 64)), r"k has shape .* v \(1, 5, 2, 64\)"),
    "other batch": (arguments(q=ones(2, 4, 2, 64)), r"q has shape \(2,.*batch and head_dim"),
    "other head_dim": (arguments(q=ones(1, 4, 2, 32)), "batch and head_dim must be equal"),
    "heads do not divide": (arguments(q=ones(1, 4, 3, 64)), "3 heads.*multiple of k's 2"),
    "mixed dtypes": (arguments(k=ones(1, 4, 2, 64).half()), "k has dtype torch.float16"),
    "integers": (arguments(**dict.fromkeys("qkv", ones(1, 4, 2, 64).int())), "q has dtype"),
    "other device": (arguments(k=ones(1, 4, 2, 64, device="meta")), "k is on meta, q is on cpu"),
    "last stride": (arguments(q=ones(1, 4, 64, 2).mT), "q has stride 2 in its last dimension"),
    "no head_dim": (arguments(**dict.fromkeys("qkv", ones(1, 4, 2, 0))), "at least 1"),
    "scale 0": (arguments(scale=0.0), r"scale=0.0 must be a positive"),
    "scale NaN": (arguments(scale=float("nan")), "scale=nan must be a positive"),
    "scale negative": (arguments(scale=-1.0), "scale=-1.0 must be a positive"),
    "lengths: shape": (arguments(kv_lengths=torch.tensor([1, 2])), r"kv_lengths .* shape \(1,\)"),
    "lengths: dtype": (arguments(kv_lengths=torch.tensor([1.0])), "kv_lengths .*int32 or int64"),
    "no splits": (arguments(num_splits=0), "num_splits=0 must be an integer of at least 1"),
    "splits: a flag": (arguments(num_splits=True), "num_splits=True must be an integer"),
    "splits: a fraction": (arguments(num_splits=2.0), "num_splits=2.0 must be an integer"),
    "causal: a text": (arguments(causal="False"), "causal='False' must be True or False"),
    "q: a list": (arguments(q=[1.0]), "q is a list; it must be a torch.Tensor"),
    "lengths: a list": (arguments(kv_lengths=[3]), "kv_lengths is a list"),
    "lengths: device": (arguments(kv_lengths=ones(1, dtype=torch.int32, device="meta")), "on meta"),
    "no key heads": (arguments(**dict.fromkeys("kv", ones(1, 4, 0, 64))), "multiple of k's 0"),
    "scale: vanishes in fp32": (arguments(scale=1e-46), "scale=1e-46 must be a positive"),
    "scale: overflows in fp32": (arguments(scale=1e300), "scale=1e[+]300 must be a positive"),
    "scale: a text": (arguments(scale="1"), "scale='1' must be a positive"),
    "splits in sdpa": (arguments(version="sdpa", num_splits=2), "'sdpa': num_splits=2"),
    "unknown version": (arguments(version="fa9"), "version='fa9' is unknown; there are auto, fa1"),
    "splits in fa1": (arguments(version="fa1", num_splits=2), "'fa1': num_splits=2.*'fa2'"),
    "lse of sdpa": (arguments(version="sdpa", return_lse=True), "'sdpa'.*does not return the LSE"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_would_work(name):
    given, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        attention(**given)


@by_version
def test_version_limits(version, device):
    def request(dtype=torch.float32, head_dim=64, **changes):
        x = torch.ones(1, 2, 2, head_dim, dtype=dtype, device=device)
        return Request(x, x, x, **changes)

    limits = VERSIONS[version].unsupported
    assert limits(request()) is None
    assert "torch.float64" in limits(request(torch.float64))
    assert "head_dim 257" in limits(request(head_dim=257))
    leaf = torch.ones(1, 2, 2, 64, device=device, requires_grad=True)
    assert "no backward" in limits(Request(leaf, leaf, leaf))
    with torch.no_grad():
        assert limits(Request(leaf, leaf, leaf)) is None


def test_oracle_agrees_with_torch_and_is_differentiable():
    """The specification itself: torch's SDPA in fp64 with an explicit mask, and gradcheck."""
    q, k, v = (x.double() for x in Case("", 7, 9, heads=4).inputs(torch.float32, "cpu"))
    mask = torch.ones(7, 9, dtype=torch.bool).tril(2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    o, lse = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(2, 2)) / 8
    torch.testing.assert_close(lse, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))
    leaves = [x[..., :3].clone().requires_grad_() for x in (q[:, :4], k[:, :2], v[:, :2])]
    # 4 queries on 2 keys: the first two see nothing; their gradient is zero, not NaN.
    torch.autograd.gradcheck(lambda *x: attention_reference(*x, causal=True)[0], leaves)


@pytest.mark.parametrize("case", [c for c in CASES if c.batch], ids=lambda case: case.name)
def test_sdpa_baseline_means_the_same(case):
    q, k, v = case.inputs(torch.float32, "cpu")
    options = case.options("cpu")
    o = attention(q, k, v, version="sdpa", **options)
    assert_within_budget(o, None, q, k, v, **options)
