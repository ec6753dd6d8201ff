"""Documents say what was measured: tables are those of the committed results."""

import importlib.util
import json
import runpy
import sys

import pytest

from flash_versions.bench import results, suites
from flash_versions.report import documents as report
from tests.helpers.committed_results import RESULTS, cells, without

MAINS = {"report": "documents", "plot": "figures"}


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_documents_say_what_was_measured(path):
    """Every marked block is what `python -m flash_versions.report` would write now."""
    text = path.read_text()
    assert report.filled(text, RESULTS) == text


@pytest.mark.parametrize("room", MAINS)
def test_commands_write_nothing_when_they_are_asked_for_something_else(room, monkeypatch):
    written = []
    monkeypatch.setattr(f"flash_versions.{room}.{MAINS[room]}.main", lambda: written.append(1))
    for option, code in (("--help", 0), ("--out", 2)):
        monkeypatch.setattr(sys, "argv", [room, option])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"flash_versions.{room}", run_name="__main__")
        assert (ended.value.code, written) == (code, [])


def test_command_rewrites_the_blocks_only(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: seeds -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "DOCUMENTS", [page])
    assert report.main() == 0
    table = report.TABLES["seeds"](RESULTS)
    assert page.read_text() == f"before\n<!-- results: seeds -->\n{table}<!-- end -->\nafter\n"
    assert list(tmp_path.iterdir()) == [page]


def test_a_table_that_was_not_measured_names_a_command_that_there_is():
    for name, table in report.TABLES.items():
        begin, command, end = table(RESULTS | {"rows": []}).split("`")
        assert (begin, end) == ("Not measured yet: ", ".\n"), name
        words = command.split()
        assert importlib.util.find_spec(words[words.index("-m") + 1])
        assert "--suite" not in words or command.split('"')[1] in suites.SUITES


def test_what_is_missing_is_a_dash_and_changes_no_other_cell():
    name, before = "D=64 causal, S=4096", report.rates(RESULTS, "table")
    lost = without(lambda r: (r.get("version"), r.get("N")) != ("fa3", 4096))
    assert cells(report.rates(lost, "table"), name) == cells(before, name) | {"fa3": "-"}
    alone = report.rates(without(lambda r: r.get("version") != "torch fa2"), "table")
    found = cells(alone, name)
    assert "torch FA2" not in found and " x)" not in found["fa2"]


def test_what_is_measured_twice_is_refused():
    for name, words in (
        ("forward/h200.json", "suite '.*' is in two files of results, of commits"),
        ("forward/h200-trace.json", "there are 2 traces, of commits"),
    ):
        found = json.loads((results.RESULTS / name).read_text())
        with pytest.raises(ValueError, match=words):
            results.merged([found, found])
