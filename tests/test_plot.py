"""Figures show what the JSON says, and the committed ones are of the committed JSON."""

import json
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from synthetic_results import SPEED, VARIANTS, document

from flash_versions import plot, report

RESULTS = report.read_results()
SYNTHETIC = report.merged([document()])
SOURCES = {"committed": RESULTS, "synthetic": SYNTHETIC}


def drawn(name, source):
    """{panel title: axes} of a figure."""
    with mpl.rc_context(plot.STYLE):
        figure = plot.PLOTS[name].draw(plot.PLOTS[name].data(source))
    return {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}


def lines_of(ax):
    """{competitor: [(x, y)]} of what is drawn, without the roofs."""
    roofs = ("roof", "tensor cores", "exp2", "one after the other")
    return {
        line.get_gid(): list(zip(line.get_xdata(), line.get_ydata()))
        for line in ax.lines
        if line.get_gid() not in roofs
    }


@pytest.mark.parametrize("name", plot.PLOTS)
def test_committed_figures_are_of_the_committed_results(name):
    """Else: python -m flash_versions.plot."""
    path, data = plot.FIGURES / f"{name}.svg", plot.PLOTS[name].data(RESULTS)
    assert path.exists() == (data is not None)
    if data is not None:
        assert plot.digest(data) in path.read_text()


def test_no_other_figures_are_committed():
    assert {path.stem for path in plot.FIGURES.iterdir()} <= set(plot.PLOTS)


@pytest.mark.parametrize("name, suite", [("forward", "table"), ("backward", "backward")])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_rates_are_those_of_the_results(name, suite, source):
    rows = [row for row in source["rows"] if row["suite"] == suite and "tflops" in row]
    expected = {}
    for row in rows:
        panel = f"D={row['D']} {'causal' if row['causal'] else 'full'}"
        line = expected.setdefault(panel, {}).setdefault(row["version"], [])
        line.append((row["N"], row["tflops"]))
    panels = drawn(name, source)
    assert {panel: lines_of(ax) for panel, ax in panels.items()} == {
        panel: {version: sorted(line) for version, line in lines.items()}
        for panel, lines in expected.items()
    }


def test_speedup_is_over_torch():
    for ax in drawn("speedup", SYNTHETIC).values():
        for version, points in lines_of(ax).items():
            ratio = SPEED[version] / SPEED["torch fa2"]
            assert [y for _, y in points] == pytest.approx([ratio] * len(points))


def test_memory_is_linear_but_for_plain_pytorch():
    panels = drawn("memory", SYNTHETIC)
    assert list(panels) == ["D=64 full", "D=128 full", "D=256 full"]
    for ax in panels.values():
        for version, points in lines_of(ax).items():
            rows = [r for r in SYNTHETIC["rows"] if r["suite"] == "table" and not r["causal"]]
            found = {r["N"]: r["peak_mib"] for r in rows if r["version"] == version}
            assert all(
                y in [r["peak_mib"] for r in rows if (r["version"], r["N"]) == (version, x)]
                for x, y in points
            )
            assert len(points) == len(found)


def test_ablation_bars_are_ratios():
    panels = drawn("ablation", SYNTHETIC)
    assert "fa3, D=128 causal" in panels and len(panels) == 6
    for ax in panels.values():
        bars = [patch.get_width() for patch in ax.patches]
        assert [label.get_text() for label in ax.get_yticklabels()] == [*VARIANTS, "cuDNN"]
        ratios = [*VARIANTS.values(), SPEED["cudnn"] / SPEED["fa3"]]
        assert bars == pytest.approx([100 * (ratio - 1) for ratio in ratios])


def test_roofline_places_points_by_their_intensity():
    """Without a mask, S queries and keys: 4 S^2 D operations on 8 S D bytes; decoding with 4 query
    heads per key head: four times the one FLOP per byte.
    """
    panels = drawn("roofline", SYNTHETIC)
    assert list(panels) == ["D=64 full", "D=128 full", "D=256 full"]
    rows = [r for r in SYNTHETIC["rows"] if (r["suite"], r.get("D")) == ("table", 128)]
    rates = {r["N"]: r["tflops"] for r in rows if not r["causal"] and r["version"] == "fa2"}
    decode, *points = lines_of(panels["D=128 full"])["fa2"][2:]
    assert dict(points) == pytest.approx({n / 2: rate for n, rate in rates.items()})
    assert decode[0] == pytest.approx(4, rel=1e-3)
    assert decode[1] == pytest.approx(4 * SPEED["fa2"] / 200, rel=1e-3)


def test_roofs_of_the_h200():
    """FlashAttention-3's own count: 3.9 TFLOP/s of special functions against 989 of products."""
    assert plot.exp2_roof(128) / (4 * 128) == pytest.approx(3.9, rel=0.02)
    assert plot.exp2_roof(64) == pytest.approx(plot.TENSOR_TFLOPS)
    [roof] = [
        line for line in drawn("roofline", RESULTS)["D=128 full"].lines if line.get_gid() == "roof"
    ]
    (x0, ridge, _), (y0, flat, _) = roof.get_data()
    assert (y0 / x0, flat) == (plot.HBM_TB_PER_S, plot.TENSOR_TFLOPS)
    assert ridge * plot.HBM_TB_PER_S == pytest.approx(flat)


def test_roofs_are_of_this_gpu_only():
    suites = {
        suite: about | {"machine": about["machine"] | {"gpu": "NVIDIA A100"}}
        for suite, about in RESULTS["suites"].items()
    }
    assert plot.roofline_data(RESULTS | {"suites": suites}) is None


def test_what_failed_is_left_out_and_the_rest_is_drawn():
    rows = [
        {k: v for k, v in row.items() if k in ("suite", "version", "pass", *report.SHAPE)}
        | {"reason": "wrong output"}
        if row["version"] in ("fa3", "torch fa2")
        else row
        for row in SYNTHETIC["rows"]
    ]
    source = SYNTHETIC | {"rows": rows}
    for ax in drawn("forward", source).values():
        assert set(lines_of(ax)) == set(SPEED) - {"fa3", "torch fa2"}
    assert plot.PLOTS["speedup"].data(source) is None
    assert plot.PLOTS["ablation"].data(source) is None


@pytest.mark.parametrize("name", plot.PLOTS)
def test_svg_is_the_same_each_time_small_and_valid(name):
    data = plot.PLOTS[name].data(SYNTHETIC)
    text = plot.svg(name, data)
    assert plot.svg(name, data) == text
    assert len(text) < 250_000
    assert ET.fromstring(text).tag.endswith("svg")
    assert not re.search(r"20\d\d-\d\d-\d\d", text)
    assert plot.digest(data) in text


def test_digest_changes_with_the_data():
    data = plot.PLOTS["forward"].data(SYNTHETIC)
    changed = json.loads(json.dumps(data))
    next(iter(next(iter(changed.values())).values()))[0][1] *= 1.001
    assert plot.digest(json.loads(json.dumps(data))) == plot.digest(data) != plot.digest(changed)


def test_everyone_is_told_apart():
    versions = [name for name in SPEED if name not in plot.PEERS]
    styles = [plot.style_of(name, versions) for name in SPEED]
    assert len({style["color"] for style in styles}) == len(styles)
    assert len({style["marker"] for style in styles}) == len(styles)
    assert set(plot.PEER_STYLES) == set(plot.PEERS)


@pytest.mark.parametrize(
    "heights", [[0.5], [0.5, 0.5, 0.5], [0.0, 0.01, 0.5, 0.52, 0.53, 1.0, 1.0], [1.0, 1.01, 1.02]]
)
def test_names_do_not_touch_and_stay_inside(heights):
    moved = plot.spread(heights, 0.06)
    assert all(b - a >= 0.06 - 1e-9 for a, b in zip(moved, moved[1:]))
    assert min(moved) >= -1e-9 and max(moved) <= 1 + 1e-9
    assert plot.spread([0.1, 0.5, 0.9], 0.06) == pytest.approx([0.1, 0.5, 0.9])


def test_command_draws_and_removes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    monkeypatch.setattr(plot, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    report.RESULTS.mkdir()
    results = report.RESULTS / "h200.json"
    results.write_text(json.dumps(document()))
    assert plot.main() == 0
    assert {path.name for path in plot.FIGURES.iterdir()} == {f"{name}.svg" for name in plot.PLOTS}
    rows = [row for row in SYNTHETIC["rows"] if row["suite"] == "backward"]
    results.write_text(json.dumps(document() | {"rows": rows}))
    assert plot.main() == 0
    assert [path.name for path in plot.FIGURES.iterdir()] == ["backward.svg"]
    assert "ablation: nothing was measured to draw it from" in capsys.readouterr().err
