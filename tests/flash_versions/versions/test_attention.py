"""Every version against the fp64 oracle, forward and backward, within the error budget: the
equivalence suite.
"""

from itertools import product

import numpy as np
import pytest
import torch

from flash_versions import VERSIONS, attention
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.request import make_request
from flash_versions.simulator.checking import Watch
from flash_versions.versions.fa3.forward import FEW_ROWS, left_for_options, left_to_gathering
from flash_versions.versions.oracle.budget import assess_request
from flash_versions.versions.oracle.suite import CASES, DTYPES, Case
from tests.helpers.kernels.budget import (
    assert_gradients_right,
    assert_ok,
    assert_right,
    assert_within_budget,
)
from tests.helpers.rotation import rotated

# Every dtype of cases that have every feature, of FA2 and of FA1; of the others one, for the next
# version another.
EVERY_DTYPE = ("everything at once", "window, lengths per row")
LATER = ("fa3", "fa4")  # which leave options, few queries and gradients to FA2's but on Hopper


def is_plain(case):
    """Whether the kernels of FA3 and FA4 have no less than this to do."""
    given = case.kv_lengths, case.kv_starts, case.alibi, case.sink, *({*case.options} - {"scale"})
    return not any(given) and case.starts is case.ends is None and 0 not in (case.batch, case.N)


def repeats_fa2(version, case):
    """Whether a later version leaves the case to FA2's kernels, but on Hopper."""
    return version in LATER and not (is_plain(case) and case.M >= FEW_ROWS)


def marks(version, i, j, k):
    """Of a version, a dtype and a case. What repeats FA2's kernels runs on a GPU, and one case of
    it everywhere.
    """
    every = CASES[k].name in EVERY_DTYPE
    rest = (i + j + k) % len(DTYPES)
    if repeats_fa2(version, CASES[k]) and (rest or not every):
        return pytest.mark.gpu
    return pytest.mark.wide if rest and not every else ()


EVERYTHING = [
    pytest.param(
        version,
        dtype,
        case,
        id=f"{version}-{str(dtype).removeprefix('torch.')}-{case.name}",
        marks=marks(version, i, j, k),
    )
    for (i, version), (j, dtype), (k, case) in product(
        enumerate(VERSIONS), enumerate(DTYPES), enumerate(CASES)
    )
]


def repeats_a_backward(version):
    """Whether a version has the backward of one before, but on Hopper."""
    return version in LATER


by_version = pytest.mark.parametrize("version", VERSIONS)
# Of options or gradients, which FA3 and FA4 have kernels for on a GPU only.
by_backward = pytest.mark.parametrize(
    "version", [pytest.param(v, marks=[pytest.mark.gpu] * (v in LATER)) for v in VERSIONS]
)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def check(version, q, k, v, dlse=True, backward=True, **options):
    """One call, forward and backward, against its budget; skips what the version does not offer.

    The gradient of the LSE is NaN where a query sees no key. Simulated kernels are watched: no
    access outside of a tensor, of memory that nothing wrote, or that two programs race for, and NaN
    where a mask hides what is loaded.
    """
    with_gradient = options.get("block_table") is None  # which is for inference
    leaves = [x.detach().requires_grad_(with_gradient) for x in (q, k, v)]
    torch.manual_seed(1)  # the same dropout in both
    request = make_request(*leaves, **options)
    if reason := VERSIONS[version].unsupported(request):
        pytest.skip(reason)
    given = {name: x for name, x in request._asdict().items() if torch.is_tensor(x)}
    watch = Watch({name: x.detach() for name, x in given.items()})
    torch.manual_seed(1)
    with watch.watching():
        o, lse = attention(*leaves, version=version, return_lse=True, **options)
    assert watch.seen or q.is_cuda or 0 in (*q.shape, *k.shape)
    assert o.shape == (*q.shape[:-1], v.shape[-1]) and o.dtype == q.dtype
    assert lse.dtype == torch.float32 and not lse.isnan().any()
    results = {"o": o.detach(), "lse": lse.detach()}
    if not backward:
        assert_ok(assess_request(results, request))
        return
    do = torch.randn(o.shape, device=o.device).to(o.dtype)
    unseeing = lse == -torch.inf
    dlse = torch.randn_like(lse).masked_fill(unseeing, torch.nan) if dlse else None
    if options.get("sink") is not None:
        leaves.append(options["sink"])
    outputs, upstream = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
    with watch.watching():
        gradients = torch.autograd.grad(outputs, leaves, upstream)
    results |= dict(zip(("dq", "dk", "dv", "dsink"), gradients))
    dlse = None if dlse is None else dlse.masked_fill(unseeing, 0.0)
    assert_ok(assess_request(results, request, do, dlse))


@pytest.mark.parametrize(("version", "dtype", "case"), EVERYTHING)
def test_equivalence(version, dtype, case, device):
    """Simulated, which is slow, a backward that is another version's runs for one case only."""
    q, k, v = case.inputs(dtype, device)
    backward = device == "cuda" or not repeats_a_backward(version) or case is CASES[-1]
    check(version, q, k, v, backward=backward, **case.all_options(device))


def test_what_is_left_to_fa2_is_told_by_the_case():
    """On the CPU, where tiles may be as large as they like; and they serve nothing else."""
    for case in (x for x in CASES if x.batch and x.M and x.N):
        request = make_request(*case.inputs(torch.float32, "cpu"), **case.all_options("cpu"))
        reason = left_to_gathering(request) or left_for_options(request)
        assert repeats_fa2("fa3", case) == (reason is not None), (case.name, reason)


FEW = [case for case in CASES if is_plain(case) and 0 < case.M < FEW_ROWS]


@pytest.mark.parametrize(("case", "dtype"), rotated(FEW, DTYPES))
@pytest.mark.parametrize("version", LATER)
def test_few_queries_in_the_portable_kernels_themselves(version, case, dtype, device):
    """They serve these, too, only not as fast: short, and with every group and head_dim."""
    request = in_vectors(make_request(*case.inputs(dtype, device), **case.all_options(device)))
    with torch.no_grad():
        o, lse, _ = VERSIONS[version].variants["portable"](request)
    assert_right(request, o, lse)


@by_version
def test_huge_scores_do_not_overflow(version, device):
    """In fp16 plain PyTorch overflows on these; the kernels' scores are fp32."""
    q, k, v = Case("", 66, 70, causal=True).inputs(torch.float16, device)
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
@by_backward
def test_lengths_of_any_layout_and_size(version, lengths, device):
    q, k, v = Case("", 40, 70, batch=2).inputs(torch.float32, device)
    given = LENGTHS[lengths](device)
    o, lse = attention(q, k, v, version=version, return_lse=True, causal=True, kv_lengths=given)
    clamped = given.clamp(0, 70)
    assert_within_budget(o, lse, q, k, v, causal=True, kv_lengths=clamped)


LAYOUTS = {
    "part of a wider head": lambda x: torch.cat((x, x * torch.nan), -1)[..., : x.shape[-1]],
    "(B, H, S, D) transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of a packed QKV": lambda x: torch.stack((x, x, x), 2)[:, :, 1],
    "one head for all": lambda x: x[:1, :, :1].expand(x.shape),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other row": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


def quick(layouts, number):
    """The first ones; the others are slow."""
    return [
        pytest.param(x, marks=[pytest.mark.slow] * (i >= number)) for i, x in enumerate(layouts)
    ]


@pytest.mark.parametrize("layout", quick(LAYOUTS, 4))
@by_version
def test_any_strides(version, layout, device):
    """24 dims are padded to 32 inside; in memory, what follows them belongs to somebody else."""
    case = Case("", 66, 70, heads=2, kv_heads=1, batch=2, head_dim=24)
    q, k, v = (LAYOUTS[layout](x) for x in case.inputs(torch.float32, device))
    backward = device == "cuda" or not repeats_a_backward(version)
    check(version, q, k, v, backward=backward, causal=True)


GRADIENT_LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded over the batch": lambda x: x[:1].expand(x.shape),
    "expanded over heads and rows": lambda x: x[:, :1, :1].expand(x.shape),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "every other dim": lambda x: x.repeat_interleave(2, 3)[..., ::2],
}


@pytest.mark.parametrize("layout", quick(GRADIENT_LAYOUTS, 2))
@by_backward
def test_gradients_of_any_strides(version, layout, device):
    leaves = [
        x.requires_grad_() for x in Case("", 40, 50, batch=2, heads=4).inputs(torch.float32, device)
    ]
    o = attention(*leaves, version=version)
    do = GRADIENT_LAYOUTS[layout](torch.randn_like(o))
    gradients = torch.autograd.grad(o, leaves, do)
    assert_gradients_right(make_request(*leaves), gradients, do)


def test_a_sink_is_all_that_is_seen(device):
    """Without a key, the LSE and its gradient are the sink's."""
    case = Case("", 5, 0, batch=2, heads=2, sink=True)
    check("fa2", *case.inputs(torch.float32, device), **case.all_options(device))


@by_version
@pytest.mark.parametrize("far", ["batch", "row", "head"])
def test_offsets_past_32_bits(version, far, device):
    """Index and stride both fit 32 bits, their product does not; the buffer is mostly untouched."""
    q, k, v = Case("", FEW_ROWS, 3, heads=3, kv_heads=3, batch=3).inputs(torch.float16, device)
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
def test_keys_past_the_length_are_never_read(version, device):
    """Whatever lies there, NaN too: not in o, nor in a gradient; their own gradients are 0."""
    leaves = Case("", 66, 130, batch=3).inputs(torch.bfloat16, device)
    lengths = torch.tensor([100, 3, 0], device=device)
    do = torch.randn_like(leaves[0])

    def run():
        q, k, v = (x.detach().requires_grad_() for x in leaves)
        o = attention(q, k, v, version=version, kv_lengths=lengths, deterministic=True)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), do)

    clean = run()
    for row, length in enumerate(lengths.tolist()):
        for x, gradient in zip(leaves[1:], clean[2:]):
            x[row, length:] = float("nan")
            assert not gradient[row, length:].any() and gradient[row, :length].any(-1).all()
    assert all(torch.equal(x, y) for x, y in zip(run(), clean))
    assert not clean[0][2].any() and not clean[1][2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
def test_head_dims_up_to_512(dtype, device):
    """Also a step of decoding, and its splits. FA2's kernels, for FA3 and FA4, too."""
    head_dim, dim_v = ((320, 512), (512, 40), (64, 512))[DTYPES.index(dtype)]
    shape = {"heads": 4, "head_dim": head_dim, "head_dim_v": dim_v}
    check("fa2", *Case("", 20, 70, **shape).inputs(dtype, device), causal=True)
    q, k, v = Case("", 1, 300, **shape).inputs(dtype, device)
    check("fa4", q, k, v, backward=False)
    check("fa2", q, k, v, backward=False, num_splits=3)
