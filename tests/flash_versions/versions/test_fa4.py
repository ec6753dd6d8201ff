"""What only FA4 has: references in the place of maxima, rescales that are left out, a share of
exponentials by a polynomial.
"""

from functools import partial

import pytest
import torch

import flash_versions
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions import fa3
from flash_versions.versions.fa3 import forward as unconditional
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa4 import EXPLICIT, VERSION, blackwell_limits
from flash_versions.versions.fa4 import forward as portable
from flash_versions.versions.fa4.exp2 import DEGREES
from flash_versions.versions.fa4.hopper import host as forward_hopper
from flash_versions.versions.oracle.suite import CASES
from tests.helpers.kernels.budget import assert_right, random_inputs

simulated = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiled, two kernels need not agree in every bit"
)
SMALL = LaunchConfig(16, 32, num_warps=4, num_stages=2)
HALF = [torch.float16, torch.bfloat16]
inputs = partial(
    random_inputs, M=64, N=128, heads=2, kv_heads=1, batch=1, head_dim=32, dtype=torch.bfloat16
)


def staircase(device, steps, block=32, M=16, dtype=torch.float32, head_dim=16):
    """Inputs whose scores, in log2 units, are near steps[j] for all keys of the block that is
    folded j-th: the last one first.
    """
    q = torch.zeros(1, M, 1, head_dim, device=device)
    q[..., 0] = 1.0
    levels = torch.tensor(steps, device=device).flip(0).repeat_interleave(block)
    k = torch.randn(1, len(levels), 1, head_dim, device=device)
    k[0, :, 0, 0] = levels + torch.rand(len(levels), device=device) * 2**-6
    v = torch.randn(1, len(levels), 1, head_dim, device=device) + 0.5
    return *(x.to(dtype) for x in (q, k, v)), {"scale": 0.6931471805599453}


def counted(request, config=SMALL, threshold=portable.THRESHOLD):
    """(blocks, rescales) of a call, whose result is right."""
    counts = torch.zeros(2, dtype=torch.int32, device=request.q.device)
    o, lse, _ = portable.forward(request, config, threshold, counts=counts)
    assert_right(request, o, lse)
    return tuple(counts.tolist())


# ---- the kernel on calls of every kind ----

MIXED = [
    "full, several blocks", "more queries than keys: rows without a key", "head dim 80",
    "large scale: nearly one-hot",
]  # fmt: skip
NAMED = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", MIXED)
def test_equivalence_with_every_exponential_by_the_polynomial(name, device):
    """The default share is in test_attention.py."""
    case, dtype = NAMED[name], HALF[MIXED.index(name) % 2]
    request = in_vectors(make_request(*case.inputs(dtype, device), **case.all_options(device)))
    with torch.no_grad():
        assert_right(request, *portable.forward(request, eighths=8)[:2])


@simulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_its_ideas_it_is_fa3_bit_for_bit(dtype, device):
    """But for the order of the blocks."""
    q, k, v = inputs(device, M=40, N=96, dtype=dtype)
    turned = [x.unflatten(1, (-1, 32)).flip(1).flatten(1, 2) for x in (k, v)]
    expected = unconditional.forward(make_request(q, *turned), SMALL)
    found = portable.forward(make_request(q, k, v), SMALL, threshold=0.0, eighths=0)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


# ---- the rule ----


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("step", [7.9, 60.0, -60.0])
def test_exact_however_far_the_reference_falls_behind(dtype, step, device):
    """P reaches 2^8, in fp16, too."""
    q, k, v, options = staircase(device, [step * j for j in range(5)], dtype=dtype)
    request = make_request(q, k, v, **options)
    o, lse, _ = portable.forward(request, SMALL)
    assert_right(request, o, lse)


def test_a_row_does_not_depend_on_its_neighbours(device):
    """One whose reference is raised in every block makes the tile multiply all."""
    q, k, v, options = staircase(device, [20.0 * j for j in range(5)], dtype=torch.bfloat16)
    others = torch.randn_like(q[:, 1:]) * 0.01
    q[:, 1:] = others
    together = portable.forward(make_request(q, k, v, **options), SMALL)
    q[:, :1] = 0
    alone = portable.forward(make_request(q, k, v, **options), SMALL)
    assert not torch.equal(together[0][:, :1], alone[0][:, :1])
    for x, y, rows in ((together[0], alone[0], 1), (together[1].mT, alone[1].mT, 1)):
        assert torch.equal(x[:, rows:], y[:, rows:])


# ---- what is left out ----


@pytest.mark.parametrize(("steps", "threshold", "rescales"), [
    ([9.0 * j for j in range(6)], 8.0, 5),  # all but the first, which has nothing to rescale
    ([3.0 * j for j in range(7)], 8.0, 2),  # raised at 9 and 18
    ([3.0 * j for j in range(7)], 2.0, 6),
    ([-3.0 * j for j in range(6)], 8.0, 0),
    ([-3.0 * j for j in range(6)], 0.0, 6),  # as FA3
], ids=str)  # fmt: skip
def test_rescales_are_left_out_where_the_maximum_grows_slowly(steps, threshold, rescales, device):
    q, k, v, options = staircase(device, steps)
    found = counted(make_request(q, k, v, **options), threshold=threshold)
    assert found == (len(steps), rescales)


# ---- settings ----


def test_the_rule_that_is_chosen(device, monkeypatch):
    config = LaunchConfig(64, 64, num_warps=4, num_stages=2)
    for dtype, eighths in ((torch.float32, 0), (torch.float16, 2), (torch.bfloat16, 2)):
        request = make_request(*inputs(device, dtype=dtype))
        monkeypatch.setattr(devices, "assumed", Properties((10, 0)))
        assert portable.choose_rule(request, config) == (8.0, eighths)
        assert portable.choose_rule(request, LaunchConfig(64, 16, 4, 2)) == (8.0, 0)
        wide = make_request(*inputs(device, head_dim=256, dtype=dtype))
        assert portable.choose_rule(wide, config) == (8.0, 0)
        for capability in ((8, 0), (9, 0), (12, 0)):
            monkeypatch.setattr(devices, "assumed", Properties(capability))
            assert portable.choose_rule(request, config) == (0.0, 0)
    assert set(HALF) < set(DEGREES)


@pytest.mark.parametrize(
    ("options", "dtype", "sentence"),
    [
        ({"threshold": 9.0}, torch.bfloat16, "threshold=9.0 is not possible; 0 to 8 are"),
        ({"threshold": -1.0}, torch.bfloat16, "threshold=-1.0 is not possible"),
        ({"threshold": float("nan")}, torch.bfloat16, "threshold=nan is not possible"),
        ({"eighths": 9}, torch.bfloat16, "eighths=9 is not possible; 0 to 8 are"),
        ({"eighths": 2}, torch.float32, "eighths=2 is not possible in float32"),
        ({"eighths": 2, "config": LaunchConfig(16, 16, 4, 2)}, torch.bfloat16,
         "eighths=2 with block_kv=16 is not possible"),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_that_cannot_be_is_refused(options, dtype, sentence, device):
    request = make_request(*inputs(device, dtype=dtype))
    with pytest.raises(ValueError, match=sentence):
        portable.forward(request, **options)


# ---- what is left to others ----


@pytest.mark.parametrize("on_hopper", [True, False])
def test_fp8_is_for_the_hopper_kernel_and_elsewhere_for_fa3(on_hopper, device, monkeypatch):
    given = []
    reason = None if on_hopper else "no Hopper"
    monkeypatch.setattr(forward_fp8_hopper, "left_to_portable", lambda request: reason)
    kernel = (forward_hopper if on_hopper else fa3), "forward_quantized"
    monkeypatch.setattr(*kernel, lambda *arguments: given.append(arguments))
    request = make_request(*inputs(device))._replace(precision="fp8:block:e4m3")
    VERSION.forward(request)
    assert [asked for asked, _ in given] == [request]


# ---- the kernel for Blackwell, by its name ----


def test_it_is_reached_by_its_name_only_and_says_what_it_refuses(device):
    q, k, v = inputs(device, M=64)
    with pytest.raises(ValueError, match="version 'fa4-blackwell': .* is no sm_100 GPU"):
        flash_versions.attention(q, k, v, version=EXPLICIT.name)
    assert EXPLICIT.name not in flash_versions.VERSIONS
    request = make_request(q, k, v)
    assert "it comes with version 'fa4'" in blackwell_limits(request._replace(precision="fp8"))
    assert "fewer than 64 query rows" in blackwell_limits(request._replace(q=q[:, :1]))
