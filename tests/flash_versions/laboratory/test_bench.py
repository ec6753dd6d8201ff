"""The benchmark's command: what a document holds, resuming, and what hangs or crashes.

What is measured is faked; that real numbers come out is tested on a GPU, at the end.
"""

import json
import sys
import types
from dataclasses import replace

import pytest
import torch

from flash_versions import VERSIONS
from flash_versions.bench import peers, suites, watch
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
    state.marker = watch.Marker(tmp_path / "running")
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
    monkeypatch.setattr(bench, "machine", lambda: {"gpu": "invented"})
    monkeypatch.setattr(bench, "commit", lambda: "abc")
    monkeypatch.setattr(bench, "copy_bandwidth", lambda rounds: 4.0)
    monkeypatch.setattr(
        bench,
        "competitors",
        lambda *of: [Competitor(name, lambda q, k, v: q) for name in state.names],
    )

    def run(*names, rounds=10):
        state.measured.clear()
        state.lost.clear()
        bench.run(state.path, list(names), rounds, state.marker)
        return json.loads(state.path.read_text())

    state.run = run
    return state


def test_a_stopped_run_goes_on(laboratory):
    whole = laboratory.run("table", "seeds", "launch")
    assert len(whole["rows"]) == 2 * 3 + 2 + 2 * len(VERSIONS)
    assert whole["copy_tb_per_s"] == 4.0 and whole["schema"] == bench.SCHEMA
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
    assert not list(laboratory.path.parent.glob("*.tmp")) and laboratory.marker.read() is None


def test_suites_add_up_in_their_own_order(laboratory):
    laboratory.run("launch")
    laboratory.run("seeds")
    rows = laboratory.run("table")["rows"]
    assert laboratory.measured == [("table", 16), ("table", 32), ("table", 64)]
    assert list(dict.fromkeys(row["suite"] for row in rows)) == ["table", "seeds", "launch"]


def test_what_fails_before_the_first_mark_of_a_shape_is_not_blamed_on_the_last(
    laboratory, monkeypatch
):
    measure = bench.measure

    def fail_at_32(suite, shape, *rest):
        if shape.N == 32:
            raise MemoryError("no room for the inputs")
        return measure(suite, shape, *rest)

    monkeypatch.setattr(bench, "measure", fail_at_32)
    with pytest.raises(MemoryError):
        laboratory.run("table")
    loss = laboratory.marker.read()
    assert loss.version is None and loss.place["N"] == 32
    rows = json.loads(laboratory.path.read_text())["rows"]
    assert [(row["version"], row["N"], row["tflops"]) for row in rows] == [
        ("a", 16, 16),
        ("b", 16, 16),
    ]


def test_a_loss_takes_the_place_of_the_row_that_there_was(laboratory):
    document = laboratory.run("table")
    row = document["rows"][0]
    bench.record(laboratory.path, watch.Loss(bench.place_of(row), row["version"], "hung"))
    rows = json.loads(laboratory.path.read_text())["rows"]
    assert len(rows) == len(document["rows"])
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
        monkeypatch.setattr(bench, changed, lambda: new)
    laboratory.run("seeds", rounds=20 if changed == "rounds" else 10)
    document = json.loads(laboratory.path.read_text())
    assert {row["suite"] for row in document["rows"]} == {"seeds"}
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
    bench.record(laboratory.path, watch.Loss(bench.place(("table", SHAPES[1])), "b", "it hung"))
    rows = laboratory.run("table")["rows"]
    assert laboratory.lost == [{}, {"b": "it hung"}, {}]
    [row] = [row for row in rows if "reason" in row]
    assert (row["version"], row["N"], row["reason"]) == ("b", 32, "it hung")
    assert len(rows) == 6 + 2
    first = next(iter(VERSIONS))
    bench.record(laboratory.path, watch.Loss({"suite": "launch"}, first, "it hung"))
    laboratory.run("launch")
    assert laboratory.measured == [("launch", tuple(name for name in VERSIONS if name != first))]


def test_progress_says_how_far_and_how_fast(laboratory, capsys):
    laboratory.run("table")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0 of 3 are there already"
    assert lines[1].startswith("[1/3] table B=1 H=4 D=64 causal S=16: a 16, b 16  (")
    assert "about 0 s left" in lines[3]


def test_source_digest_tells_code_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("1")
    before = bench.source()
    assert bench.source() == before
    (tmp_path / "a.py").write_text("2")
    assert bench.source() != before


# What hangs or crashes.

CHILD = """
import json, os, sys, time
from pathlib import Path
path, marker = Path(sys.argv[1]), Path(sys.argv[2])
def mark(version, reason=None):
    place = {place}
    temporary = marker.with_name("mark.tmp")
    temporary.write_text(json.dumps({{"place": place, "version": version, "reason": reason}}))
    temporary.replace(marker)
"""


def child(tmp_path, body):
    """A process that marks and then does what `body` says."""
    place = bench.place(("table", bench.SUITES["table"][0]))
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(place=place) + body)
    marker = watch.Marker(tmp_path / "running")
    return [sys.executable, str(script), str(tmp_path / "results.json"), str(marker.path)], marker


@pytest.mark.parametrize(
    "body, end",
    [
        ("pass", 0),
        ("mark('a')", 0),
        ("sys.exit(2)", 2),
        ("mark('a'); sys.exit(3)", ("a", "ended the process with code 3")),
        ("mark('a'); mark('b', 'illegal access'); sys.exit(3)", ("b", "illegal access")),
        ("mark('a'); os.abort()", ("a", "ended the process with code -6")),
        ("mark('a'); time.sleep(60)", ("a", "did not end within 1 s")),
        ("[(mark('a'), time.sleep(0.4)) for _ in range(5)]", 0),
        # Done after longer than a start may take, and then slow to end.
        ("[(mark('a'), time.sleep(0.8)) for _ in range(5)]; marker.unlink(); time.sleep(1)", 0),
        ("time.sleep(60)", (None, "the measuring process did not start, or did not end.")),
    ],
)
def test_watched_child(tmp_path, body, end, monkeypatch):
    monkeypatch.setattr(watch, "START_SECONDS", 3)
    command, marker = child(tmp_path, body)
    marker.path.write_text('{"place": {}, "version": "of an earlier run", "reason": null}')
    found = watch.watched(command, marker, timeout=1)
    if isinstance(end, int):
        assert found == end
    else:
        assert (found.version, found.reason) == end
        assert found.place == {} if end[0] is None else found.place["suite"] == "table"


def test_the_rest_is_measured_without_what_hangs(tmp_path, capsys):
    body = """
lost = [row["version"] for row in json.loads(path.read_text())["rows"]]
mark("a")
if "b" not in lost: mark("b"); time.sleep(60)
mark("c")
if "c" not in lost: os.abort()
"""
    command, marker = child(tmp_path, body)
    path = tmp_path / "results.json"
    path.write_text('{"rows": []}')
    assert bench.supervise(command, path, marker, timeout=1) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["version"] for row in rows] == ["b", "c"]
    assert [row["reason"] for row in rows] == [
        "did not end within 1 s",
        "ended the process with code -6",
    ]
    assert "b is left out of this shape" in capsys.readouterr().err


def test_what_is_nobodys_fault_stops_the_run(tmp_path, capsys):
    command, marker = child(tmp_path, "mark(None); sys.exit(1)")
    assert bench.supervise(command, tmp_path / "results.json", marker, timeout=1) == 1
    assert capsys.readouterr().err.startswith("error: the measuring process failed at its start")


# The command.


def test_list_says_what_there_is(capsys):
    assert bench.main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in (*suites.SUITES, *VERSIONS, *peers.PEERS):
        assert f"  {name} " in out
    assert "36 shapes" in out


def test_help_lists_the_suites(capsys):
    with pytest.raises(SystemExit, match="0"):
        bench.main(["--help"])
    assert all(about in capsys.readouterr().out for about in [suites.ABOUT["seeds"]])


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
def test_command_watches_a_worker(laboratory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran = {}

    def supervise(command, path, marker, timeout):
        ran.update(command=command, timeout=timeout)
        return 0

    monkeypatch.setattr(bench, "supervise", supervise)
    compiled = []
    monkeypatch.setattr(bench, "precompile", lambda *of: compiled.append(of) or "compiled")
    path = str(laboratory.path)
    assert (
        bench.main(["--suite", "table", "--out", path, "--rounds", "7", "--precompile", "3"]) == 0
    )
    assert compiled == [(3, ["table"])]
    assert ran["timeout"] == bench.TIMEOUT
    monkeypatch.setattr(bench, "run", lambda *of: ran.update(run=of))
    assert bench.main(ran["command"][3:]) == 0
    assert ran["run"][:3] == (laboratory.path, ["table"], 7)


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
