"""Figures show what the JSON says, and the committed ones are of the committed JSON."""

import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from docs.report.figures import FIGURES
from flash_versions.bench import results
from flash_versions.plot import figures as plot
from tests.helpers.committed_results import RESULTS, of_suite, without

ALL = plot.PLOTS | FIGURES


def drawn(name, source=RESULTS):
    """{panel title: axes} of a figure."""
    with mpl.rc_context(plot.STYLE):
        figure = ALL[name].draw(ALL[name].data(source))
    return {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}


def lines_of(ax):
    """{competitor: [(x, y)]} of what is drawn."""
    return {line.get_gid(): list(zip(*line.get_data())) for line in ax.lines}


@pytest.mark.parametrize("name", ALL)
def test_committed_figures_are_of_the_committed_results(name):
    """Else: make plot."""
    data = ALL[name].data(RESULTS)
    assert plot.digest(data) in plot.path_of(name, ALL[name]).read_text()
    assert ALL[name].data(RESULTS | {"rows": [], "trace": None}) is None


def test_command_draws_and_removes(tmp_path, monkeypatch, capsys):
    """The SVG is the same each time, without a date."""
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    monkeypatch.setattr(plot, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(plot, "PLOTS", {x: ALL[x] for x in ("generation", "memory")})
    monkeypatch.setattr(plot, "read_results", lambda: RESULTS)
    plot.draw_all(plot.PLOTS)
    generation = plot.path_of("generation", ALL["generation"])
    text = generation.read_text()
    assert ET.fromstring(text).tag.endswith("svg") and "<dc:date>" not in text
    assert text == plot.svg(ALL["generation"], ALL["generation"].data(RESULTS))
    lost = without(lambda row: row.get("suite") != "table")
    monkeypatch.setattr(plot, "read_results", lambda: lost)
    plot.draw_all(plot.PLOTS)
    assert list(plot.FIGURES.rglob("*.*")) == [generation]
    assert "memory: nothing was measured to draw it from" in capsys.readouterr().err


@pytest.mark.parametrize("name, suite, key", [
    ("backward", "backward", "tflops"), ("memory", "table", "peak_mib")
])  # fmt: skip
def test_lines_are_those_of_the_results(name, suite, key):
    expected = {}
    for row in of_suite(suite):
        if key in row and not (name == "memory" and row["causal"]):
            lines = expected.setdefault(f"D={row['D']} {results.mask(row)}", {})
            lines.setdefault(row["version"], []).append((row["N"], row[key]))
    expected = {p: {x: sorted(line) for x, line in found.items()} for p, found in expected.items()}
    assert {panel: lines_of(ax) for panel, ax in drawn(name).items()} == expected
