"""Documents say what was measured: tables are those of the committed results."""

import importlib.util
import json
import runpy
import sys
from statistics import geometric_mean

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


def test_every_table_is_in_a_document():
    text = "".join(path.read_text() for path in report.DOCUMENTS)
    assert {name for _, name, _ in report.BLOCK.findall(text)} == set(report.TABLES)


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


# Arithmetic, of rows that are made up.


def row(suite, version, rate, **more):
    """A row of causal attention, 128 dims."""
    shape = {"B": 1, "H": 1, "Hkv": 1, "M": 4096, "N": 4096, "D": 128, "causal": True}
    return {"suite": suite, "version": version, "tflops": rate, **shape, **more}


def table_of(name, rows):
    """A table of these rows, measured as the committed ones of a suite were."""
    suites_ = RESULTS["suites"] | {"training step": RESULTS["suites"]["layer"]}
    return report.TABLES[name]({"rows": rows, "suites": suites_, "trace": None}).split("\n\n")[0]


def test_ratios_are_of_the_same_shape():
    rows = [row("table", "fa2", 300.0), row("table", "torch fa2", 200.0)]
    rows += [row("table", "fa2", 100.0, N=8192), row("table", "torch fa2", 400.0, N=8192)]
    table = table_of("prefill", rows)
    assert cells(table, "D=128 causal, S=4096")["fa2"] == "300 (1.50 x)"
    assert cells(table, "D=128 causal, S=8192")["fa2"] == "100 (0.25 x)"


def test_means_are_geometric_over_the_shapes_that_have_both():
    rates = {2048: (100.0, 200.0), 4096: (400.0, 200.0), 8192: (50.0, None)}
    rows = [row("table", "fa2", own, N=n) for n, (own, _) in rates.items()]
    rows += [row("table", "cudnn", other, N=n) for n, (_, other) in rates.items() if other]
    rows += [row("table", "fa2", 300.0, N=1024), row("table", "cudnn", 100.0, N=1024)]
    table = table_of("summary", rows)
    assert cells(table, "D=128, S >= 2048, to cuDNN")["fa2"] == (
        f"{geometric_mean((0.5, 2.0)):.2f} (2 of 3)"
    )
    assert cells(table, "D=128, S < 2048, to cuDNN")["fa2"] == "3.00"


def test_an_ablation_is_the_speed_of_the_variant():
    rows = [row("ablation", "fa3", 200.0, of="fa3", variant="")]
    rows += [row("ablation", "fa3 no overlap", 150.0, of="fa3", variant="no overlap")]
    rows += [row("ablation", "cudnn", 100.0)]
    found = cells(table_of("ablation", rows), "D=128 causal, S=4096")
    assert [*found.values()][1:] == ["200", "0.75", "0.50"]


def test_generation_compares_with_compiled_steps():
    """A row of another commit says so. The README shows what was compared."""
    place = {"suite": "generate", "prompt": 512, "batch": 8}
    llama, old = place | {"case": "llama"}, place | {"case": "llama-old"}
    ours = {"contestant": "ours", "ms_per_step": 2.0, "share": 0.5}
    rows = [
        llama | ours,
        llama | {"contestant": "transformers compiled", "ms_per_step": 5.0},
        llama | {"contestant": "transformers", "ms_per_step": 50.0},
        old | ours | {"date": "1999-12-31", "commit": "abcdef0"},
        old | {"contestant": "transformers compiled", "reason": "no time"},
    ]
    found = report.TABLES["generate"](RESULTS | {"rows": rows})
    assert "some rows are of 1999-12-31 (commit abcdef0)" in found
    line = cells(found.split("\n\n")[0], "llama, batch 8, 512 tokens before")
    assert [*line.values()][1:] == ["4,000", "2.00", "50%", "5.00 (2.5 x)", "50.00"]
    headline = report.TABLES["headline generate"](RESULTS | {"rows": rows})
    assert "llama, batch 8" in headline and "llama-old" not in headline


def test_a_training_step_is_compared_with_torch_compiled():
    """Of the two turns of ours the slower one counts."""
    rates = {"ours compiled": 3000.0, "sdpa compiled": 1000.0, "ours": 500.0}
    rates["ours compiled, again"] = 2000.0
    rows = [
        {"suite": "training step", "length": 2048, "contestant": name, "seconds": 1.0,
         "tokens_per_second": rate}
        for name, rate in rates.items()
    ]  # fmt: skip
    table = table_of("training step", rows)
    assert [*cells(table, "2,048").values()][1:] == ["2,000 (2.00 x)", "1,000", "500 (0.50 x)", "-"]


# The results.


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
            packed = suites.ragged_lengths(shape) if found["version"].endswith(" packed") else None
            flops = shape.flops(packed) * (2.5 if found["pass"] == "backward" else 1)
            assert found["tflops"] == pytest.approx(flops / seconds / 1e12)
