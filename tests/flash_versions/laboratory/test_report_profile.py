"""The profile of the backward: from what ncu prints to the table in the documents."""

import pytest

from flash_versions.bench import profile_backward
from flash_versions.bench.profile_backward import CALLS, rows_of
from flash_versions.report.profile import NOT_MEASURED, backward_profile

METRICS = {
    "gpu__time_duration.sum": ("ns", "2,500,000"),
    "launch__registers_per_thread": ("register/thread", "128"),
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active": ("%", "61.5"),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("%", "20.25"),
    "smsp__issue_active.avg.per_cycle_active": ("", "0.44"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", "1,500,000"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "5.5"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "7.25"),
}


def printed(kernels) -> str:
    """CSV as ncu prints it: what it says of itself, names, units, a row for each kernel."""
    lines = [["ID", "Kernel Name", *METRICS], ["", "", *(unit for unit, _ in METRICS.values())]]
    values = [value for _, value in METRICS.values()]
    lines += [[str(i), "backward_kernel", *values] for i in range(kernels)]
    table = [",".join(f'"{cell}"' for cell in line) for line in lines]
    return "\n".join(["==PROF== Connected to process 7", *table, ""])


def document(rows):
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}
    about = {"machine": machine, "date": "2026-11-22", "commit": "0123abc", "protocol": {}}
    return {"rows": rows, "suites": {"backward profile": about}, "trace": None}


def test_rows_have_the_first_counter_that_there_is():
    rows = rows_of(printed(len(CALLS)))
    assert [(x["D"], x["causal"], x["eighths"]) for x in rows] == CALLS
    assert {x["version"] for x in rows if x["eighths"]} == {"fa4"}
    row = rows[0]
    assert (row["microseconds"], row["registers"], row["tensor_pct"]) == (2500.0, 128.0, 61.5)
    assert row["issue_pct"] == pytest.approx(44.0) and row["store_conflicts"] == 1.5e6
    assert "fma_pct" not in row
    assert row["stalls"] == {"long_scoreboard": 7.25, "gmma": 5.5}
    assert list(row["stalls"]) == ["long_scoreboard", "gmma"]


def test_every_call_has_to_be_there():
    with pytest.raises(ValueError, match=f"holds 5 kernels; it must hold the {len(CALLS)}"):
        rows_of(printed(5))


def test_the_table():
    table = backward_profile(document(rows_of(printed(len(CALLS)))))
    assert "| D=128 full | D=128 causal | D=128 full, 2/8 polynomial | D=64 full |" in table
    assert f"| tensor cores |{' 62 |' * len(CALLS)}" in table
    assert f"| bank conflicts of stores, million |{' 1.5 |' * len(CALLS)}" in table
    assert "multiply-adds" not in table, "a counter that nobody read has no line"
    assert "long scoreboard 7.2, gmma 5.5" in table
    assert "At D=128 full the busiest are: tensor cores, 62 %, and issue slots, 44 %." in table
    assert "NVIDIA H200" in table and "commit 0123abc" in table


def test_nothing_was_measured():
    assert backward_profile({"rows": [], "suites": {}, "trace": None}) == NOT_MEASURED


def test_what_is_missing_is_said(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        profile_backward.main([])
    assert "--out is missing" in capsys.readouterr().err
    monkeypatch.setattr(profile_backward.shutil, "which", lambda name: None)
    monkeypatch.setattr(profile_backward, "NCU", "/nowhere/ncu")
    with pytest.raises(FileNotFoundError, match="neither on PATH nor /nowhere/ncu"):
        profile_backward.find_ncu()


def test_csv_replaces_the_rows(tmp_path):
    out, text = tmp_path / "profile.json", tmp_path / "ncu.csv"
    out.write_text('{"commit": "0123abc", "rows": []}')
    text.write_text(printed(len(CALLS)))
    assert profile_backward.main(["--out", str(out), "--csv", str(text)]) == 0
    found = profile_backward.json.loads(out.read_text())
    assert found["commit"] == "0123abc" and len(found["rows"]) == len(CALLS)
