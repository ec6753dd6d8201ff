"""The lessons: right in every call that they take, reached by name."""

import pytest
import torch
import triton.language as tl

from flash_versions import VERSIONS, attention
from flash_versions.dispatch.request import make_request
from flash_versions.inspect.compiled import ARCHES, compile_call
from flash_versions.lessons import BACKWARDS, FORWARDS, LESSONS, check, fa2, load_lesson
from flash_versions.versions.oracle.suite import Case
from tests.flash_versions.versions.test_attention import LAYOUTS
from tests.helpers.kernels.budget import assert_gradients_right, assert_ok, assert_right
from tests.helpers.rotation import rotated
from tests.simulator.gluon.orders import in_every_order

EVERYTHING = [
    pytest.param(version, case, dtype, id=f"{version}-{case.name}")
    for version in LESSONS
    for case, dtype in check.calls(version, "cpu")
]


@pytest.mark.parametrize(("version", "case", "dtype"), EVERYTHING)
def test_equivalence(version, case, dtype, device):
    """Results and gradients, within the error budget."""
    assert_ok(check.assess(version, case, dtype, device))


@pytest.mark.parametrize("version", LESSONS)
def test_which_calls_a_lesson_takes(version):
    """Those of the suite at head_dim 64 and 128 that are causal or full; no others."""
    taken = [case.name for case, _ in check.calls(version, "cpu")]
    assert {"causal, several blocks", "full, several blocks", "grouped heads 8:4"} < {*taken}
    assert not {"head dim 80", "window to the left", "sink", "everything at once"} & {*taken}


@pytest.mark.parametrize(("version", "layout"), rotated(LESSONS, LAYOUTS))
def test_any_strides(version, layout, device):
    case = Case("", 66, 192, heads=4, batch=2, causal=True)
    inputs = case.inputs(torch.bfloat16, device)
    inputs[2][:, 127] *= 8  # all queries but the first one see the last key of a block
    q, k, v = (LAYOUTS[layout](x) for x in inputs)
    options = check.options_of(version, case, device)
    o, lse = attention(q, k, v, version=version, return_lse=True, **options)
    assert_right(make_request(q, k, v, **options), o, lse)


@pytest.mark.parametrize("version", ["lesson-fa1", "lesson-fa2"])  # with backwards of their own
def test_gradients_of_any_strides(version, device):
    """Of o alone, and of an o and an LSE whose gradients are no matrices in memory; that of the LSE
    of a query without a key means nothing.
    """
    leaves = Case("", 70, 66, heads=4, kv_heads=2, batch=2).inputs(torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in leaves]
    request = make_request(*leaves, causal=True)
    o, lse = attention(*leaves, causal=True, version=version, return_lse=True)
    do = torch.randn_like(o).transpose(1, 2).contiguous().transpose(1, 2)
    dlse = torch.randn_like(lse).mT.contiguous().mT
    gradients = torch.autograd.grad(o, leaves, do, retain_graph=True)
    assert_gradients_right(request, gradients, do)
    dlse[..., :4] = torch.nan
    gradients = torch.autograd.grad((o, lse), leaves, (do, dlse))
    assert_gradients_right(request, gradients, do, dlse.nan_to_num())


@pytest.mark.parametrize("version", LESSONS)
def test_huge_scores_do_not_overflow(version, device):
    q, k, v = (case := Case("", 66, 70)).inputs(torch.float16, device)
    q, k, options = 300 * q, 300 * k, check.options_of(version, case, device)
    o, lse = attention(q, k, v, version=version, return_lse=True, **options)
    assert_right(make_request(q, k, v, **options), o, lse)


@pytest.mark.parametrize("name", FORWARDS)
def test_it_compiles_for_hopper(name):
    """On tensor cores that read shared memory, which it fits; a forward spills next to nothing:
    with Triton 3.9, FA2's 28 bytes.
    """
    version = load_lesson(name)
    case = Case("", 64, 64, head_dim=128, causal=True)
    given = case.inputs(torch.bfloat16, "cpu")
    request = make_request(*given, **check.options_of(version.name, case, "cpu"))
    for kernel in compile_call(version, request, "sm_90", backward=name in BACKWARDS):
        assert kernel.code.metadata.shared <= ARCHES["sm_90"].shared_memory
        assert "wgmma.mma_async" in kernel.code.asm["ptx"]
        assert kernel.kernel != "forward_kernel" or kernel.assembly.spill_stores <= 32


@pytest.mark.parametrize("name", ["fa3_hopper", "fa4_hopper"])
def test_partitions_may_run_in_any_order(name):
    """Of several blocks and tiles, with the same bits in every order."""
    case = Case("", 200, 700, kv_heads=1, causal=True)
    request = make_request(*case.inputs(torch.bfloat16, "cpu"), causal=True)
    forward = load_lesson(name).forward
    assert_right(request, *in_every_order(lambda: dict(zip("ol", forward(request)))).values())


SPLITS = [(1, 300, True, 3000), (40, 300, True, 5), (150, 400, False, 2), (300, 100, True, 3)]


@pytest.mark.parametrize(("M", "N", "causal", "splits"), SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_split_keys(M, N, causal, splits, dtype, device):
    """Also splits without a block, more than the lesson makes, and rows without a key."""
    inputs = Case("", M, N, heads=4, batch=2).inputs(dtype, device)
    options = {"causal": causal, "num_splits": splits}
    results = attention(*inputs, version="lesson-fa2", return_lse=True, **options)
    assert_right(make_request(*inputs, **options), *results)


def test_a_lesson_is_reached_by_its_name_only():
    assert not {*LESSONS} & {*VERSIONS}
    q = torch.randn(1, 4, 1, 80)
    with pytest.raises(ValueError, match="version 'lesson-fa1': q has head_dim 80; 64 and 128"):
        attention(q, q, q, version="lesson-fa1")


@pytest.mark.parametrize(
    "file, base, code", [("fa2.py", fa2.LOG2E, 0), ("fa2_backward.py", tl.constexpr(1.0), 1)]
)
def test_a_lesson_checks_itself(file, base, code, capsys, monkeypatch):
    """It says how many results are wrong, and exits accordingly."""
    monkeypatch.setattr(check, "CASES", check.CASES[2:4])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fa2, "LOG2E", base)
    with pytest.raises(SystemExit) as ended:
        check.run(file)
    out = capsys.readouterr().out
    assert ended.value.code == code == int("WRONG  full, several blocks: o: error" in out)
    assert "lesson-fa2: 2 calls, 0 results are wrong" in out or code
