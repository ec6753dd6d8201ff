"""Figures show what the JSON says, and the committed ones are of the committed JSON."""

import json
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest

from flash_versions.bench import results
from flash_versions.plot import figures as plot
from flash_versions.plot import timeline
from tests.helpers.synthetic_results import (
    CURVES,
    FP8_SPEED,
    FP8_VARIANTS,
    SPEED,
    VARIANTS,
    all_results,
    document,
    generation,
    matrix_products,
    trace,
    training,
)

RESULTS = results.read_results()
SYNTHETIC = results.merged(all_results())
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
    found = {path.stem for path in plot.FIGURES.iterdir()}
    elsewhere = {"grpo-sums", "grpo-countdown"}  # tests/documents/test_grpo_results.py
    elsewhere |= {"flash-attention", "lessons"}  # tests/documents/test_pictures.py
    assert found - elsewhere <= set(plot.PLOTS)


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


@pytest.mark.parametrize("name", ["ablation", "ablation-fp8"])
def test_ablation_bars_are_ratios(name):
    panels = drawn(name, SYNTHETIC)
    peer, speed = ("cuDNN", 600.0) if name == "ablation" else ("cuDNN FP8", 880.0)
    assert "fa3, D=128 causal" in panels and len(panels) == 2 * 6
    for title, ax in panels.items():
        version = title.split(",")[0]
        earlier = ["fa3"] if version == "fa4" else []
        bars = [patch.get_width() for patch in ax.patches]
        assert [label.get_text() for label in ax.get_yticklabels()] == [*VARIANTS, *earlier, peer]
        ratios = [*VARIANTS.values(), *(SPEED[v] / SPEED["fa4"] for v in earlier)]
        ratios.append(speed / SPEED[version])
        assert bars == pytest.approx([100 * (ratio - 1) for ratio in ratios])


def test_fp8_lines_keep_the_colour_of_their_version():
    panels = drawn("fp8", SYNTHETIC)
    assert len(panels) == 6
    for ax in panels.values():
        lines = {line.get_gid(): line for line in ax.lines}
        assert set(lines) == {
            *(f"{v} {x}".rstrip() for v in ("fa3", "fa4") for x in ("", *FP8_VARIANTS)),
            "cudnn",
            "cudnn fp8",
        }
        for version, other in (("fa3", "fa4"), ("fa4", "fa3")):
            styles = set()
            for x in ("", *FP8_VARIANTS):
                line = lines[f"{version} {x}".rstrip()]
                assert line.get_color() == lines[version].get_color() != lines[other].get_color()
                styles.add((line.get_linestyle(), line.get_marker()))
            assert len(styles) == 3


def test_gradients_in_order_keep_the_colour_of_their_version():
    for ax in drawn("backward", SYNTHETIC).values():
        lines = {line.get_gid(): line for line in ax.lines}
        ordered, fa3 = lines.pop("fa3 deterministic"), lines["fa3"]
        assert ordered.get_color() == fa3.get_color()
        assert ordered.get_linestyle() != fa3.get_linestyle()
        assert len({line.get_color() for line in lines.values()}) == len(lines)


def test_curves_are_means_and_ranges_of_seeds():
    """Of a loss that is 5 / (1 + step / 20) with 0, 0.1 or 0.2 for the seed, in windows of 10."""
    panels = drawn("training", SYNTHETIC)
    assert list(panels) == ["sdpa and fa3", "sdpa and fa4"]
    exact = [sum(5 / (1 + step / 20) for step in range(s, s + 10)) / 10 for s in range(0, 60, 10)]
    for title, ax in panels.items():
        lines = lines_of(ax)
        assert set(lines) == set(title.split(" and "))
        for name, points in lines.items():
            assert [x for x, _ in points] == [10, 20, 30, 40, 50, 60]
            expected = [loss + 0.1 + CURVES[name] for loss in exact]
            assert [y for _, y in points] == pytest.approx(expected)
            [band] = [area for area in ax.collections if area.get_gid() == name]
            last = [y for x, y in band.get_paths()[0].vertices if x == 60]
            assert (min(last), max(last)) == pytest.approx((expected[-1] - 0.1, expected[-1] + 0.1))


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
        {k: v for k, v in row.items() if k in ("suite", "version", "pass", *results.SHAPE)}
        | {"reason": "wrong output"}
        if row.get("version") in ("fa3", "torch fa2")
        else row
        for row in SYNTHETIC["rows"]
    ]
    source = SYNTHETIC | {"rows": rows}
    for ax in drawn("forward", source).values():
        assert set(lines_of(ax)) == set(SPEED) - {"fa3", "torch fa2"}
    assert plot.PLOTS["speedup"].data(source) is None
    assert list(plot.PLOTS["ablation"].data(source)) == ["fa4"]


@pytest.mark.parametrize("name", plot.PLOTS)
def test_svg_is_small_and_valid(name):
    data = plot.PLOTS[name].data(SYNTHETIC)
    text = plot.svg(name, data)
    assert len(text) < 250_000
    assert ET.fromstring(text).tag.endswith("svg")
    assert not re.search(r"20\d\d-\d\d-\d\d", text)
    assert plot.digest(data) in text


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("memory", "ablation") else pytest.mark.wide)
        for name in plot.PLOTS
    ],
)
def test_svg_is_the_same_each_time(name):
    """Of lines and of bars."""
    data = plot.PLOTS[name].data(SYNTHETIC)
    assert plot.svg(name, data) == plot.svg(name, data)


def test_digest_changes_with_the_data():
    data = plot.PLOTS["forward"].data(SYNTHETIC)
    changed = json.loads(json.dumps(data))
    next(iter(next(iter(changed.values())).values()))[0][1] *= 1.001
    assert plot.digest(json.loads(json.dumps(data))) == plot.digest(data) != plot.digest(changed)


def test_everyone_is_told_apart():
    everyone = SPEED | FP8_SPEED
    versions = [name for name in everyone if name not in plot.PEERS]
    styles = [plot.style_of(name, versions) for name in everyone]
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


# The timeline.


def test_timeline_shows_a_few_tiles_and_where_the_first_ends():
    """4 tiles of 6 steps of 100 cycles at 1000 MHz, which begin at cycle 5000."""
    panels = drawn("timeline", SYNTHETIC)
    assert list(panels) == ["a few tiles", "where the first tile ends"]
    whole, close = panels.values()
    assert whole.get_xlim() == pytest.approx((0, 1.88))  # to the end of the third store
    low, high = close.get_xlim()
    assert low < 0.68 < high and high - low == pytest.approx(0.188)
    assert "microseconds" in whole.get_xlabel()
    for ax in panels.values():
        roles = [label.get_text() for label in ax.get_yticklabels()]
        assert roles == ["loader", "consumer 0", "consumer 1", "storer"]


def bars_of(ax, state):
    """(left, right, row) of the bars of a state."""
    found = []
    for collection in ax.collections:
        if collection.get_gid() == state:
            for path in collection.get_paths():
                (left, low), (right, high) = path.get_extents().get_points()
                found.append((left, right, round((low + high) / 2)))
    return sorted(found)


def test_timeline_bars_are_the_intervals_of_the_trace():
    whole = drawn("timeline", SYNTHETIC)["a few tiles"]
    stores = bars_of(whole, "store")
    expected = [(0.6 * tile, 0.6 * tile + 0.08, 3) for tile in (1, 2, 3)]
    assert [x for bar in stores for x in bar] == pytest.approx([x for b in expected for x in b])
    products = bars_of(whole, "multiply")
    assert {row for _, _, row in products} == {1, 2}
    first = next(bar for bar in products if bar[2] == 2)
    assert first[:2] == pytest.approx((0.09, 0.14))


def test_timeline_without_a_clock_or_a_role_that_stores():
    found = trace(clock=None)
    del found["programs"][0]["roles"]["storer"]
    data = timeline.timeline_data(found)
    assert data["unit"] == "cycles"
    assert data["panels"]["a few tiles"]["window"] == (0, 2490)
    assert timeline.timeline_data(None) is None
    assert timeline.timeline_data(found | {"programs": []}) is None


def test_timeline_of_many_steps_keeps_each_states_share():
    """Twice as many intervals as there are parts: what is drawn is coarser, no role changes."""
    found = trace(tiles=3, steps=2 * timeline.BINS)
    found["programs"][0]["roles"]["loader"] = [
        [state, at + shift, at + shift + length]
        for at in range(5000, 5000 + 600 * timeline.BINS, 600)
        for state, shift, length in (("await room", 0, 200), ("copy", 200, 400))
    ]
    panel = timeline.timeline_data(found)["panels"]["a few tiles"]
    loader = panel["roles"]["loader"]
    assert len(loader) <= timeline.BINS
    for (_, _, end), (_, start, _) in zip(loader, loader[1:]):
        assert start >= end - 1e-3
    window = panel["window"][1] - panel["window"][0]
    copying = sum(end - start for state, start, end in loader if state == "copy")
    assert copying / window > 0.6
    text = plot.svg("timeline", timeline.timeline_data(found))
    assert len(text) < 250_000


def test_intervals_of_one_state_that_touch_are_one():
    found = [["copy", 5, 9], ["copy", 0, 5], ["await", 9, 10], ["copy", 10, 11], ["copy", 12, 13]]
    expected = [("copy", 0, 9), ("await", 9, 10), ("copy", 10, 11), ("copy", 12, 13)]
    assert timeline.merged(found) == expected


def test_states_are_told_apart_and_waiting_is_grey():
    states = [f"state {i}" for i in range(10)] + ["await k", "idle"]
    colours = timeline.colours_of(states)
    assert len({colours[state] for state in states[:10]}) == 10
    assert colours["await k"] == colours["idle"] == timeline.WAIT_COLOUR


# The command.


def test_command_draws_and_removes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    monkeypatch.setattr(plot, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    results.RESULTS.mkdir()
    path = results.RESULTS / "h200.json"
    path.write_text(json.dumps(document()))
    others = {
        "h200-trace.json": trace(),
        "h200-training.json": training(),
        "h200-kernels.json": matrix_products(),
        "h200-generate.json": generation(),
    }
    for name, content in others.items():
        (results.RESULTS / name).write_text(json.dumps(content))
    assert plot.main() == 0
    assert {path.name for path in plot.FIGURES.iterdir()} == {f"{name}.svg" for name in plot.PLOTS}
    rows = [row for row in SYNTHETIC["rows"] if row["suite"] == "backward"]
    path.write_text(json.dumps(document() | {"rows": rows}))
    for name in others:
        (results.RESULTS / name).unlink()
    assert plot.main() == 0
    assert [path.name for path in plot.FIGURES.iterdir()] == ["backward.svg"]
    assert "ablation: nothing was measured to draw it from" in capsys.readouterr().err
