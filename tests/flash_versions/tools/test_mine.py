"""A version in a file: loading it, what `mine check` says of planted mistakes, the ranking."""

import math
import re
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

import flash_versions
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import EXPLICIT
from flash_versions.inspect import sass
from flash_versions.lessons import file_of
from flash_versions.mine import __main__ as command
from flash_versions.mine import rank
from flash_versions.mine.check import START, check, find_faults, last_word
from flash_versions.versions.oracle.suite import CASES, Case

LESSON = str(file_of("fa2"))
LINE = next(i for i, line in enumerate(START.splitlines(), 1) if "k_tile.T" in line)
GROUPED = Case("", 50, 70, heads=6, kv_heads=2, causal=True)
FULL = Case("", 20, 70, heads=2)
EMPTY = Case("", 40, 20, causal=True)
LENGTHS = Case("", 20, 70, batch=2, kv_lengths=(70, 30))
# What is changed in the file, into what, on which call, and what has to be said of it.
WRONG = {
    "other": ("mask=mask, other=0.0", "mask=mask", FULL, "a load without `other`"),
    "rescale": ("alpha * row_sum", "row_sum", FULL,
                "l, what was summed before, is not rescaled when a block of 32 keys"),
    "sum": ("acc * alpha[:, None]", "acc", FULL, "acc, what was summed before, is not rescaled"),
    "own key": ("kv_length - q_length if", "kv_length - q_length + 1 if", GROUPED,
                "a query sees one key too many"),
    "one key less": ("k_pos[None, :] <= last", "k_pos[None, :] < last", FULL,
                     "keys are missing at the end: 1"),
    "grid": ("triton.cdiv(q_length, block_q)", "(q_length // block_q)", FULL,
             "2560 elements of o were never stored"),
    "scale": ("request.scale * LOG2E", "1.0 * LOG2E", FULL, "not multiplied by request.scale"),
    "base": ("tl.log2(row_sum)) / LOG2E", "tl.log2(row_sum))", FULL,
             "each is 1.443 = log2(e) times"),
    "alignment": ("kv_length - q_length if", "0 if", GROUPED,
                  "causal is aligned to the first query"),
    "key heads": ("head // GROUP", "head % 2", GROUPED, "key head h % kv_heads"),
    "lengths": ("if lengths is not None:", "if False:", LENGTHS, "kv_lengths is ignored"),
    "unseen keys": ("load_rows(v, k_pos", "load_rows((v[0], v[1], 70), k_pos", LENGTHS,
                    "o depends on keys behind kv_lengths"),
    "last block": ("range(full_end, end)", "range(full_end, end - 1)", FULL,
                   "keys are missing at the end: 6"),
    "no key": ("tl.where(new_max == float(\"-inf\"), 0.0, new_max)", "new_max", EMPTY,
               "only queries that see no key are wrong; their o must be 0"),
    "input": ("batch, q_length, heads, head_dim = q.shape",
              "batch, q_length, heads, head_dim = q.zero_().shape", FULL, "q was changed"),
    "error": ("q_tile, k_tile.T", "q_tile, v[0]", FULL, f"line {LINE} of "),
}  # fmt: skip


def load(folder, *changes):
    """The version in the file that `new` writes, after changes (old, new)."""
    text = START
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    return flash_versions.load_version(folder / "mine.py")


def faults_of(version, case, dtype=torch.float32, of_lse=False):
    views = [torch.cat((-x, x))[len(x) :] for x in case.inputs(dtype, "cpu")]  # with an offset
    request = make_request(*views, **case.all_options("cpu"))
    assert version.unsupported(request) is None
    return find_faults(version, request, of_lse, searches=False)


@pytest.fixture(autouse=True)
def forgotten():
    """Versions of files are known in one test only."""
    before = dict(EXPLICIT)
    yield
    EXPLICIT.clear()
    EXPLICIT.update(before)


@pytest.mark.parametrize("case", [GROUPED, FULL, EMPTY, LENGTHS])
def test_the_file_is_right(case, tmp_path):
    assert faults_of(load(tmp_path), case, torch.bfloat16 if case is FULL else torch.float32) == []


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_explained(name, tmp_path):
    old, new, case, expected = WRONG[name]
    faults = faults_of(load(tmp_path, (old, new)), case)
    assert any(expected in fault for fault in faults), faults


def test_a_repair_is_found(tmp_path):
    version = load(tmp_path, ("minimum(row + offset", "minimum(row + offset + 1"))
    request = make_request(*GROUPED.inputs(torch.float32, "cpu"), **GROUPED.all_options("cpu"))
    line = next(i for i, line in enumerate(START.splitlines(), 1) if "last_key =" in line)
    assert (
        f"line {line}: `last_key = tl.minimum(row + offset + 1, kv_length - 1)` should be"
        in (find_faults(version, request)[-1])
    )


def test_the_compiler_has_the_last_word(tmp_path):
    assert last_word(load(tmp_path)) is None
    change = "    q_tile =", "    tl.static_assert(DIM < 32)\n    q_tile ="
    said = last_word(load(tmp_path, change))
    assert "Triton's compiler refuses it for sm_90: line " in said
    assert "`tl.static_assert(DIM < 32)`" in said


def test_the_worst_element_is_named(tmp_path):
    """Of o, one element is moved: the position, its value and the right one are those."""
    moved = "    o[0, 3, 1, 5] += 7\n    return o, lse"
    faults = faults_of(load(tmp_path, ("    return o, lse", moved)), FULL)
    assert "1 of 2560 elements are wrong, in o[0, 3, 1, 5]" in faults[0]
    value, right = re.match(r"o\[0, 3, 1, 5\] is (\S+), and (\S+) is right", faults[0]).groups()
    assert abs(float(value) - float(right) - 7) < 1e-3


@pytest.mark.parametrize("version", ["lesson-fa2", LESSON])
def test_a_lesson_is_checked_as_a_file_is(version, capsys, monkeypatch):
    """By its name, or by its file: every case that it takes."""
    monkeypatch.setattr(command, "check", lambda version: islice(check(version), 16))
    assert command.main(["check", version]) == 0
    assert re.search(r"(\d+) of \1 cases are right", capsys.readouterr().out)


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
    end = START.splitlines()[-1]
    version = load(tmp_path, (end, end + BACKWARD.format(given)))
    faults = faults_of(version, FULL, of_lse=of_lse)
    assert {fault.split("[")[0] for fault in faults} == ({"dq", "dk"} if wrong else set())


REFUSED = {
    "no forward": ("def forward(", "def forwards(", "has no function `forward"),
    "unknown": ('"causal"', '"casual"', "FEATURES has 'casual'; there are causal, window"),
    "broken": ("import torch\n", "import torch!\n", "mine.py cannot be run: SyntaxError"),
    "one result": ("return o, lse", "return o", "must return"),
    "dtype": ("return o, lse", "return o, lse.double()", "lse has shape .* torch.float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_version_is_refused(name, tmp_path):
    old, new, expected = REFUSED[name]
    q, k, v = FULL.inputs(torch.float32, "cpu")
    with pytest.raises(ValueError, match=expected):
        flash_versions.attention(q, k, v, version=load(tmp_path, (old, new)).name)


def test_a_changed_file_counts_when_it_is_loaded_again(tmp_path):
    o, q = [], torch.randn(1, 3, 1, 64)
    for number in (1, 2):
        version = load(tmp_path, ("    return o, lse", f"    return o.fill_({number}), lse"))
        o.append(flash_versions.attention(q, q, q, version=version.name).unique().item())
    assert o == [1, 2]


def test_what_is_not_declared_is_refused(tmp_path):
    version = load(tmp_path)
    needed = {
        "window to the right only": "window", "softcap": "softcap", "dropout": "dropout_p",
        "padding on the left": "kv_starts", "values wider than keys": "head_dim_v",
        "intervals of queries by head, grouped": "window", "lengths per row, causal": None,
    }  # fmt: skip
    for case in (case for case in CASES if case.name in needed):
        request = make_request(*case.inputs(torch.float32, "cpu"), **case.all_options("cpu"))
        feature, reason = needed[case.name], version.unsupported(request)
        assert reason == (
            feature and f"version '{version.name}': {feature} is not in its FEATURES."
        )


def test_new_keeps_a_file_and_bench_needs_a_gpu(tmp_path, capsys, monkeypatch):
    assert command.main(["new", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a/mine.py").read_text() == START
    (tmp_path / "a/mine.py").write_text("mine")
    assert command.main(["new", str(tmp_path / "a")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "a/mine.py").read_text() == "mine"
    assert command.main(["check", str(tmp_path / "b.py")]) == 2
    assert "is not there" in capsys.readouterr().err
    (tmp_path / "c.py").write_text(START)
    monkeypatch.setattr(command, "check", lambda version: islice(check(version), 12, 14))
    assert command.main(["check", str(tmp_path / "c.py")]) == 0
    assert "2 of 2 cases are right; 0 were not taken." in capsys.readouterr().out
    (tmp_path / "d.py").write_text(START.replace("head // GROUP", "head % 2"))
    assert command.main(["check", str(tmp_path / "d.py")]) == 1
    assert "WRONG  grouped heads 8:4" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["bench", str(tmp_path / "c.py")]) == 2
    assert "no GPU was found" in capsys.readouterr().err


def test_instructions_per_score():
    """Of tiles whose scores are known: (queries, keys) of one pass of the loop, head_dim 64."""

    def loop(*opcodes):
        return sass.HotLoop(tuple(sass.Instruction("", opcode, "R0, R0") for opcode in opcodes))

    softmax = ("FADD", "MUFU.EX2")
    warps = loop(*["HMMA.16816.F32.BF16"] * 64, *softmax)  # 16 x 64 scores a warp, two products
    kernel = SimpleNamespace(hot_loops=[warps])
    assert rank.per_score(kernel, 64) == 66 * 32 / (16 * 64)
    wgmma = ["HGMMA.64x128x16.F32.BF16"] * 4 + ["HGMMA.64x64x16.F32.BF16"] * 8
    kernel.hot_loops = [loop(*wgmma, *softmax, *softmax), loop(*wgmma, *softmax)]
    assert rank.per_score(kernel, 64) == 14 * 128 / (64 * 128)  # the loop with fewer
    kernel.hot_loops = []
    assert rank.per_score(kernel, 64) == math.inf
