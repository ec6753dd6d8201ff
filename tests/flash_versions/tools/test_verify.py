"""`flash_versions.verify`: what passes, what fails, what hangs, and what is remembered."""

import json
from pathlib import Path

import pytest
import torch

from flash_versions.dispatch import verified
from flash_versions.verify import __main__ as command
from flash_versions.verify import trial
from flash_versions.verify.cases import draw
from flash_versions.versions import fa4

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    verified.sources.cache_clear()


@pytest.fixture
def b200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *x: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *x: (10, 0))


def test_a_small_verification_without_a_gpu(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert command.main(["--simulate", "--versions", "fa2", "--out", str(out)]) == 0
    assert "fa2            passed  3 right, 0 wrong" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["machine"]["gpu"] == "none"
    (row,) = report["rows"]
    assert [case["outcome"] for case in row["cases"]] == ["passed"] * 3
    assert all(0 < case["share_of_budget"] < 1 for case in row["cases"])
    assert verified.read() == []  # a simulator says nothing of a GPU


def test_a_comparison_that_is_stopped_leaves_what_it_found(tmp_path, monkeypatch):
    def answers(tasks, *given):
        yield tasks[0], {"outcome": "passed", "elements": 5, "differ": {"o": 0}}
        why = {"outcome": "failed", "elements": 7, "differ": {"o": 2}, "why": "bits differ"}
        yield tasks[1], why
        raise KeyboardInterrupt

    out = tmp_path / "report.json"
    monkeypatch.setattr(command, "answers", answers)
    monkeypatch.setattr(command, "LINE_SECONDS", -1)
    assert command.main(["--invariance", "--simulate", "--out", str(out), "--quiet"]) == 130
    [row] = json.loads(out.read_text())["rows"]
    assert (row["pairs"], row["elements"], row["differ"]) == (2, 12, {"o": 2})
    assert [x["why"] for x in row["failed"]] == ["bits differ"]


def drawn(has):
    """The first small call with a property."""
    return next(given for given in (draw(i, small=True) for i in range(200)) if has(given))


@pytest.mark.parametrize(
    ("what", "fast", "why"),
    [("o", False, "o: error"), ("dq", True, "dq with deterministic=False: error"),
     ("o", None, "o: two runs differ")],
)  # fmt: skip
def test_a_wrong_result_fails(what, fast, why, monkeypatch):
    """Of the kernels that add in one order, and of those that add in any; or one varies once."""
    really, varied = trial.results, iter((0.0, 0.0, 1e-6, 0.0))

    def spoiled(*arguments, deterministic=True):
        found, do = really(*arguments, deterministic=deterministic)
        if fast is None:
            found[what].view(-1)[0] += next(varied)
        elif deterministic != fast:
            found[what].view(-1)[0] += 0.5
        return found, do

    monkeypatch.setattr(trial, "results", spoiled)
    given = drawn(lambda given: given.backward and given.dtype == torch.float32)
    found = trial.attempt("fa2", given, "cpu")
    assert found["outcome"] == "failed" and found["why"].startswith(why)


def test_what_a_version_does_not_take_is_no_failure():
    found = trial.attempt("fa1", drawn(lambda given: "softcap" in given.case.options), "cpu")
    assert found["outcome"] == "refused" and "softcap" in found["why"]


def test_what_failed_comes_first():
    answered = [
        {"outcome": "failed", "why": "did not end within 2 s"}, *[{"outcome": "not tried"}] * 2
    ]  # fmt: skip
    rows = [{"call": "number=1", **answer} for answer in answered]
    said = command.summary([command.Verdict("hangs", rows, [])], 0.5).splitlines()
    assert said[0] == "hangs, call number=1: did not end within 2 s"
    assert said[1].endswith("FAILED  0 right, 1 wrong, 0 not taken, 2 not tried in 0.5 minutes")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], "no GPU was found"),
        (["--versions", "fa9"], "version 'fa9' is unknown; there are fa1, "),
        (["--simulate", "--limit", "0"], "--limit 0 is not possible"),
        (["--simulate", "--minutes", "nan"], "--minutes nan is not possible"),
        (["--simulate", "--quiet", "--out", "."], "error: .: Is a directory"),
        (["--simulate", "--invariance", "--quiet", "--out", "."], "error: .: Is a directory"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr(command, "answers", lambda tasks, *given: ())
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_what_passed_is_remembered_for_this_gpu(b200, monkeypatch):
    assert not verified.is_verified(fa4.BLACKWELL, GPU)
    verified.record(fa4.BLACKWELL)
    verified.record("fa2")
    assert verified.is_verified(fa4.BLACKWELL, GPU) and verified.is_verified("fa2", GPU)
    assert not verified.is_verified("fa3", GPU)
    assert not verified.is_verified(fa4.BLACKWELL, torch.device("cpu"))
    names = ["NVIDIA B200", "NVIDIA GB300"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda x: names[x.index])
    found = [verified.is_verified(fa4.BLACKWELL, torch.device("cuda", i)) for i in range(2)]
    assert found == [True, False]
    monkeypatch.setattr(verified.triton, "__version__", "4.0.0")
    assert not verified.is_verified(fa4.BLACKWELL, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *x: "NVIDIA GB300")
    verified.record("fa2")
    assert len(verified.read()) == 3, "what is known of the other GPU stays"


def test_a_verification_is_of_these_sources(b200, monkeypatch):
    verified.record(fa4.BLACKWELL)
    really, changed = Path.read_bytes, Path(fa4.__file__)
    monkeypatch.setattr(Path, "read_bytes", lambda x: really(x) + b"#" * (x == changed))
    verified.sources.cache_clear()
    assert not verified.is_verified(fa4.BLACKWELL, GPU)
    verified.record(fa4.BLACKWELL)
    assert verified.is_verified(fa4.BLACKWELL, GPU)
    assert len(verified.read()) == 1, "of the sources before nothing is left"


def test_only_a_whole_verification_on_a_gpu_is_remembered(b200, monkeypatch, tmp_path, capsys):
    first = {}  # what becomes of the first case

    def answered(tasks, *given):
        for task in tasks:
            yield task, {"outcome": "passed", "timing": []} | (first if task[1] == 0 else {})

    monkeypatch.setattr(command, "answers", answered)
    monkeypatch.setattr(command, "workers", lambda options: 1)
    monkeypatch.setattr(command, "new_document", lambda device: {"rows": []})
    rest = ["--versions", "fa2", "--out", str(tmp_path / "report.json")]
    assert command.main(["--quick", *rest]) == 0
    assert not verified.is_verified("fa2", GPU)
    with monkeypatch.context() as patch:
        patch.setattr(verified, "read_sources", lambda: "others")
        assert command.main(rest) == 0
    assert not verified.is_verified("fa2", GPU)
    assert "changed meanwhile, so nothing is remembered" in capsys.readouterr().err
    first = {"outcome": "not tried"}
    assert command.main(rest) == 0
    assert not verified.is_verified("fa2", GPU)
    first = {}
    assert command.main(rest) == 0
    assert verified.is_verified("fa2", GPU)
