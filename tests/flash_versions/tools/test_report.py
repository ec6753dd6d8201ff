"""Documents say what was measured: tables are those of the committed results."""

import json
from datetime import date

import pytest

from docs.report import __main__ as report
from docs.report.attention import rates
from flash_versions.bench import results, suites
from tests.helpers.committed_results import RESULTS, cells, without


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_documents_say_what_was_measured(path):
    """Every marked block is what `python -m docs.report` would write now."""
    text = path.read_text()
    assert report.filled(text, RESULTS) == text


def test_every_table_is_in_a_document():
    text = "".join(path.read_text() for path in report.DOCUMENTS)
    assert {name for _, name, _ in report.BLOCK.findall(text)} == set(report.TABLES)


def test_command_rewrites_the_blocks_only(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: summary -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "DOCUMENTS", [page])
    monkeypatch.setattr(report, "FIGURES", {})
    assert report.main() == 0
    table = report.TABLES["summary"](RESULTS)
    assert page.read_text() == f"before\n<!-- results: summary -->\n{table}<!-- end -->\nafter\n"
    assert list(tmp_path.iterdir()) == [page]


def test_what_is_missing_is_a_dash_and_changes_no_other_cell():
    name, before = "D=64 causal, S=4096", rates(RESULTS, "table")
    lost = without(lambda r: (r.get("version"), r.get("N")) != ("fa3", 4096))
    assert cells(rates(lost, "table"), name) == cells(before, name) | {"fa3": "-"}
    alone = rates(without(lambda r: r.get("version") != "torch fa2"), "table")
    found = cells(alone, name)
    assert "torch FA2" not in found and " x)" not in found["fa2"]


# The results.


def test_every_file_says_what_was_measured_where_and_when():
    """Pages read these of every suite."""
    for path in sorted(results.RESULTS.glob("*/*.json")):
        found = json.loads(path.read_text())
        assert found["machine"]["gpu"] and found["commit"], path
        assert date.fromisoformat(found["date"]), path
        assert found.get("programs") or all(row["suite"] for row in found["rows"]), path


def test_what_is_measured_twice_is_refused():
    for name, words in (
        ("forward/h200.json", "suite '.*' is in two files of results, of commits"),
        ("forward/h200-trace.json", "there are 2 traces, of commits"),
    ):
        found = json.loads((results.RESULTS / name).read_text())
        with pytest.raises(ValueError, match=words):
            results.merged([found, found])


def test_rates_are_operations_over_the_median():
    for found in RESULTS["rows"]:
        if "reason" in found or not suites.SUITES.get(found["suite"]):
            continue
        shape = suites.Shape(**{key: found[key] for key in suites.Shape.__dataclass_fields__})
        assert shape in suites.SUITES[found["suite"]]
        assert 0 < found["ms_p20"] <= found["ms_p50"] <= found["ms_p80"]
        seconds = found["ms_p50"] / 1e3
        if found["suite"] in ("decode", "quantize"):
            moved = found.get("bytes", 2 * shape.B * shape.N * shape.Hkv * shape.D * 2)
            assert found["tb_per_s"] == pytest.approx(moved / seconds / 1e12)
        else:
            flops = shape.flops() * (2.5 if found["pass"] == "backward" else 1)
            assert found["tflops"] == pytest.approx(flops / seconds / 1e12)
