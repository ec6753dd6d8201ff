"""The benchmark's command: what a document holds, resuming, and what hangs or crashes.

What is measured is faked; that real numbers come out is tested on a GPU, at the end.
"""

import json
import types
from dataclasses import replace

import pytest
import torch

from flash_versions import VERSIONS
from flash_versions.bench import __main__ as bench
from flash_versions.bench import document, peers, suites
from flash_versions.bench.suites import Competitor, Shape

SMALL = Shape(B=1, H=4, Hkv=2, M=256, N=256, D=64, causal=True)
SHAPES = [replace(SMALL, M=n, N=n) for n in (16, 32, 64)]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU where there is none")


@pytest.fixture
def laboratory(monkeypatch, tmp_path):
    """`bench.run` on two small suites with invented times; says what was measured."""
    state = types.SimpleNamespace(measured=[], names=["a", "b"], stop_after=None, lost=[])
    state.path = tmp_path / "new" / "results.json"

    def answer(rounds, suite=None, shape=None, lost=None):
        if suite is None:
            return {"copy_tb_per_s": 4.0}
        if state.stop_after is not None and len(state.measured) >= state.stop_after:
            raise KeyboardInterrupt
        state.measured.append((suite, shape["N"]))
        state.lost.append(lost)
        rows = []
        for one in bench.competitors(suite, shape):
            time = {"reason": lost[one.name]} if one.name in lost else {"tflops": shape["N"]}
            rows.append(one.row(suite, Shape(**shape)) | time)
        return {"rows": rows}

    def run(*names, rounds=10):
        state.measured.clear()
        state.lost.clear()
        bench.run(state.path, list(names), bench.Bench(rounds, 0))
        return json.loads(state.path.read_text())

    competing = lambda *_: [Competitor(name, lambda q, k, v: q) for name in state.names]  # noqa: E731
    for room, name, fake in (
        (bench, "SUITES", {"table": SHAPES, "seeds": SHAPES[:1]}),
        (bench, "answer", answer),
        (bench, "competitors", competing),
        (document, "machine", lambda device: {"gpu": "invented"}),
        (document, "commit", lambda: "abc"),
    ):
        monkeypatch.setattr(room, name, fake)
    state.run, state.answer = run, answer
    return state


def test_a_stopped_run_goes_on(laboratory):
    whole = laboratory.run("table", "seeds")
    assert len(whole["rows"]) == 2 * 3 + 2
    assert whole["copy_tb_per_s"] == 4.0 and whole["schema"] == document.SCHEMA
    laboratory.path.unlink()
    laboratory.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        laboratory.run("table", "seeds")
    assert len(json.loads(laboratory.path.read_text())["rows"]) == 4
    laboratory.stop_after = None
    assert laboratory.run("seeds", "table") == whole  # in the order of the suites
    assert laboratory.run("table", "seeds") == whole
    assert laboratory.measured == []
    assert not list(laboratory.path.parent.glob(".*"))
    laboratory.names.append("c")  # a new competitor: its shapes are measured again
    rows = laboratory.run("table")["rows"]
    assert [row["version"] for row in rows[:9]] == ["a", "b", "c"] * 3


@pytest.mark.parametrize("changed", ["commit", "source", "machine", "rounds"])
def test_another_state_starts_anew_and_sets_the_old_aside(laboratory, monkeypatch, capsys, changed):
    old = laboratory.run("table")
    if changed != "rounds":
        new = {"gpu": "other"} if changed == "machine" else "other"
        monkeypatch.setattr(document, changed, lambda *device: new)
    found = laboratory.run("seeds", rounds=20 if changed == "rounds" else 10)
    assert {row["suite"] for row in found["rows"]} == {"seeds"}
    assert json.loads(laboratory.path.with_name("results.previous.json").read_text()) == old
    why = "protocol" if changed == "rounds" else changed
    assert f"it has another {why}" in capsys.readouterr().err
    laboratory.path.write_text("[]")  # of another form
    assert len(laboratory.run("seeds")["rows"]) == 2


class FakeWorker:
    """A process in which "b" hangs; one that says nothing ends."""

    made, silent = 0, False
    answer = None

    def __init__(self, module):
        FakeWorker.made += 1

    def ask(self, task, limit):
        _, suite, _, lost = task
        if self.silent:
            return {"outcome": "failed", "why": "the process ended with 1: no reason given"}
        if suite and "b" not in lost:
            return {"outcome": "failed", "why": f"did not end within {limit:g} s", "running": "b"}
        return self.answer(*json.loads(json.dumps(task)))

    def end(self):
        """It is over."""


def test_the_rest_is_measured_without_what_hangs(laboratory, monkeypatch, capsys):
    """And what is lost is not tried again."""
    monkeypatch.setattr(bench, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "answer", staticmethod(laboratory.answer))
    bench.run(laboratory.path, ["seeds"], bench.Bench(10, 5.0))
    assert FakeWorker.made == 2
    a, b = json.loads(laboratory.path.read_text())["rows"]
    assert a["tflops"] and b["reason"] == "did not end within 5 s"
    assert "b is left out of this shape" in capsys.readouterr().err
    laboratory.names.append("c")
    laboratory.run("seeds")
    assert laboratory.lost == [{"b": "did not end within 5 s"}]
    monkeypatch.setattr(FakeWorker, "silent", True)
    with pytest.raises(RuntimeError, match="the process ended with 1"):  # nobody's fault
        bench.Bench(10, 5.0).ask("seeds", {}, lost={})


# The command.


def test_list_says_what_there_is(capsys):
    assert bench.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in (*suites.SUITES, *VERSIONS, *peers.PEERS))
    for arguments in (["--rounds", "1"], ["--suite", "tables"]):
        with pytest.raises(SystemExit, match="2"):
            bench.main(arguments)
        assert "error: " in capsys.readouterr().err


@no_gpu
def test_benchmark_without_a_gpu_says_so(tmp_path, capsys):
    assert bench.main(["--out", str(tmp_path / "results.json")]) == 2
    assert capsys.readouterr().err.startswith("error: no GPU found")
    assert not list(tmp_path.iterdir())


@no_gpu
def test_command_measures_resumes_and_starts_afresh(laboratory, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    command = ["--suite", "table", "--suite", "seeds", "--out", str(laboratory.path)]
    here = [*command, "--timeout", "0"]
    assert bench.main(here) == 0 and len(laboratory.measured) == 4
    written = capsys.readouterr().err
    assert "[4/4] seeds" in written and "wrote" in written
    assert bench.main([*here, "--quiet"]) == 0 and len(laboratory.measured) == 4
    assert capsys.readouterr().err == ""
    assert bench.main([*here, "--fresh", "--quiet"]) == 0 and len(laboratory.measured) == 8
    [line] = capsys.readouterr().err.splitlines()
    assert "starts anew (--fresh)" in line
    assert laboratory.path.with_name("results.previous.json").exists()
    laboratory.stop_after = 0
    assert bench.main([*here, "--fresh"]) == 130
    assert "stopped; the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(bench, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "silent", True)
    assert bench.main([*command, "--fresh"]) == 1
    assert "error: the process ended with 1" in capsys.readouterr().err


@pytest.mark.gpu
def test_benchmark_measures_and_writes(tmp_path):
    path = tmp_path / "new" / "results.json"
    command = ["--suite", "quick", "--rounds", "10", "--timeout", "120", "--out", str(path)]
    assert bench.main(command) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {*VERSIONS, "torch fa2", "cudnn", "plain"} <= {row["version"] for row in rows}
    for row in rows:
        assert row["version"] == "flash-attn-4" or (row["tflops"] > 0 and row["peak_mib"] > 0)
