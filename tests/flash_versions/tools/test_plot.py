"""Figures show what the JSON says, and the committed ones are of the committed JSON."""

import xml.etree.ElementTree as ET
from statistics import geometric_mean

import matplotlib as mpl
import pytest

from docs.report.figures import FIGURES
from flash_versions.bench import results
from flash_versions.plot import figures as plot
from flash_versions.plot import timeline
from tests.helpers.committed_results import RESULTS, of_suite, ratio, without

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
    assert plot.main() == 0
    generation = plot.path_of("generation", ALL["generation"])
    text = generation.read_text()
    assert ET.fromstring(text).tag.endswith("svg") and "<dc:date>" not in text
    assert text == plot.svg(ALL["generation"], ALL["generation"].data(RESULTS))
    lost = without(lambda row: row.get("suite") != "table")
    monkeypatch.setattr(plot, "read_results", lambda: lost)
    assert plot.main() == 0
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


def test_ablation_bars_are_means_of_ratios():
    ax = drawn("ablation")["fa4, D=128 causal"]
    bars = dict(zip([x.get_text() for x in ax.get_yticklabels()], ax.patches, strict=True))
    lengths = {row["N"] for row in of_suite("ablation") if row["D"] == 128}
    for title, name in (("always rescale", "fa4 always rescale"), ("fa3", "fa3")):
        places = [{"N": n, "D": 128, "causal": True} for n in lengths]
        mean = geometric_mean(ratio("ablation", name, "fa4", **place) for place in places)
        assert bars[title].get_width() == pytest.approx(100 * (mean - 1))


def test_names_do_not_touch_and_stay_inside():
    moved = plot.spread([0.0, 0.01, 0.5, 0.52, 0.53, 1.0, 1.0], 0.06)
    assert all(b - a >= 0.06 - 1e-9 for a, b in zip(moved, moved[1:]))
    assert min(moved) >= -1e-9 and max(moved) <= 1 + 1e-9
    assert plot.spread([0.1, 0.5, 0.9], 0.06) == pytest.approx([0.1, 0.5, 0.9])


def test_timeline_shows_a_few_tiles_and_merges_what_touches():
    stores = [["store", 600 * tile, 600 * tile + 80] for tile in (1, 2, 3, 4)]
    roles = {"loader": [["copy", 0, 900], ["copy", 900, 2400]], "storer": stores}
    trace = {"what": {}, "clock_mhz": 1000.0, "programs": [{"program": 7, "roles": roles}]}
    panels = drawn("timeline", {"trace": trace})
    whole, close = panels.values()
    assert whole.get_xlim() == pytest.approx((0, 1.88))  # to the end of the third store
    low, high = close.get_xlim()
    assert low < 0.68 < high and high - low == pytest.approx(0.188)
    assert timeline.merged(roles["loader"]) == [("copy", 0, 2400)]
