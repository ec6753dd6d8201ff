"""Figures show what the JSON says, and the committed ones are of the committed JSON."""

import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from flash_versions.bench import results
from flash_versions.plot import figures as plot
from tests.helpers.committed_results import RESULTS, of_suite, without


def drawn(name, source=RESULTS):
    """{panel title: axes} of a figure."""
    with mpl.rc_context(plot.STYLE):
        figure = plot.PLOTS[name].draw(plot.PLOTS[name].data(source))
    return {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}


def lines_of(ax):
    """{competitor: [(x, y)]} of what is drawn."""
    return {line.get_gid(): list(zip(*line.get_data())) for line in ax.lines}


@pytest.mark.parametrize("name", plot.PLOTS)
def test_committed_figures_are_of_the_committed_results(name):
    """Else: python -m flash_versions.plot."""
    data = plot.PLOTS[name].data(RESULTS)
    assert plot.digest(data) in plot.path_of(name).read_text()
    assert plot.PLOTS[name].data(RESULTS | {"rows": [], "trace": None}) is None


def test_command_draws_and_removes(tmp_path, monkeypatch, capsys):
    """The SVG is the same each time, without a date."""
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    monkeypatch.setattr(plot, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(plot, "PLOTS", {x: plot.PLOTS[x] for x in ("products", "memory")})
    monkeypatch.setattr(plot, "read_results", lambda: RESULTS)
    assert plot.main() == 0
    products = plot.path_of("products")
    text = products.read_text()
    assert ET.fromstring(text).tag.endswith("svg") and "<dc:date>" not in text
    assert text == plot.svg("products", plot.PLOTS["products"].data(RESULTS))
    lost = without(lambda row: row["suite"] != "table")
    monkeypatch.setattr(plot, "read_results", lambda: lost)
    assert plot.main() == 0
    assert list(plot.FIGURES.rglob("*.*")) == [products]
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


def test_roofline_places_points_by_their_intensity():
    """Without a mask, S queries and keys: 4 S^2 D operations on 8 S D bytes."""
    found = lines_of(drawn("roofline")["D=128 full"])["fa2"]
    rates = {row["N"]: row["tflops"] for row in of_suite("table")
             if (row["version"], row["D"], row["causal"]) == ("fa2", 128, False)}  # fmt: skip
    prefill = {x: y for x, y in found if x > 10}
    assert prefill == pytest.approx({n / 2: rate for n, rate in rates.items()})
