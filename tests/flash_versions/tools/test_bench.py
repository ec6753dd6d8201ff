"""The benchmark's command: what a document holds, resuming, and what hangs or crashes.

What is measured is faked; that real numbers come out is tested on a GPU, at the end.
"""

import io
import json
import re
import sys
import types
from dataclasses import replace

import pytest
import torch

from flash_versions import VERSIONS
from flash_versions.bench import document, files, peers, suites
from flash_versions.bench import run as bench
from flash_versions.bench.suites import Competitor, Shape

SMALL = Shape(B=1, H=4, Hkv=2, M=256, N=256, D=64, causal=True)
SHAPES = [replace(SMALL, M=n, N=n) for n in (16, 32, 64)]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU where there is none")


# Resuming.


@pytest.fixture
def laboratory(monkeypatch, tmp_path):
    """`bench.run` on two small suites with invented times; says what was measured."""
    state = types.SimpleNamespace(measured=[], names=["a", "b"], stop_after=None, lost=[])
    state.path = tmp_path / "new" / "results.json"
    state.mark = bench.Mark(tmp_path / "running")
    faked_suites = {"table": SHAPES, "seeds": SHAPES[:1], "launch": []}
    monkeypatch.setattr(bench, "SUITES", faked_suites)

    def fake_measure(suite, shape, rounds, mark, lost, telemetry):
        if state.stop_after is not None and len(state.measured) >= state.stop_after:
            raise KeyboardInterrupt
        state.measured.append((suite, shape.N))
        state.lost.append(lost)
        rows = []
        for one in bench.competitors(suite, shape):
            mark(one.name)
            time = {"reason": lost[one.name]} if one.name in lost else {"tflops": shape.N}
            rows.append(one.row(suite, shape) | time)
        return rows

    def fake_host_times(rounds, versions, mark):
        state.measured.append(("launch", tuple(versions)))
        return [
            {"suite": "launch", "version": v, "call": call, "host_us": 1.0}
            for v in versions
            for call in ("forward", "backward")
        ]

    class NoTelemetry:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(bench, "measure", fake_measure)
    monkeypatch.setattr(bench, "host_times", fake_host_times)
    monkeypatch.setattr(bench, "Telemetry", NoTelemetry)
    monkeypatch.setattr(document, "machine", lambda device: {"gpu": "invented"})
    monkeypatch.setattr(document, "commit", lambda: "abc")
    monkeypatch.setattr(bench, "copy_bandwidth", lambda rounds: 4.0)
    monkeypatch.setattr(
        bench,
        "competitors",
        lambda *of: [Competitor(name, lambda q, k, v: q) for name in state.names],
    )

    def run(*names, rounds=10):
        state.measured.clear()
        state.lost.clear()
        bench.run(state.path, list(names), rounds, state.mark)
        return json.loads(state.path.read_text())

    state.run = run
    return state


def test_a_stopped_run_goes_on(laboratory):
    whole = laboratory.run("table", "seeds", "launch")
    assert len(whole["rows"]) == 2 * 3 + 2 + 2 * len(VERSIONS)
    assert whole["copy_tb_per_s"] == 4.0 and whole["schema"] == document.SCHEMA
    laboratory.path.unlink()
    laboratory.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        laboratory.run("table", "seeds", "launch")
    assert len(json.loads(laboratory.path.read_text())["rows"]) == 4
    laboratory.stop_after = None
    assert laboratory.run("table", "seeds", "launch") == whole
    assert laboratory.measured == [("table", 64), ("seeds", 16), ("launch", tuple(VERSIONS))]
    assert laboratory.run("table", "seeds", "launch") == whole
    assert laboratory.measured == []
    assert not list(laboratory.path.parent.glob("*.tmp")) and laboratory.mark.read() is None


def test_suites_add_up_in_their_own_order(laboratory):
    laboratory.run("launch")
    laboratory.run("seeds")
    rows = laboratory.run("table")["rows"]
    assert laboratory.measured == [("table", 16), ("table", 32), ("table", 64)]
    assert list(dict.fromkeys(row["suite"] for row in rows)) == ["table", "seeds", "launch"]


def lose(laboratory, place, version, reason):
    """Record a loss as the parent process does."""
    bench.lose(laboratory.path, {"place": place, "version": version, "reason": reason})


def test_a_loss_takes_the_place_of_the_row_that_there_was(laboratory):
    before = laboratory.run("table")["rows"]
    row = before[0]
    lose(laboratory, bench.place_of(row), row["version"], "hung")
    rows = json.loads(laboratory.path.read_text())["rows"]
    assert len(rows) == len(before)
    [found] = [r for r in rows if r["version"] == "a" and r["N"] == row["N"]]
    assert found["reason"] == "hung"


def test_a_new_competitor_measures_a_shape_again(laboratory):
    laboratory.run("table")
    laboratory.names.append("c")
    rows = laboratory.run("table")["rows"]
    assert len(laboratory.measured) == 3
    assert [row["version"] for row in rows] == ["a", "b", "c"] * 3


@pytest.mark.parametrize("changed", ["commit", "source", "machine", "rounds"])
def test_another_state_starts_anew_and_sets_the_old_aside(laboratory, monkeypatch, capsys, changed):
    old = laboratory.run("table")
    if changed != "rounds":
        new = {"gpu": "other"} if changed == "machine" else "other"
        monkeypatch.setattr(document, changed, lambda *device: new)
    laboratory.run("seeds", rounds=20 if changed == "rounds" else 10)
    rows = json.loads(laboratory.path.read_text())["rows"]
    assert {row["suite"] for row in rows} == {"seeds"}
    assert json.loads(laboratory.path.with_name("results.previous.json").read_text()) == old
    why = "protocol" if changed == "rounds" else changed
    assert f"it has another {why}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}'])
def test_a_file_of_another_form_is_set_aside(laboratory, text):
    laboratory.path.parent.mkdir()
    laboratory.path.write_text(text)
    assert len(laboratory.run("seeds")["rows"]) == 2
    assert laboratory.path.with_name("results.previous.json").read_text() == text


def test_the_lost_are_not_tried_again(laboratory):
    laboratory.run("seeds")
    lose(laboratory, bench.place(("table", SHAPES[1])), "b", "it hung")
    rows = laboratory.run("table")["rows"]
    assert laboratory.lost == [{}, {"b": "it hung"}, {}]
    [row] = [row for row in rows if "reason" in row]
    assert (row["version"], row["N"], row["reason"]) == ("b", 32, "it hung")
    assert len(rows) == 6 + 2
    first = next(iter(VERSIONS))
    lose(laboratory, {"suite": "launch"}, first, "it hung")
    laboratory.run("launch")
    assert laboratory.measured == [("launch", tuple(name for name in VERSIONS if name != first))]


# What hangs or crashes.


CHILD = """
import importlib.util, json, os, sys, time
from pathlib import Path

_, module, path, running, place, *how = sys.argv
spec = importlib.util.spec_from_file_location("files", module)  # starts without torch
spec.loader.exec_module(files := importlib.util.module_from_spec(spec))
mark = files.Mark(Path(running), seconds=1)
mark(None)
if "fails" in how:
    raise MemoryError("no room for the inputs")
mark.place = json.loads(place)
lost = [row["version"] for row in json.loads(Path(path).read_text())["rows"]]
for version, end in (("a", None), ("b", time.sleep), ("c", lambda _: os.abort())):
    mark(version)
    if end is not None and version not in lost:
        end(60)
mark.clear()
"""


def supervised(tmp_path, *how):
    """The exit code of a process that hangs in b and crashes in c, unless they are lost."""
    path, mark = tmp_path / "results.json", bench.Mark(tmp_path / "running")
    path.write_text('{"rows": []}')
    mark(None, "of an earlier run")
    place = json.dumps(bench.place(("table", bench.SUITES["table"][0])))
    command = [sys.executable, "-c", CHILD, files.__file__, str(path), str(mark.path), place, *how]
    return bench.supervise(command, path, mark), json.loads(path.read_text())["rows"]


def test_the_rest_is_measured_without_what_hangs_or_crashes(tmp_path, capsys):
    code, rows = supervised(tmp_path)
    assert code == 0 and [row["version"] for row in rows] == ["b", "c"]
    assert {row["reason"] for row in rows} == {"did not end within 1 s, or ended the process"}
    assert "b is left out of this shape" in capsys.readouterr().err


def test_what_is_no_competitors_fault_stops_the_run(tmp_path, capsys):
    code, rows = supervised(tmp_path, "fails")
    assert code == 1 and not rows
    assert capsys.readouterr().err == "error: the measuring process ended with code 1\n"


# The command.


def test_list_says_what_there_is(capsys):
    assert bench.main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*suites.SUITES, *VERSIONS, *peers.PEERS):
        assert f"  {name} " in out
    assert "36 shapes" in out


@pytest.mark.parametrize("arguments", [["--rounds", "1"], ["--suite", "tables"]])
def test_command_refuses(arguments, capsys):
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
    command += ["--timeout", "0"]
    assert bench.main(command) == 0
    assert len(laboratory.measured) == 4
    assert bench.main(command) == 0
    assert len(laboratory.measured) == 4
    assert bench.main([*command, "--fresh"]) == 0
    assert len(laboratory.measured) == 8
    assert laboratory.path.with_name("results.previous.json").exists()
    laboratory.stop_after = 0
    assert bench.main([*command, "--fresh"]) == 130
    assert "stopped; the same command goes on" in capsys.readouterr().err


@no_gpu
def test_a_terminal_gets_a_bar(laboratory, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert bench.main(["--suite", "seeds", "--out", str(laboratory.path), "--timeout", "0"]) == 0
    written = sys.stderr.getvalue()
    assert "1/1 [" in written and written.count("[1/1] seeds") == 1


@no_gpu
def test_quiet(laboratory, monkeypatch, capsys):
    """Progress is silent, in the child process, too; what a user has to know is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    command = ["--suite", "seeds", "--out", str(laboratory.path)]
    assert bench.main([*command, "--timeout", "0"]) == 0
    assert {"[1/1] seeds", "wrote"} <= set(
        re.findall(r"\[1/1\] seeds|wrote", capsys.readouterr().err)
    )
    assert bench.main([*command, "--timeout", "0", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert bench.main([*command, "--timeout", "0", "--quiet", "--fresh"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert "starts anew (--fresh)" in line
    monkeypatch.setattr(bench, "supervise", lambda command, *_: "--quiet" not in command)
    assert bench.main([*command, "--quiet"]) == 0


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("timeout", ["0", "120"], ids=["here", "in a child"])
def test_benchmark_measures_and_writes(tmp_path, monkeypatch, timeout):
    if timeout == "0":
        monkeypatch.setitem(bench.SUITES, "quick", [SMALL])
    path = tmp_path / "new" / "results.json"
    command = ["--suite", "quick", "--rounds", "10", "--timeout", timeout, "--out", str(path)]
    assert bench.main(command) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {*VERSIONS, "torch fa2", "cudnn", "plain"} <= {row["version"] for row in rows}
    for row in rows:
        assert row["version"] == "flash-attn-4" or (row["tflops"] > 0 and row["peak_mib"] > 0)
