"""A version in a file: loading it, what `mine check` says of planted mistakes, the ranking."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flash_versions
from flash_versions.dispatch import launch
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import EXPLICIT
from flash_versions.inspect import sass
from flash_versions.mine import command, rank, start, times
from flash_versions.mine.check import Outcome, find_faults
from flash_versions.mine.guard import guard, guarded_input, guarding, never_stored
from flash_versions.mine.summary import common_property
from flash_versions.versions.oracle.suite import CASES, Case

TEXT = Path(start.__file__).read_text()
LINE = next(i for i, line in enumerate(TEXT.splitlines(), 1) if "k_tile.T" in line)
GROUPED = Case("", 50, 70, heads=6, kv_heads=2, causal=True)
FULL = Case("", 20, 70, heads=2)
EMPTY = Case("", 40, 20, causal=True)
# What is changed in the file, into what, on which call, and what has to be said of it.
PLANTED = {
    "store of o": ("out, mask=q_mask", "out", FULL, "a store into o of shape (1, 20, 2, 64)"),
    "store of the LSE": (", mask=queries < M)", ")", FULL, "a store into lse"),
    "load": ("mask=mask, other=0.0", "", FULL, "memory outside of q, k and v"),
    "grid": ("triton.cdiv(M, block)", "M // block", FULL, "2560 elements of o were never stored"),
    "scale": ("(scale * 1.44", "(1.0 * 1.44", FULL, "not multiplied by request.scale"),
    "base": (" * 0.6931471805599453", "", FULL, "the LSE is in base 2"),
    "alignment": (" + length - M)", ")", GROUPED, "causal is aligned to the first query"),
    "mask": ("if CAUSAL:", "if False:", GROUPED, "a query sees keys behind its own"),
    "key heads": ("head // GROUP", "head % 2", GROUPED, "key head h % kv_heads"),
    "lengths": (
        "kv_lengths is not None:", "False:",
        Case("", 20, 70, batch=2, kv_lengths=(70, 30)), "kv_lengths is ignored",
    ),
    "unseen keys": (
        "mask = (keys < length)", "mask = (keys < N)",
        Case("", 20, 70, batch=2, kv_lengths=(70, 30)), "o depends on keys behind kv_lengths",
    ),
    "softcap": (
        "FEATURES = (", 'FEATURES = ("softcap", ',
        Case("", 20, 70, options={"softcap": 1.0}), "softcap is ignored",
    ),
    "log2": ("(scale * 1.4426950408889634)", "scale", FULL, "not multiplied by log2(e)"),
    "last block": ("tl.max(last, 0) + 1, B", "N // 64 * 64, B", FULL,
                   "the last 6 keys are missing"),
    "keys past the end": ("keys[None, :] <= last[:, None]", "keys[None, :] < 10000", FULL,
                          "keys past the end count with a score of 0, up to a block of 64"),
    "no key": ("tl.where(new_max == float(\"-inf\"), 0.0, new_max)", "new_max", EMPTY,
               "only queries that see no key are wrong; their o must be 0"),
    "input": ("batch, M, heads, dim = q.shape", "batch, M, heads, dim = q.zero_().shape", FULL,
              "q was changed"),
    "error": ("q_tile, k_tile.T", "q_tile, v", FULL, f"line {LINE} of "),
}  # fmt: skip


def load(folder, *changes):
    """The version in the file that `new` writes, after changes (old, new)."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    return flash_versions.load_version(folder / "mine.py")


def faults_of(version, case, dtype=torch.float32, of_lse=False):
    request = make_request(*case.inputs(dtype, "cpu"), **case.all_options("cpu"))
    assert version.unsupported(request) is None
    return find_faults(version, request, of_lse)


@pytest.fixture(autouse=True)
def forgotten():
    """Versions of files are known in one test only."""
    before = dict(EXPLICIT)
    yield
    EXPLICIT.clear()
    EXPLICIT.update(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [GROUPED, FULL, EMPTY], ids=["grouped", "full", "empty"])
def test_the_file_is_right(case, dtype, tmp_path):
    assert faults_of(load(tmp_path), case, dtype) == []


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_is_explained(name, tmp_path):
    old, new, case, expected = PLANTED[name]
    faults = faults_of(load(tmp_path, (old, new)), case)
    assert any(expected in fault for fault in faults), faults


def test_the_worst_element_is_named(tmp_path):
    """Of o, one element is moved: the position, its value and the right one are those."""
    moved = "    o[0, 3, 1, 5] += 7\n    return o, lse"
    faults = faults_of(load(tmp_path, ("    return o, lse", moved)), FULL)
    assert "1 of 2560 elements are wrong: query 3, head 1, dim 5" in faults[1]
    value, right = (float(x) for x in faults[1].split(" is ", 1)[1].split(" right")[0]
                    .replace("is", "").split(", and "))  # fmt: skip
    assert faults[1].startswith("o[0, 3, 1, 5] is") and abs(value - right - 7) < 1e-4


BACKWARD = """

def backward(request, o, lse, do, dlse):
    from flash_versions.versions.fa2.backward import backward

    return backward(request, o, lse, None, do, {})[:3]
"""


@pytest.mark.parametrize(
    ("given", "of_lse", "wrong"),
    [("dlse", True, False), ("None", True, True), ("None", False, False)],
)
def test_a_backward_of_its_own(given, of_lse, wrong, tmp_path):
    """The one in the file is called, and its gradients are checked: one that forgets the gradient
    of the LSE is wrong if there is one.
    """
    end = TEXT.splitlines()[-1]
    version = load(tmp_path, (end, end + BACKWARD.format(given)))
    faults = faults_of(version, FULL, of_lse=of_lse)
    assert {fault.split(":")[0] for fault in faults[::2]} == ({"dq", "dk"} if wrong else set())


def test_a_backward_that_forgets_the_scale(tmp_path):
    end = TEXT.splitlines()[-1]
    text = BACKWARD.format("dlse").replace("return b", "dq, dk, dv = b")
    text += "    return dq / request.scale, dk / request.scale, dv\n"
    faults = faults_of(load(tmp_path, (end, end + text)), FULL)
    assert [x for x in faults if x.endswith(" is not multiplied by request.scale")] == [
        f"{name} is not multiplied by request.scale" for name in ("dq", "dk")
    ]


def test_without_a_backward_it_learns_with_that_of_fa2(tmp_path):
    name = load(tmp_path).name
    q, k, v = (x.requires_grad_() for x in GROUPED.inputs(torch.float32, "cpu"))
    o = flash_versions.attention(q, k, v, causal=True, version=name)
    o.backward(do := torch.randn_like(o))
    gradients = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    found = flash_versions.compare(o.detach(), q, k, v, causal=True, do=do, **gradients)
    assert all(accuracy.ok for accuracy in found.values())


def test_it_is_an_operator_of_torch(tmp_path):
    request = make_request(*FULL.inputs(torch.float32, "cpu"))
    o, lse, _ = torch.ops.flash_versions.forward(load(tmp_path).name, *request)
    found = flash_versions.compare(o, *request[:3], lse=lse)
    assert all(accuracy.ok for accuracy in found.values())


REFUSED = {
    "no forward": (("def forward(", "def forwards("), "has no function `forward"),
    "no features": (("FEATURES =", "FEATURE ="), "has no FEATURES"),
    "unknown": (('"causal"', '"casual"'), "FEATURES has 'casual'; there are causal, window"),
    "broken": (("import torch\n", "import torch!\n"), "mine.py cannot be run: SyntaxError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_version_is_refused(name, tmp_path):
    change, expected = REFUSED[name]
    with pytest.raises(ValueError, match=expected):
        load(tmp_path, change)


def test_a_changed_file_counts_when_it_is_loaded_again(tmp_path, monkeypatch):
    """What was decided for calls of the file, on a GPU, is forgotten."""
    monkeypatch.setitem(launch.decided, ("choose",), "before")
    o, q = [], torch.randn(1, 3, 1, 16)
    for number in (1, 2):
        version = load(tmp_path, ("    return o, lse", f"    return o.fill_({number}), lse"))
        o.append(flash_versions.attention(q, q, q, version=version.name).unique().item())
    assert o == [1, 2] and not launch.decided


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="mine new writes such a file"):
        flash_versions.load_version(tmp_path / "mine.py")


RESULTS = {
    "one": ("return o, lse", "return o", "must return"),
    "shape": ("return o, lse", "return o[:, :1], lse", r"o has shape \(1, 1, 2, 64\)"),
    "dtype": ("return o, lse", "return o, lse.double()", "lse has shape .* torch.float64"),
    "no tensor": ("return o, lse", "return o, 1", "lse is a int; it must be a torch.Tensor"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_a_wrong_form_are_refused(name, tmp_path):
    old, new, expected = RESULTS[name]
    q, k, v = FULL.inputs(torch.float32, "cpu")
    with pytest.raises(ValueError, match=expected):
        flash_versions.attention(q, k, v, version=load(tmp_path, (old, new)).name)


def test_what_is_not_declared_is_refused(tmp_path):
    """Every case of the suite that the file takes needs only what it declares."""
    version = load(tmp_path)
    for case in CASES:
        options = case.all_options("cpu")
        request = make_request(*case.inputs(torch.float32, "cpu"), **options)
        needed = [x for x in ("window", "softcap", "dropout_p") if options.get(x)]
        needed += ["alibi_slopes"] * bool(case.alibi) + ["sink"] * case.sink
        needed += ["query_intervals"] * (case.starts is not None or case.ends is not None)
        needed += ["kv_starts"] * (case.kv_starts is not None)
        needed += ["head_dim_v"] * (case.head_dim_v not in (None, case.head_dim))
        reason = version.unsupported(request)
        assert (reason is None) == (not needed), (case.name, reason)
        assert reason is None or f"{needed[0]} is not in its FEATURES." in reason or needed[1:]
    none = load(tmp_path, ('FEATURES = ("causal", "grouped_heads", "kv_lengths")', "FEATURES = ()"))
    request = make_request(*GROUPED.inputs(torch.float32, "cpu"))
    assert "grouped_heads is not in its FEATURES." in none.unsupported(request)


def test_guarded_memory():
    """Strides are torch's own; a store past either end is seen, one into the tensor is not."""
    x = torch.randn(4, 6).T
    with guarding() as found:
        like, zeros = torch.empty_like(x), torch.zeros(3, dtype=torch.int32)
        assert torch.empty(0).numel() == 0
    assert like.stride() == x.stride() and zeros.tolist() == [0, 0, 0] and len(found) == 2
    assert never_stored(like).all()
    like.fill_(1.0)
    assert found[0].damage() is None and not never_stored(like).any()
    for offset, where in ((24 + 2, "3 elements behind its end"), (-3, "3 elements before")):
        one = guard(x, x.device)
        one.buffer.view(x.dtype)[(len(one.buffer) // 4 - 24) // 2 + offset] = 5.0
        assert where in one.damage()
    given = guarded_input(x, math.nan)
    assert torch.equal(given, x) and given.stride() == x.stride()
    assert given.as_strided((1,), (1,), given.storage_offset() + 24).isnan()


def test_what_wrong_cases_have_in_common():
    def outcome(number, wrong):
        return Outcome(CASES[number], torch.float32, None, ["wrong"] * wrong)

    grouped = [i for i, case in enumerate(CASES) if case.heads != case.kv_heads]
    others = [i for i, case in enumerate(CASES) if case.heads == case.kv_heads]
    wrong, right = [outcome(i, True) for i in grouped], [outcome(i, False) for i in others]
    assert common_property(wrong, right).endswith(
        "and 0 of 30 right ones, have grouped heads."
    ) == (len(others) == 30)
    assert common_property(wrong, []) is None and common_property([], right) is None


def test_new_keeps_a_file_and_bench_needs_a_gpu(tmp_path, capsys, monkeypatch):
    assert command.main(["new", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a/mine.py").read_text() == TEXT
    (tmp_path / "a/mine.py").write_text("mine")
    assert command.main(["new", str(tmp_path / "a")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "a/mine.py").read_text() == "mine"
    assert command.main(["check", str(tmp_path / "b.py")]) == 2
    assert "is not there" in capsys.readouterr().err
    (tmp_path / "c.py").write_text(TEXT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["bench", str(tmp_path / "c.py")]) == 2
    assert "no GPU was found" in capsys.readouterr().err


def test_bench_names_the_fastest_first(tmp_path, monkeypatch):
    """With times that are given: one version cannot run, and the file is half as fast as FA2."""
    found = [
        {"version": "fa1", "reason": "it is too old."},
        {"version": "mine.py", "ms_p50": 2.0},
        {"version": "fa2", "ms_p50": 1.0},
    ]
    monkeypatch.setattr(times, "measure", lambda suite, shape, rounds: found)
    monkeypatch.setattr(times, "VERSIONS", known := {})
    version = replace(load(tmp_path), name="mine.py")
    title, refused, first, second, *others = times.lines(version)
    assert known == {"mine.py": version} and len(others) == 12
    assert "B=4 H=16 D=128 full S=4096" in title and refused.split()[0] == "fa1"
    flops = 4 * 4 * 16 * 4096**2 * 128
    assert first.split()[:5] == ["fa2", "1.000", "ms", f"{flops / 1e9:.1f}", "TFLOP/s"]
    assert first.endswith("2.00 x as fast as mine.py") and second.split()[0] == "mine.py"


def loop(*opcodes):
    """A loop of these instructions."""
    return sass.HotLoop(tuple(sass.Instruction("", opcode, "R0, R0") for opcode in opcodes))


def test_instructions_per_score():
    """Of tiles whose scores are known: (queries, keys) of one pass of the loop, head_dim 64."""
    softmax = ("FADD", "MUFU.EX2")
    warps = loop(*["HMMA.16816.F32.BF16"] * 64, *softmax)  # 16 x 64 scores a warp, two products
    kernel = SimpleNamespace(hot_loops=[warps], num_warps=4, ttgir="")
    assert rank.per_score(kernel, 64) == 66 * 32 / (16 * 64)
    wgmma = loop(*["HGMMA.64x128x16.F32.BF16"] * 4, *["HGMMA.64x64x16.F32.BF16"] * 8, *softmax)
    kernel.hot_loops = [loop(*[x.opcode for x in wgmma.instructions], *softmax), wgmma]
    assert rank.per_score(kernel, 64) == 14 * 128 / (64 * 128)  # the loop with fewer
    tcgen05 = "tc_gen5_mma %q : !ttg.memdesc<{}x{}xbf16, #s>, !ttg.memdesc<{}x{}xbf16, #s>, !ttg\n"
    kernel.ttgir = tcgen05.format(128, 64, 64, 32) + 2 * tcgen05.format(128, 32, 32, 64)
    kernel.hot_loops = [loop(*["UTCHMMA"] * 6, *softmax)]  # 64 / 16 + 32 / 16 of them
    assert rank.per_score(kernel, 64) == pytest.approx(8 * 128 / (128 * 32))
    kernel.hot_loops = []
    assert rank.per_score(kernel, 64) == math.inf
