"""The walkthroughs' pictures show what the kernels do, what was measured, and what was computed."""

import importlib
import itertools
import math
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text
from PIL import Image

from flash_versions.bench.results import ROOT, read_results
from flash_versions.dispatch import interpreter
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.plot.figures import digest
from flash_versions.versions.fa4.hopper.roles import TABLE

sys.path.insert(0, str(Path(__file__).parents[3] / "notebooks"))

from lessons.pictures import __main__ as committed  # noqa: E402
from lessons.pictures.memory import animation, rooflines, traffic  # noqa: E402
from lessons.pictures.pipeline import attend, gantt, roles  # noqa: E402
from lessons.pictures.pipeline.simulator import (  # noqa: E402
    EXP_UNIT,
    TENSOR_CORE,
    Durations,
    simulate,
    total,
)
from lessons.pictures.scores import softmax_state, splits, tiles  # noqa: E402
from lessons.pictures.scores.schedule import (  # noqa: E402
    ORDERS,
    Shape,
    located,
    square,
    visits,
    walk,
)
from lessons.stepper import __main__ as stepper  # noqa: E402

interpreted = pytest.mark.skipif(not interpreter.enabled(), reason="looks into kernels")
SHAPES = [
    Shape(64, 64, 16, 16, False),
    Shape(64, 64, 16, 16, True),
    Shape(40, 72, 16, 32, True),
    Shape(70, 50, 32, 16, True),
    Shape(50, 70, 32, 16, False),
]
VARIANTS = list(itertools.product((False, True), repeat=2))
SIMPLE = Durations(load=100, product=10, answer=1, scores=5, exponentials=8, correct=3)


# What kernels do


def watch(monkeypatch, version, shape, heads=1, num_splits=None):
    """Run a version's kernel: (visits, rows of keys and queries that were loaded, splits)."""
    module = importlib.import_module(f"flash_versions.versions.{version}.forward")
    masking = "mask_unseen" if version == "fa2" else "mask_scores"
    fold, mask, load = module.fold_block, getattr(module, masking), module.load_rows
    seen, masked, rows = [], [], []

    def fold_block(j, *rest, **named):
        before = len(masked)
        result = fold(j, *rest, **named)
        program, split = (int(module.tl.program_id(axis)) for axis in (0, 1))
        seen.append((program, split, int(j), len(masked) > before))
        return result

    def noted_mask(*arguments, **named):
        masked.append(1)
        return mask(*arguments, **named)

    def load_rows(view, of, index, *rest, **named):
        tile = load(view, of, index, *rest, **named)
        positions = np.asarray(index.handle.data if hasattr(index, "handle") else index)
        first = int(positions.reshape(-1)[0])
        rows.append(max(0, min(tile.shape[0].value, int(of.length) - first)))
        return tile

    for name, wrapper in (
        ("fold_block", fold_block),
        (masking, noted_mask),
        ("load_rows", load_rows),
    ):
        monkeypatch.setattr(module, name, wrapper)
    q = torch.randn(1, shape.q_length, heads, 16)
    k = torch.randn(1, shape.kv_length, heads, 16)
    request = make_request(q, k, k, causal=shape.causal, num_splits=num_splits)
    module.forward(request, LaunchConfig(shape.block_q, shape.block_kv, 4, 1))
    return seen, sum(rows)


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", ["fa1", "fa2", "fa3", "fa4"])
def test_visits_and_loads_are_those_of_the_kernel(version, shape, monkeypatch):
    seen, rows = watch(monkeypatch, version, shape)
    found = visits(version, shape)
    assert [(v.program, v.block, v.masked) for v in found] == [(p, j, m) for p, _, j, m in seen]
    if shape.q_length == shape.kv_length:
        sizes = (shape.block_q, shape.block_kv)
        counted = traffic.count(version, shape.q_length, 16, shape.causal, sizes)
        assert counted.read == rows * 16 * traffic.ITEM


@interpreted
def test_shares_of_splits_are_those_of_the_kernel(monkeypatch):
    seen, _ = watch(monkeypatch, "fa2", Shape(16, 160, 16, 16, False), num_splits=4)
    found = [[j for _, split, j, _ in seen if split == s] for s in range(4)]
    assert found == [list(share) for share in splits.shares(10, 4)]


@interpreted
def test_heavy_tiles_come_first_as_in_the_kernel(monkeypatch):
    shape, seen = Shape(48, 48, 16, 16, True), []
    module = importlib.import_module("flash_versions.versions.fa3.forward")
    tile_at = module.tile_at

    def note(*given):
        tile, rows, keys = tile_at(*given)
        seen.append((int(rows.head), int(tile)))
        return tile, rows, keys

    monkeypatch.setattr(module, "tile_at", note)
    q = torch.zeros(1, 48, 4, 16)
    module.forward(make_request(q, q, q, causal=True), LaunchConfig(16, 16, 4, 1))
    assert seen == [located(number, shape, 4, 4) for number in range(12)]


def test_the_papers_loop_has_the_keys_outside():
    found = visits("paper", square(3, True))
    assert [(v.block, v.tile) for v in found] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("version", ORDERS)
def test_every_visible_pair_is_visited_once(version):
    for shape in SHAPES:
        found = Counter((v.tile, v.block) for v in visits(version, shape))
        offset = shape.kv_length - shape.q_length
        pairs = {
            (i // shape.block_q, j // shape.block_kv)
            for i in range(shape.q_length)
            for j in range(shape.kv_length)
            if not shape.causal or j <= i + offset
        }
        assert found == Counter(pairs)


@pytest.mark.parametrize("scheduler", ["grid", "static", "dynamic"])
@pytest.mark.parametrize("section", [1, 2, 3])
def test_a_walk_does_every_tile_once_and_no_two_at_once(scheduler, section):
    found = walk(scheduler, square(5, True), heads=3, programs=4, section=section)
    assert Counter((w.head, w.tile) for w in found) == Counter(
        itertools.product(range(3), range(5))
    )
    assert all(w.end - w.start == w.tile + 1 for w in found)
    for program in range(4):
        mine = sorted((w.start, w.end) for w in found if w.program == program)
        assert all(end == start for (_, end), (start, _) in zip(mine, mine[1:]))


def test_static_rounds_go_back_and_forth():
    programs = [w.program for w in walk("static", square(4, False), heads=3, programs=3)]
    assert programs == [0, 1, 2, 2, 1, 0] * 2


# Counted traffic


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("version", ["paper", "fa1", "fa2", "fa3", "fa4"])
def test_counts_are_those_of_every_single_tile(version, causal):
    for length, head_dim, sizes in ((64, 16, (16, 16)), (100, 8, (32, 16)), (45, 4, (16, 64))):
        shape = Shape(length, length, *sizes, causal)
        row, (block_q, block_kv) = 2 * head_dim, sizes
        read, written, seen_tiles, seen_blocks = 0, 0, set(), set()
        statistics = {"paper": 2, "fa1": 3}.get(version, 1) * 4
        found = visits(version, shape)
        for visit in found:
            rows = min(length, (visit.tile + 1) * block_q) - visit.tile * block_q
            keys = min(length, (visit.block + 1) * block_kv) - visit.block * block_kv
            first = visit.tile not in seen_tiles
            if version == "paper":
                read += (visit.block not in seen_blocks) * 2 * keys * row
                read += rows * (2 * row + statistics)
                written += rows * (row + statistics)
            else:
                read += 2 * keys * row + first * rows * row
                written += first * rows * (row + statistics)
            seen_tiles.add(visit.tile)
            seen_blocks.add(visit.block)
        area, visible = block_q * block_kv, length * length
        if causal:
            visible = sum(i + 1 for i in range(length))
        folds = len(seen_tiles) if version == "fa4" else len(found)
        expected = traffic.Count(
            read=read,
            written=written,
            least=4 * length * row + length * statistics,
            flops=4 * head_dim * area * len(found),
            needed=4 * head_dim * visible,
            exponentials=area * len(found),
            rescales=(2 if version in ("paper", "fa1") else 1) * folds * block_q * head_dim,
            masked=area * sum(visit.masked for visit in found),
        )
        assert traffic.count(version, length, head_dim, causal, sizes) == expected


def test_plain_attention_moves_its_matrices():
    counted = traffic.count("plain", 100, head_dim=64)
    assert counted.read + counted.written == counted.least
    assert counted.least == 2 * (
        4 * 100 * 64 + 4 * 100 * 100
    )  # q, k, v, o; S and P, there and back
    assert counted.flops == 2 * 2 * 100 * 100 * 64


def test_what_is_not_counted_is_refused():
    with pytest.raises(ValueError, match="fa9"):
        traffic.count("fa9", 64)
    with pytest.raises(ValueError, match="head_dim=80"):
        traffic.count("fa2", 64, head_dim=80)
    with pytest.raises(ValueError, match="length=77"):
        rooflines.points(77)
    with pytest.raises(ValueError, match="fa9"):
        visits("fa9", square(2, True))


def test_rooflines_points_are_those_of_the_table():
    rows = [row for row in read_results()["rows"] if row["suite"] == "table"]
    for version, (asked, least, rate) in rooflines.points(4096, 128).items():
        measured = [
            row["tflops"]
            for row in rows
            if (row["version"], row["N"], row["D"], row["causal"]) == (version, 4096, 128, False)
        ]
        assert [rate] == measured
        assert asked <= least
    asked, least = rooflines.intensity("fa2", 4096, 128)  # of tiles of 128 by 128
    q, flops = 4096 * 128 * 2, 4 * 4096**2 * 128
    assert least == pytest.approx(flops / (4 * q + 4096 * 4))
    assert asked == pytest.approx(flops / (2 * q + 32 * 2 * q + 4096 * 4))


# The simulator


def random_durations(seed):
    generator = random.Random(seed)
    return Durations(*(generator.randint(1, 900) for _ in Durations._fields))


def spans(tasks, **wanted):
    return sorted(
        (t.start, t.end) for t in tasks if all(getattr(t, k) == v for k, v in wanted.items())
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("overlap", "ping_pong"), VARIANTS)
def test_the_simulator_obeys_its_resources(overlap, ping_pong, seed):
    d, blocks, stages = random_durations(seed), 5, 1 + seed % 3
    tasks = simulate(d, blocks, overlap, ping_pong, stages, apart=50.0 * seed)
    for unit in {task.unit for task in tasks}:  # one thing at a time, everywhere
        mine = spans(tasks, unit=unit)
        assert all(end <= start for (_, end), (start, _) in zip(mine, mine[1:])), unit
    landed = {(t.what, t.block): t.end for t in tasks if t.what.startswith("load")}
    for c, j in itertools.product(range(2), range(blocks)):
        s = spans(tasks, unit=TENSOR_CORE, what="S", consumer=c, block=j)
        pv = spans(tasks, unit=TENSOR_CORE, what="PV", consumer=c, block=j)
        exp = spans(tasks, unit=EXP_UNIT, consumer=c, block=j)
        (soft,) = spans(tasks, what="softmax", consumer=c, block=j)
        (correct,) = spans(tasks, what="correct", consumer=c, block=j)
        for found, cycles in ((s, d.product), (pv, d.product), (exp, d.exponentials)):
            assert sum(end - start for start, end in found) == cycles
        assert landed["load K", j] <= s[0][0] and landed["load V", j] <= pv[0][0]
        assert s[-1][1] + d.answer <= soft[0] and soft[1] <= exp[0][0]
        assert exp[-1][1] <= correct[0] and correct[1] <= pv[0][0]
        if j:  # the accumulator is corrected between two products that add to it
            before = spans(tasks, unit=TENSOR_CORE, what="PV", consumer=c, block=j - 1)
            assert before[-1][1] <= correct[0] or not overlap
        if j + stages < blocks:  # a slot is not filled again before both have read it
            (again,) = spans(tasks, what="load K", block=j + stages)
            assert s[-1][1] <= again[0]
            (again,) = spans(tasks, what="load V", block=j + stages)
            assert pv[-1][1] <= again[0]
    assert total(tasks) >= 4 * blocks * d.product


@pytest.mark.parametrize(("overlap", "cycles"), [(False, 47), (True, 47)])
def test_one_block_by_hand(overlap, cycles):
    """S of consumer 1 waits for that of consumer 0: 10 + 10 + 1 + 5 + 8 + 3 + 10."""
    assert total(simulate(SIMPLE, 1, overlap, True)) == cycles


def test_two_blocks_by_hand():
    """In order, P V of block 0 (27 .. 37) has to be there, a cycle later; overlapped, S of block 1
    is before it.
    """
    d = SIMPLE._replace(load=0)
    for overlap, start in ((False, 38), (True, 27)):
        tasks = simulate(d, 2, overlap, ping_pong=False, apart=1000.0)
        assert spans(tasks, what="S", consumer=0, block=1) == [(start, start + 10)]


def test_products_of_both_consumers_alternate_without_ping_pong():
    d = SIMPLE._replace(product=640)
    first, second = (spans(simulate(d, 1, True, False), what="S", consumer=c) for c in (0, 1))
    assert len(first) == len(second) == 10
    assert all(end == start for (_, end), (start, _) in zip(first, second))
    assert len(spans(simulate(d, 2, True, True), what="S", consumer=0)) == 2


@pytest.mark.parametrize(("overlap", "first"), [(False, 0), (True, 1)])
def test_consumers_take_turns_with_ping_pong(overlap, first):
    """Even one that is ready waits for one that is late."""
    for ping_pong, orderly in ((True, True), (False, False)):
        tasks = simulate(SIMPLE, 4, overlap, ping_pong, stages=4, apart=1000.0)
        starts = [t for t in tasks if (t.unit, t.what) == (TENSOR_CORE, "S") and t.block >= first]
        turns = [t.consumer for t in starts]
        assert (turns == [0, 1] * (4 - first)) == orderly


def test_overlap_and_ping_pong_each_help_and_both_help_most():
    cycles = gantt.totals()
    assert cycles["neither"] > cycles["ping-pong only"] > cycles["both"]
    assert cycles["neither"] > cycles["overlap only"] > cycles["both"]


def test_who_marches_apart_needs_no_turns():
    cycles = gantt.totals(apart=gantt.APART)
    assert cycles["overlap only"] == pytest.approx(cycles["both"], rel=0.01)
    assert cycles["neither"] == pytest.approx(cycles["ping-pong only"], rel=0.01)


def test_the_simulator_is_good_to_ten_percent():
    found = gantt.speeds()
    simulated, measured = found["simulated, half a block apart"], found["measured on an H200"]
    assert simulated == pytest.approx(measured, rel=0.1)
    tasks = simulate(gantt.measured_durations(), 16)
    _, cycles = gantt.traced_window(14)
    zero = min(t.start for t in tasks if t.unit == TENSOR_CORE)
    (last,) = spans(tasks, what="S", consumer=1, block=14)
    assert last[0] - zero == pytest.approx(cycles, rel=0.1)


def test_a_program_that_waits_for_ever_is_an_error():
    from lessons.pictures.pipeline.simulator import Machine

    def program():
        yield "wait", "what never happens"

    with pytest.raises(RuntimeError, match="what never happens"):
        Machine([]).run([program()])


# The loop of attend


def test_lines_are_those_of_the_kernel():
    """In their order; each is explained."""
    path = ROOT / "flash_versions/versions/fa3/hopper/forward.py"
    body = path.read_text().partition("def attend(")[2].partition("def attend_in_order")[0]
    written = iter(body[body.index("for place in") :].splitlines())
    lines = [line.strip() for line in attend.loop() if "fold_scores(" not in line]
    assert all(any(line == other.strip() for other in written) for line in lines)
    assert {line.strip() for line in attend.loop()} == set(attend.LINES)
    assert all(f"`{line}`".replace("|", "\\|") in attend.explained() for line in attend.LINES)


def test_a_line_without_an_explanation_is_refused(monkeypatch):
    monkeypatch.setattr(attend, "LINES", dict(list(attend.LINES.items())[:-1]))
    with pytest.raises(ValueError, match="rescaled"):
        attend.loop.__wrapped__()


def test_lines_work_one_after_the_other_and_products_at_the_same_time():
    found, core, (start, middle, end) = attend.bars()
    assert 0 == start < middle < end
    lines = [bar for bar in found if bar.kind not in ("S", "PV")]
    for one, other in itertools.combinations(lines, 2):  # a consumer does one thing at a time
        same = {one.kind, other.kind} == {"correct"}  # the trace has rounding and rescaling as one
        assert same or one.end <= other.start or other.end <= one.start
    scores, values = ([bar.block for bar in found if bar.kind == kind] for kind in ("S", "PV"))
    assert len(scores) == 2 and values == [block - 1 for block in scores]
    assert {task.consumer for task in core} == {0, 1}


# Numbers in pictures


def test_the_tree_ends_in_attention_over_all_keys():
    for n in range(1, 9):
        scores, values = (torch.from_numpy(x).flatten() for x in splits.inputs(n))
        expected = torch.softmax(scores * math.log(2), 0) @ values
        (root,) = splits.levels(n)[-1]
        assert root.acc / root.l == pytest.approx(expected.item(), rel=1e-12)
    with pytest.raises(ValueError, match="n=9"):
        splits.levels(9)


def test_the_animation_counts_what_goes_through_memory():
    """Of the whole matrix: S and P written and read once each. FlashAttention moves no score, and
    reads K and V once for each tile of queries. A moment adds what it touches.
    """
    rows, row = animation.BLOCKS * animation.SIZE, 2 * animation.DIM
    last = animation.BLOCKS**2 - 1
    assert animation.plain_bytes(last) == (4 * 2 * rows * rows, 4 * rows * row)
    statistics = 3 * 4 * rows  # m, l and the LSE of each row, which FA1 writes in fp32
    flash = (2 + 2 * animation.BLOCKS) * rows * row + statistics
    assert animation.flash_bytes(last) == (0, flash)
    one = animation.SIZE * row
    assert animation.plain_bytes(0) == (8 * animation.SIZE**2, 3 * one)
    assert animation.flash_bytes(0) == (0, 3 * one)
    assert animation.plain_bytes(6).rest - animation.plain_bytes(5).rest == one  # another Q
    assert animation.flash_bytes(6).rest - animation.flash_bytes(5).rest == 3 * one
    end = animation.flash_bytes(5).rest - animation.flash_bytes(4).rest
    assert end == 3 * one + 3 * 4 * animation.SIZE  # and O, m, l, LSE


def test_the_animation_computes_attention():
    """To the precision of bf16, in which P is rounded."""
    tensors = stepper.inputs(stepper.CALLS[animation.RECORDING])
    q, k, v = (x[0, :, 0].double() for x in tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).norm(dim=1)
    scores = torch.tensor(animation.film().scores)
    torch.testing.assert_close(scores.double(), q @ k.T / 2, rtol=1e-3, atol=1e-3)
    for moment in animation.film().moments:
        rows = slice(moment.tile * animation.SIZE, (moment.tile + 1) * animation.SIZE)
        seen = scores[rows, : (moment.block + 1) * animation.SIZE]
        assert moment.row_max == pytest.approx(seen.amax(1).tolist(), abs=2e-3)
        sums = (seen - seen.amax(1, keepdim=True)).exp().sum(1)
        assert moment.row_sum == pytest.approx(sums.tolist(), rel=5e-3)
        if moment.block == animation.BLOCKS - 1:
            assert moment.o == pytest.approx(expected[rows].tolist(), rel=2e-2)


def test_bars_show_the_state():
    step = softmax_state.example()[1]
    figure = softmax_state.bars(step, rows=(2, 0))
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["m, the maximum of scores", "l, the sum of exponentials", "acc, its length"]
    tops = [[p.get_y() + p.get_height() for p in ax.patches] for ax in figure.axes]
    for found, name in zip(tops, ("row_max", "row_sum")):
        expected = [*step.before[name][[2, 0]], *step.after[name][[2, 0]]]
        assert found == pytest.approx(expected)
    lengths = [np.linalg.norm(x["acc"][row]) for x in (step.before, step.after) for row in (2, 0)]
    assert tops[2] == pytest.approx(lengths)


def test_bars_refuse_what_is_no_state():
    state = {"row_max": np.zeros(2), "row_sum": np.zeros(2)}
    with pytest.raises(ValueError, match="acc"):
        softmax_state.bars(SimpleNamespace(j=0, before=state, after=state))
    state["o"] = np.zeros((2, 4))
    with pytest.raises(ValueError, match="2 rows"):
        softmax_state.bars(SimpleNamespace(j=0, before=state, after=state))


def test_arrows_are_the_table_and_end_at_their_states():
    (ax,) = roles.state_machine().axes
    arrows = {p.get_gid() for p in ax.patches if isinstance(p, FancyArrowPatch)}
    assert arrows == {f"{step.role}: {step.state} to {step.then}" for step in TABLE}
    for step in TABLE:
        points = roles.way(step.role, step.state, step.then).points
        for state, (x, y) in ((step.state, points[0]), (step.then, points[-1])):
            u, v = roles.PLACES[step.role, state]
            ends = state in ("start", "done")
            half_w, half_h = (roles.END_W, roles.END_H) if ends else (roles.HALF_W, roles.HALF_H)
            dx, dy = abs(x - u) / half_w, abs(y - v) / half_h
            assert max(dx, dy) == pytest.approx(1) and min(dx, dy) <= 1


# Committed files


@pytest.mark.parametrize("name", committed.PICTURES)
def test_committed_pictures_are_of_todays_data(name):
    """Else: python -m lessons.pictures, in notebooks/."""
    text = committed.path_of(name).read_text()
    assert digest(committed.PICTURES[name].data()) in text


def test_the_committed_animation_is_of_todays_data():
    """Else: python -m lessons.pictures, in notebooks/."""
    assert committed.ANIMATION.stat().st_size < 1_500_000
    shown = animation.film()
    with Image.open(committed.ANIMATION) as gif:
        assert gif.info["comment"].decode() == digest(shown)
        assert gif.n_frames == len(shown.moments) == animation.BLOCKS**2
        assert gif.size == animation.pixels(animation.draw(shown, 7)).size


def test_no_other_pictures_are_committed():
    found = {path for path in committed.FOLDER.rglob("*") if not path.is_dir()}
    assert found == {committed.path_of(name) for name in committed.PICTURES}


DRAWN = {
    **{name: picture.draw for name, picture in committed.PICTURES.items()},
    "order": lambda: tiles.order("fa3 hopper"),
    "frame": lambda: tiles.frame(tiles.frames("fa2")[5]),
    "ranges": splits.ranges,
    "bars": lambda: softmax_state.bars(softmax_state.example()[0]),
    "over blocks": lambda: softmax_state.over_blocks(softmax_state.example()),
    "animation": lambda: animation.draw(animation.film(), 20),
    "attend": attend.beside_time,
}


def texts(figure):
    """The texts of a figure, without the labels of ticks that are out of sight."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    found = (text for text in figure.findobj(Text) if text not in hidden)
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("name", DRAWN)
def test_no_texts_overlap_and_all_are_inside(name):
    figure = DRAWN[name]()
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)]
    assert len(boxes) > 3
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in boxes:
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one!r} overlaps {other!r}"
