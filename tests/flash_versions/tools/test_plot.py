"""Figures show what the JSON says, and the committed ones are of the committed JSON."""

import json
import re
import xml.etree.ElementTree as ET
from statistics import fmean, geometric_mean

import matplotlib as mpl
import pytest

from flash_versions.bench import results
from flash_versions.plot import figures as plot
from flash_versions.plot import timeline
from flash_versions.plot import transformer as of_models
from tests.helpers.committed_results import RESULTS, of_suite, rate, ratio, row_of, without


def drawn(name, source=RESULTS):
    """{panel title: axes} of a figure."""
    with mpl.rc_context(plot.STYLE):
        figure = plot.PLOTS[name].draw(plot.PLOTS[name].data(source))
    return {ax.get_title(loc="left"): ax for ax in figure.axes if ax.get_title(loc="left")}


def lines_of(ax):
    """{competitor: [(x, y)]} of what is drawn."""
    return {line.get_gid(): list(zip(*line.get_data())) for line in ax.lines}


# All figures.


@pytest.mark.parametrize("name", plot.PLOTS)
def test_committed_figures_are_of_the_committed_results(name):
    """Else: python -m flash_versions.plot."""
    path, data = plot.path_of(name), plot.PLOTS[name].data(RESULTS)
    assert plot.digest(data) in path.read_text()
    other = re.sub(r"\d(?=\D*$)", lambda found: "7" if found[0] == "3" else "3", json.dumps(data))
    assert plot.digest(json.loads(other)) != plot.digest(data)
    assert plot.PLOTS[name].data(RESULTS | {"rows": [], "trace": None}) is None


def test_no_other_figures_are_committed():
    lessons = plot.FIGURES / "lessons"  # tests/documents/notebooks/test_pictures.py
    found = {path for path in plot.FIGURES.rglob("*.*") if lessons not in path.parents}
    elsewhere = {plot.FIGURES / "flash-attention.gif"}  # there, too
    elsewhere |= {plot.FIGURES / "stepper.png"}  # a screenshot, for the README
    for name in ("sums", "countdown"):  # tests/documents/pages/test_grpo_results.py
        elsewhere |= {plot.FIGURES / f"transformer/grpo-{name}.svg"}
    assert found == elsewhere | {plot.path_of(name) for name in plot.PLOTS}


@pytest.mark.parametrize("name", ["memory", "ablation", "timeline"])
def test_svg_is_small_valid_and_the_same_each_time(name):
    data = plot.PLOTS[name].data(RESULTS)
    text = plot.svg(name, data)
    assert len(text) < 250_000 and plot.digest(data) in text
    assert ET.fromstring(text).tag.endswith("svg")
    assert not re.search(r"20\d\d-\d\d-\d\d", text)
    assert plot.svg(name, data) == text


def test_command_draws_and_removes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    monkeypatch.setattr(plot, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(plot, "PLOTS", {name: plot.PLOTS[name] for name in ("backward", "fp8")})
    monkeypatch.setattr(plot, "read_results", lambda: RESULTS)
    assert plot.main() == 0
    assert {path.name for path in plot.FIGURES.rglob("*.*")} == {"backward.svg", "fp8.svg"}
    lost = without(lambda row: row["suite"] != "fp8")
    monkeypatch.setattr(plot, "read_results", lambda: lost)
    assert plot.main() == 0
    assert [path.name for path in plot.FIGURES.rglob("*.*")] == ["backward.svg"]
    assert "fp8: nothing was measured to draw it from" in capsys.readouterr().err


# Lines and bars.


@pytest.mark.parametrize(
    "name, suite, key",
    [
        ("forward", "table", "tflops"),
        ("backward", "backward", "tflops"),
        ("fp8", "fp8", "tflops"),
        ("memory", "table", "peak_mib"),
    ],
)
def test_lines_are_those_of_the_results(name, suite, key):
    expected = {}
    for row in of_suite(suite):
        if key in row and not (name == "memory" and row["causal"]):
            lines = expected.setdefault(f"D={row['D']} {results.mask(row)}", {})
            lines.setdefault(row["version"], []).append((row["N"], row[key]))
    expected = {p: {x: sorted(line) for x, line in found.items()} for p, found in expected.items()}
    assert {panel: lines_of(ax) for panel, ax in drawn(name).items()} == expected


def test_speedup_is_over_torch():
    lines = lines_of(drawn("speedup")["D=64 causal"])
    place = {"N": 4096, "D": 64, "causal": True}
    assert dict(lines["fa3"])[4096] == ratio("table", "fa3", "torch fa2", **place)
    assert {y for _, y in lines["torch fa2"]} == {1.0}


def test_what_failed_is_left_out_and_the_rest_is_drawn():
    rows = [
        {k: v for k, v in row.items() if k in ("suite", "version", "pass", *results.SHAPE)}
        | {"reason": "wrong output"}
        if row.get("version") in ("fa3", "torch fa2")
        else row
        for row in RESULTS["rows"]
    ]
    everyone = {row["version"] for row in of_suite("table") if row["D"] == 64}
    found = lines_of(drawn("forward", RESULTS | {"rows": rows})["D=64 full"])
    assert set(found) == everyone - {"fa3", "torch fa2"}
    assert plot.PLOTS["speedup"].data(RESULTS | {"rows": rows}) is None
    assert list(plot.PLOTS["ablation"].data(RESULTS | {"rows": rows})) == ["fa4"]


def test_ablation_bars_are_means_of_ratios():
    ax = drawn("ablation")["fa4, D=128 causal"]
    bars = dict(zip([x.get_text() for x in ax.get_yticklabels()], ax.patches, strict=True))
    lengths = {row["N"] for row in of_suite("ablation") if row["D"] == 128}
    for title, name in (
        ("always rescale", "fa4 always rescale"),
        ("fa3", "fa3"),
        ("cuDNN", "cudnn"),
    ):
        places = [{"N": n, "D": 128, "causal": True} for n in lengths]
        mean = geometric_mean(ratio("ablation", name, "fa4", **place) for place in places)
        assert bars[title].get_width() == pytest.approx(100 * (mean - 1))


def test_curves_are_means_and_ranges_of_seeds():
    panels = drawn("training")
    assert list(panels) == ["sdpa and fa3", "sdpa and fa4"]
    for name in ("sdpa", "fa3"):
        ax = panels["sdpa and fa3"]
        losses = [row["losses"] for row in of_suite("training curve") if row["version"] == name]
        last = [fmean(loss[-plot.WINDOW :]) for loss in losses]
        assert lines_of(ax)[name][-1] == (200, pytest.approx(fmean(last)))
        [band] = [area for area in ax.collections if area.get_gid() == name]
        ends = [y for x, y in band.get_paths()[0].vertices if x == 200]
        assert (min(ends), max(ends)) == pytest.approx((min(last), max(last)))


def test_variants_keep_the_colour_of_their_version_and_all_are_told_apart():
    for name in ("fp8", "backward"):
        lines = {line.get_gid(): line for line in drawn(name)["D=64 causal"].lines}
        looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in lines.values()}
        assert len(looks) == len(lines)
        for version, line in lines.items():
            if version not in plot.PEERS:
                assert line.get_color() == lines[version.split()[0]].get_color()
        plain = [
            x.get_color() for name, x in lines.items() if " " not in name or name in plot.PEERS
        ]
        assert len(set(plain)) == len(plain)
    assert set(plot.PEER_STYLES) == set(plot.PEERS)


def test_every_contestant_of_generation_has_a_line_of_its_own():
    assert len(set(of_models.STYLES.values())) == len(of_models.STYLES)
    assert {row["contestant"] for row in of_suite("generate")} <= set(of_models.STYLES)


@pytest.mark.parametrize(
    "heights", [[0.5], [0.5, 0.5, 0.5], [0.0, 0.01, 0.5, 0.52, 0.53, 1.0, 1.0], [1.0, 1.01, 1.02]]
)
def test_names_do_not_touch_and_stay_inside(heights):
    moved = plot.spread(heights, 0.06)
    assert all(b - a >= 0.06 - 1e-9 for a, b in zip(moved, moved[1:]))
    assert min(moved) >= -1e-9 and max(moved) <= 1 + 1e-9
    assert plot.spread([0.1, 0.5, 0.9], 0.06) == pytest.approx([0.1, 0.5, 0.9])


@pytest.mark.parametrize("name", ["ablation", "ablation-fp8"])
def test_labels_of_bars_are_within_their_panels(name):
    panels = drawn(name).values()
    for figure in {ax.figure for ax in panels}:
        figure.draw_without_rendering()
    for ax in panels:
        left, right = ax.get_window_extent().intervalx
        for text in ax.texts:
            low, high = text.get_window_extent().intervalx
            assert left <= low and high <= right, text.get_text()


# The roofline.


def test_roofline_places_points_by_their_intensity():
    """Without a mask, S queries and keys: 4 S^2 D operations on 8 S D bytes; decoding with 4 query
    heads per key head: four times the one FLOP per byte.
    """
    found = lines_of(drawn("roofline")["D=128 full"])["fa2"]
    rates = {row["N"]: row["tflops"] for row in of_suite("table")
             if (row["version"], row["D"], row["causal"]) == ("fa2", 128, False)}  # fmt: skip
    prefill = {x: y for x, y in found if x > 10}
    assert prefill == pytest.approx({n / 2: rate for n, rate in rates.items()})
    decode = [y for x, y in found if x == pytest.approx(4, rel=1e-3)]
    lengths = [row["N"] for row in of_suite("decode") if (row["version"], row["B"]) == ("fa2", 1)]
    expected = [4 * rate("decode", "fa2", B=1, N=n) for n in lengths]
    assert sorted(decode) == pytest.approx(sorted(expected), rel=1e-3)


def test_roofs_of_the_h200():
    """FlashAttention-3's own count: 3.9 TFLOP/s of special functions against 989 of products."""
    assert plot.exp2_roof(128) / (4 * 128) == pytest.approx(3.9, rel=0.02)
    (x0, y0), (ridge, flat), _ = lines_of(drawn("roofline")["D=128 full"])["roof"]
    assert (y0 / x0, flat) == (plot.HBM_TB_PER_S, plot.TENSOR_TFLOPS)
    assert ridge * plot.HBM_TB_PER_S == pytest.approx(flat)
    suites = {
        suite: about | {"machine": about["machine"] | {"gpu": "NVIDIA A100"}}
        for suite, about in RESULTS["suites"].items()
    }
    assert plot.roofline_data(RESULTS | {"suites": suites}) is None


# The transformer.


def test_bars_of_products_are_ratios_to_the_library():
    ax = drawn("products")["a product"]
    [bars] = [x for x in ax.containers if x.get_label() == "ours"]
    shapes = [label.get_text().partition("\n")[0] for label in ax.get_yticklabels()]
    expected = [ratio("gemm", "ours", "cuBLAS", shape=shape) for shape in shapes]
    assert len(shapes) == 7 and [bar.get_width() for bar in bars] == pytest.approx(expected)
    lost = without(lambda row: row.get("version") != "cuBLAS")
    assert list(plot.PLOTS["products"].data(lost)) == ["norm gemm"]


def test_lines_of_generation_are_tokens_per_second():
    panels = drawn("generation")
    place = {"case": "llama-3.2-1b", "contestant": "ours"}
    for title, key, x, other in (
        ("rows of a batch", "batch", 64, {"prompt": 512}),
        ("tokens before, one row", "prompt", 16384, {"batch": 1}),
    ):
        row = row_of("generate", **{key: x}, **other, **place)
        points = lines_of(panels[title])["llama-3.2-1b ours"]
        assert dict(points)[x] == pytest.approx(1000 * row["batch"] / row["ms_per_step"])


# The timeline.


def trace(tiles=4, steps=6, clock=1000.0):
    """The roles of a program with so many tiles: a loader that is ahead, two consumers in turns,
    and what stores; 100 cycles for each step, from cycle 5000 on.
    """
    roles = {}
    for tile in range(tiles):
        for step in range(steps):
            at = 5000 + (tile * steps + step) * 100
            for role, shift in (("loader", 0), ("consumer 0", 40), ("consumer 1", 90)):
                states = ("await room", "copy") if role == "loader" else ("multiply", "softmax")
                middle, end = at + shift + 50, at + shift + 100
                roles.setdefault(role, []).append([states[0], at + shift, middle])
                roles[role].append([states[1], middle, end])
        end = 5000 + (tile + 1) * steps * 100
        roles.setdefault("storer", []).append(["await o", end - 200, end])
        roles["storer"].append(["store", end, end + 80])
    what = {"version": "fa4", "D": 128, "S": 1024}
    return {"what": what, "clock_mhz": clock, "programs": [{"program": 7, "roles": roles}]}


def test_timeline_shows_a_few_tiles_and_where_the_first_ends():
    """4 tiles of 6 steps of 100 cycles at 1000 MHz, which begin at cycle 5000."""
    panels = drawn("timeline", {"trace": trace()})
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
    whole = drawn("timeline", {"trace": trace()})["a few tiles"]
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
