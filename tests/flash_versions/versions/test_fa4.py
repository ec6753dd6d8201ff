"""What only FA4 has: references in the place of maxima, rescales that are left out, a share of
exponentials by a polynomial.
"""

from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import flash_versions
import transformer
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions import fa3, fa4
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.fa3 import backward as exact_backward
from flash_versions.versions.fa3 import forward as unconditional
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa4 import EXPLICIT, VERSION, ablation, backward, blackwell_limits
from flash_versions.versions.fa4 import forward as portable
from flash_versions.versions.fa4.exp2 import DEGREES
from flash_versions.versions.fa4.hopper import backward as explicit
from flash_versions.versions.fa4.hopper import host as forward_hopper
from flash_versions.versions.fa4.softmax import raise_reference
from flash_versions.versions.oracle.suite import CASES
from flash_versions.versions.tiles import wgmma
from flash_versions.versions.tiles.algebra import finalize
from tests.helpers.kernels.budget import assert_gradients_right, assert_right, random_inputs
from transformer.model.weights import load_model
from transformer.training.corpus import Teacher, draw_chat

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compiled, two kernels need not agree in every bit"
)
SHIPPED = Path(transformer.__file__).parent / "checkpoints" / "reinforced"
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


def replayed(request, block_q, block_kv, threshold):
    """The rule, row by row in fp64: (blocks, rescales) of a request without a mask, whose blocks
    are whole.
    """
    q, k = request.q.double(), request.k.double().repeat_interleave(request.group, 2)
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * request.scale * 1.4426950408889634
    maxima = scores.unflatten(-1, (-1, block_kv)).amax(-1).flip(-1)
    reference, rescales = maxima[..., 0], 0
    for block_max in maxima.unbind(-1)[1:]:
        raised = block_max > reference + threshold
        reference = torch.where(raised, block_max, reference)
        rescales += sum(part.any(-1).sum().item() for part in raised.split(block_q, -1))
    tiles = sum(part.shape[0] * part.shape[1] for part in maxima.split(block_q, 2))
    return tiles * maxima.shape[-1], rescales


# ---- the kernel on calls of every kind ----

MIXED = [
    "full, several blocks", "more queries than keys: rows without a key", "grouped heads 8:4",
    "head dim 80", "lengths per row, causal", "window to both sides", "softcap",
    "large scale: nearly one-hot", "tiny scale: nearly uniform", "sink, rows without a key",
    "everything at once",
]  # fmt: skip
NAMED = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", MIXED)
def test_equivalence_with_every_exponential_by_the_polynomial(name, device):
    """The default share is in test_attention.py."""
    case, dtype = NAMED[name], HALF[MIXED.index(name) % 2]
    request = in_vectors(make_request(*case.inputs(dtype, device), **case.all_options(device)))
    with torch.no_grad():
        assert_right(request, *portable.forward(request, eighths=8)[:2])


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_its_ideas_it_is_fa3_bit_for_bit(dtype, device):
    """But for the order of the blocks."""
    q, k, v = inputs(device, M=40, N=96, dtype=dtype)
    sink = torch.randn(2, device=device)
    turned = [x.unflatten(1, (-1, 32)).flip(1).flatten(1, 2) for x in (k, v)]
    expected = unconditional.forward(make_request(q, *turned, sink=sink), SMALL)
    found = portable.forward(make_request(q, k, v, sink=sink), SMALL, threshold=0.0, eighths=0)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


# ---- the rule ----


@triton.jit
def steps_kernel(
    scores, maxima, alphas, out, lse, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, THRESHOLD: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Fold blocks of scores (BLOCKS, ROWS, COLUMNS); the value of every key is its number."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, 1], tl.float32)
    for j in tl.static_range(BLOCKS):
        s = tl.load(scores + (j * ROWS + row[:, None]) * COLUMNS + column[None, :])
        row_max, pivot, alpha = raise_reference(s, row_max, 1.0, THRESHOLD)
        p = tl.exp2(s - (pivot - SHIFT)[:, None])
        row_sum = alpha * row_sum + tl.sum(p, 1)
        value = (j * COLUMNS + column).to(tl.float32)
        acc = acc * alpha[:, None] + tl.sum(p * value[None, :], 1)[:, None]
        tl.store(maxima + j * ROWS + row, row_max)
        tl.store(alphas + j * ROWS + row, alpha)
    o, row_lse = finalize(acc, row_max, row_sum)
    tl.store(out + row[:, None], o)
    tl.store(lse + row, row_lse)


def fold(scores, threshold, shift=0.0):
    """References and alphas after each block (blocks, rows), outputs and LSE (rows,)."""
    blocks, rows, columns = scores.shape
    maxima, alphas = torch.empty(2, blocks, rows, device=scores.device)
    out, lse = torch.empty(2, rows, device=scores.device)
    steps_kernel[(1,)](scores, maxima, alphas, out, lse, blocks, rows, columns, threshold, shift)
    return maxima, alphas, out, lse


INF = float("inf")
ROWS = {
    "the threshold itself does not raise": ([0, 8, 8], [0, 0, 0], [1, 1, 1]),
    "a little more does": ([0, 8.125, 8], [0, 8.125, 8.125], [1, 2**-8.125, 1]),
    "the reference counts, not the maximum": ([0, 5, 9], [0, 0, 9], [1, 1, 2**-9]),
    "raised to the maximum": ([1, 20, 40], [1, 20, 40], [1, 2**-19, 2**-20]),
    "falling": ([5, -50, -100], [5, 5, 5], [1, 1, 1]),
    "no key at first": ([-INF, -3, 4], [-INF, -3, -3], [1, 1, 1]),
    "no key at all": ([-INF, -INF, -INF], [-INF, -INF, -INF], [1, 1, 1]),
    "no key later": ([2, -INF, 11], [2, 2, 11], [1, 1, 2**-9]),
}


def test_references_follow_the_rule(device):
    """Each row of the tile by itself."""
    tops = torch.tensor([row for row, _, _ in ROWS.values()], device=device)  # (rows, blocks)
    scores = tops.T[:, :, None] - torch.arange(16, device=device) * 0.5
    maxima, alphas, out, lse = fold(scores.contiguous(), 8.0)
    expected = torch.tensor([row for _, row, _ in ROWS.values()], device=device)
    assert torch.equal(maxima.T, expected)
    expected = torch.tensor([row for _, _, row in ROWS.values()], device=device)
    torch.testing.assert_close(alphas.T, expected, rtol=1e-6, atol=0)
    assert torch.equal(alphas.T == 1, expected == 1)
    flat = scores.double().transpose(0, 1).flatten(1) * 0.6931471805599453
    exact = flat.softmax(-1).nan_to_num() @ torch.arange(48.0, device=device).double()
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(lse.double(), flat.logsumexp(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shift", [4.0, 8.0])
def test_a_shift_cancels_in_the_output_and_adds_to_the_lse(shift, device):
    scores = torch.randn(4, 16, 32, device=device) * 6
    _, _, out, lse = fold(scores, 4.0)
    _, _, shifted, shifted_lse = fold(scores, 4.0, shift)
    torch.testing.assert_close(shifted, out, rtol=1e-6, atol=0)
    torch.testing.assert_close(shifted_lse - shift * 0.6931471805599453, lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize("step", [0.5, 7.9, 8.5, 60.0, -60.0])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
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


@interpreted
def test_nan_in_the_polynomial_reaches_the_output(device):
    q, k, v = inputs(device)
    k[:, 0] = float("nan")  # column 0 is the first that the polynomial gets
    o = portable.forward(make_request(q, k, v), SMALL, eighths=1)[0]
    assert not o.isfinite().any()


# ---- what is left out ----


def test_a_maximum_that_always_grows_rescales_in_every_block(device):
    """But for the first, which has nothing to rescale."""
    q, k, v, options = staircase(device, [9.0 * j for j in range(6)])
    assert counted(make_request(q, k, v, **options)) == (6, 5)


def test_a_maximum_that_grows_slowly_rescales_now_and_then(device):
    q, k, v, options = staircase(device, [3.0 * j for j in range(7)])
    request = make_request(q, k, v, **options)
    assert counted(request) == (7, 2)  # raised at 9 and 18
    assert counted(request, threshold=2.0) == (7, 6)


def test_equal_scores_never_rescale(device):
    q, k, v, options = staircase(device, [0.0] * 6)
    request = make_request(q * 0, k, v, **options)
    assert counted(request) == (6, 0)
    assert counted(request, threshold=0.0) == (6, 6)  # as FA3


def test_blocks_that_are_cut_always_rescale(device):
    q, k, v = inputs(device, M=32, N=32)
    config = LaunchConfig(32, 32, num_warps=4, num_stages=2)
    assert counted(make_request(q, k, v, causal=True), config) == (2, 2)


@pytest.mark.parametrize("threshold", [2.0, 8.0])
def test_the_count_is_that_of_the_rule(threshold, device):
    """Held against a replay in fp64; with fp32 inputs, as close calls would differ."""
    q, k, v = inputs(device, M=32, N=256, heads=2, kv_heads=1, dtype=torch.float32)
    request = make_request(q * 3, k, v)
    found = counted(request, threshold=threshold)
    assert found == replayed(request, 16, 32, threshold)
    assert found[1] > 0


def test_a_real_model_hardly_ever_rescales(device):
    """The queries and keys of the shipped model's layers, in chats as it knows them. From the first
    key to the last, it would rescale in one block of five.
    """
    requests = []

    def attention(q, k, v, **options):
        requests.append(make_request(q, k, v, **options))
        return flash_versions.attention(q, k, v, version="sdpa", **options)

    model = load_model(SHIPPED, attention=attention).to(device)
    rng, tokens = Random(0), []
    while len(tokens) < 320:
        tokens += draw_chat(rng, Teacher())[0]
    with torch.no_grad():
        model(torch.tensor([tokens[:320]], device=device))
    config = LaunchConfig(64, 32, num_warps=4, num_stages=2)
    found = [counted(request, config) for request in (requests[0], requests[2])]
    blocks, rescales = (sum(numbers) for numbers in zip(*found))
    cut = 2 * 3 * 5 * 2  # layers, heads, tiles, blocks: they always rescale
    assert blocks == 2 * 3 * (2 + 4 + 6 + 8 + 10)
    assert rescales - cut < 0.1 * (blocks - cut)


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


# ---- the gradients ----


def gradients_of(request, **options):
    """({name: gradient}, do) of FA4's kernels, or of FA3's where that is asked for."""
    differentiate = options.pop("differentiate", backward.backward)
    torch.manual_seed(2)
    with torch.no_grad():
        o, lse, _ = unconditional.forward(request)
        do = torch.randn_like(o)
        found = differentiate(request, o, lse, None, do, torch.randn_like(lse), **options)
    return dict(zip(("dq", "dk", "dv"), found)), do


@pytest.mark.parametrize("eighths", [None, 1, 8])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_with_a_share_of_polynomials(dtype, eighths, device):
    request = make_request(*inputs(device, N=96, dtype=dtype), causal=True, softcap=2.0)
    torch.manual_seed(2)
    o, lse, _ = unconditional.forward(request)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    found = backward.backward(request, o, lse, None, do, dlse, eighths=eighths)
    assert_gradients_right(request, found[:3], do, dlse)


def test_the_share_is_a_switch(device):
    """Off, the gradients are FA3's to the bit; every further share changes some."""
    request = make_request(*inputs(device), causal=True)
    exact, _ = gradients_of(request, differentiate=exact_backward.backward)
    off, _ = gradients_of(request, eighths=0)
    assert all(torch.equal(off[name], exact[name]) for name in exact)
    shares = [gradients_of(request, eighths=eighths)[0] for eighths in (2, 4, 8)]
    for name in exact:
        different = [exact[name], *(share[name] for share in shares)]
        assert not any(torch.equal(x, y) for i, x in enumerate(different) for y in different[:i]), (
            name
        )


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_the_gradients_share_out_where_the_forward_does(capability, device, monkeypatch):
    monkeypatch.setattr(devices, "assumed", Properties(capability))
    request = make_request(*inputs(device), causal=True)
    chosen, _ = gradients_of(request)
    expected, _ = gradients_of(request, eighths=2 if capability == (10, 0) else 0)
    assert all(torch.equal(chosen[name], expected[name]) for name in expected)


NARROW = LaunchConfig(16, 32, 4, 2)


@pytest.mark.parametrize(
    ("options", "dtype", "sentence"),
    [
        ({"eighths": -1}, torch.bfloat16, "eighths=-1 is not possible; 0 to 8 are"),
        ({"eighths": 2}, torch.float32, "eighths=2 is not possible in float32"),
        ({"eighths": 2, "q_config": LaunchConfig(32, 16, 4, 2)}, torch.bfloat16,
         "eighths=2 with block_kv=16 is not possible"),
        ({"eighths": 8, "dropout_p": 0.1}, torch.bfloat16,
         r"eighths=8 is not possible with dropout_p=0.1"),
        ({"eighths": 2, "kv_config": NARROW}, torch.bfloat16,
         "eighths=2 with block_q=16 for dK and dV is not possible"),
    ],
    ids=str,
)  # fmt: skip
def test_a_share_that_cannot_be_is_refused(options, dtype, sentence, device):
    request = make_request(*inputs(device, dtype=dtype), dropout_p=options.get("dropout_p", 0.0))
    with pytest.raises(ValueError, match=sentence):
        gradients_of(request, **{k: x for k, x in options.items() if k != "dropout_p"})


def test_dropout_leaves_no_room_for_polynomials(device):
    request = make_request(*inputs(device), dropout_p=0.2)
    found, _ = gradients_of(request)
    expected, _ = gradients_of(request, eighths=0)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_exponentials_of_narrow_blocks_may_be_polynomials(device):
    request = make_request(*inputs(device))
    wide, _ = gradients_of(request, eighths=8)
    narrow, _ = gradients_of(request, eighths=8, kv_config=NARROW)
    assert torch.equal(narrow["dq"], wide["dq"]) and narrow["dv"].isfinite().all()


def test_the_version_serves_the_gradients(device, monkeypatch):
    """With the share that is the GPU's default; what no box reaches is FA2's, without one."""
    request = make_request(*inputs(device), causal=True)
    found, _ = gradients_of(request, differentiate=VERSION.backward)
    expected, _ = gradients_of(request)
    exact, _ = gradients_of(request, eighths=0)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config = backward.backward_config(request, backward.MEASURED_Q, backward.QUERY_GRADIENT)
    _, eighths = backward.choose_rule(request, config)
    assert torch.equal(found["dq"], exact["dq"]) == (eighths == 0)
    few = make_request(*inputs(device, M=5))
    expected, _ = gradients_of(few, differentiate=fa2_backward.backward)
    monkeypatch.setattr(exact_backward, "backward", None)
    found, _ = gradients_of(few, differentiate=VERSION.backward)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ablation.BACKWARD_VARIANTS)
def test_variants_of_the_backward(name, device, monkeypatch):
    """Those of the kernel for Hopper are asked for there, and say elsewhere that there is none."""
    request = make_request(*inputs(device))
    variant = ablation.BACKWARD_VARIANTS[name]
    if name == "portable":
        found, _ = gradients_of(request, differentiate=variant)
        expected, _ = gradients_of(request)
        assert all(torch.equal(found[x], expected[x]) for x in expected)
        return
    if not wgmma.available(torch.device(device)):
        with pytest.raises(ValueError, match="Hopper"):
            variant(request, None, None, None, None, None)
    asked = []
    monkeypatch.setattr(ablation.fa3.backward_hopper, "left_to_portable", lambda request: None)
    monkeypatch.setattr(explicit.exact, "backward", lambda *given, **how: asked.append(how))
    variant(request, None, None, None, None, None)
    assert asked == [{"function": explicit.exp2, "share": int(name[0])}]


# ---- what is left to others ----


def test_few_queries_are_left_to_gathering(device, monkeypatch):
    request = make_request(*inputs(device, M=1))
    expected = fa2_forward.forward(request)[0]
    monkeypatch.setattr(portable, "forward", None)
    assert torch.equal(VERSION.forward(request)[0], expected)
    assert VERSION.unsupported(request) is None


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


GIVEN = {"q_descale": torch.ones(())}  # tensors of 8 bits


@pytest.mark.parametrize(
    ("head_dim", "length", "options", "in_order"),
    [
        (96, 8192, {}, True),
        (96, 8192, {"causal": True}, True),
        (96, 1100, {}, False),  # 72 tiles of 192 rows and 108 of 128: a program has one of either
        (96, 8192, {"window": (512, 0)}, False),  # masks take registers
        (128, 8192, {}, False),
        (192, 8192, {}, False),
        (128, 8192, {"precision": "fp8"}, False),  # of tensors that are quantised in the call
        (128, 8192, GIVEN, True),
        (128, 1100, GIVEN, False),
        (128, 8192, {**GIVEN, "window": (512, 0)}, False),
        (64, 8192, GIVEN, False),
        (64, 8192, {**GIVEN, "causal": True}, True),
        (256, 8192, GIVEN, False),
    ],
    ids=str,
)
def test_short_products_are_left_to_fa3s_consumers_in_order(
    head_dim, length, options, in_order, monkeypatch
):
    monkeypatch.setattr(devices, "assumed", Properties((9, 0), num_sms=132))
    monkeypatch.setattr(fa3.forward_hopper, "left_to_portable", lambda request: None)
    q = torch.empty(1, length, 12, head_dim, dtype=torch.bfloat16)
    if "q_descale" in options:
        q = q.to(torch.float8_e4m3fn)
    request = make_request(q, q, q, **options)
    chosen = fa4.choose_forward(request)
    if request.precision is not None:
        assert chosen.keywords["kernel"] is (fa3 if in_order else fa4).forward_quantized
    else:
        assert chosen.func is (fa3.forward_hopper if in_order else forward_hopper).launch
        assert chosen.args[0].config.overlap != in_order


def test_counting_rescales_of_a_call(device):
    q, k, v = inputs(device, M=64, N=256, head_dim=64)
    k = torch.zeros_like(k)
    blocks, rescales = portable.count_rescales(make_request(q, k, v))
    assert blocks > 0 and rescales == 0
    assert portable.count_rescales(make_request(q, k, v), threshold=0.0) == (blocks, blocks)


# ---- the kernel for Blackwell, by its name ----


@pytest.mark.parametrize("change, sentence", [
    ({}, "is no sm_100 GPU"),
    ({"precision": "fp8"}, "it comes with version 'fa4'"),
    ({"M": 1}, "fewer than 64 query rows"),
], ids=str)  # fmt: skip
def test_what_the_kernel_for_blackwell_refuses(change, sentence, device):
    request = make_request(*inputs(device, M=change.get("M", 64)), num_splits=1)
    request = request._replace(precision=change.get("precision"))
    assert sentence in blackwell_limits(request)


def test_it_is_reached_by_its_name_only(device):
    q, k, v = inputs(device, M=64)
    with pytest.raises(ValueError, match="version 'fa4-blackwell': .* is no sm_100 GPU"):
        flash_versions.attention(q, k, v, version=EXPLICIT.name)
    assert EXPLICIT.name not in flash_versions.VERSIONS


@pytest.mark.parametrize("verified", [False, True])
def test_one_line_says_that_it_is_not_verified(verified, monkeypatch, recwarn):
    monkeypatch.setattr(fa4, "is_verified", lambda kernel, device: verified)
    monkeypatch.setattr(fa4, "plan_blackwell", lambda request: "planned")
    on_gpu = SimpleNamespace(q=SimpleNamespace(is_cuda=True, device=torch.device("cuda")))
    assert fa4.choose_blackwell(on_gpu) == "planned"
    assert ["not verified on this GPU" in str(warning.message) for warning in recwarn] == [
        True for _ in range(not verified)
    ]
