"""The walkthroughs' pictures show what the kernels do, what was measured, and what was computed."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from PIL import Image

from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.plot.figures import digest, path_of
from flash_versions.simulator.rebind import Watcher, rebound
from flash_versions.simulator.state import here
from lessons.kernels.recording import array_of, forward_of, number, unchecked
from lessons.pictures import __main__ as committed
from lessons.pictures.memory import animation, traffic
from lessons.pictures.pipeline import gantt
from lessons.pictures.pipeline.simulator import (
    EXP_UNIT,
    STAGES,
    TENSOR_CORE,
    TICK,
    Durations,
    Simulation,
    total,
)
from lessons.pictures.scores import splits
from lessons.pictures.scores.schedule import Shape, starting_orders, visits, walk
from lessons.stepper import __main__ as stepper

pytestmark = pytest.mark.slow

SHAPES = [
    Shape(64, 64, 16, 16, False),
    Shape(64, 64, 16, 16, True),
    Shape(40, 72, 16, 32, True),
    Shape(70, 50, 32, 16, True),
    Shape(50, 70, 32, 16, False),
]
VARIANTS = list(itertools.product((False, True), repeat=2))


# What kernels do


def watch(monkeypatch, version, shape):
    """Run a version's kernel: (visits, rows of keys and queries that were loaded)."""
    module = forward_of(version)
    fold, load = rebound(module.fold_block), rebound(module.load_rows)
    seen, rows = [], []

    def fold_block(j, *rest, **named):
        program, _, _ = here.program.ids
        masked = named.get("MASKED", True)  # FA1 masks every block
        seen.append((program, number(j), bool(masked)))
        return fold(j, *rest, **named)

    def load_rows(view, of, index, *rest, **named):
        tile = load(view, of, index, *rest, **named)
        first = int(array_of(index).reshape(-1)[0])
        rows.append(max(0, min(tile.shape[0], number(of.length) - first)))
        return tile

    monkeypatch.setattr(module, "fold_block", Watcher(module.fold_block, fold_block))
    monkeypatch.setattr(module, "load_rows", Watcher(module.load_rows, load_rows))
    q = torch.randn(1, shape.q_length, 1, 16)
    k = torch.randn(1, shape.kv_length, 1, 16)
    request = make_request(q, k, k, causal=shape.causal)
    with unchecked():
        module.forward(request, LaunchConfig(shape.block_q, shape.block_kv, 4, 1))
    return seen, sum(rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("version", ["fa1", "fa2", "fa3", "fa4"])
def test_visits_and_loads_are_those_of_the_kernel(version, shape, monkeypatch):
    seen, rows = watch(monkeypatch, version, shape)
    found = visits(version, shape)
    assert [(v.program, v.block, v.masked) for v in found] == seen
    if shape.q_length == shape.kv_length:
        sizes = (shape.block_q, shape.block_kv)
        counted = traffic.count(version, shape.q_length, 16, shape.causal, sizes)
        assert counted.read == rows * 16 * traffic.ITEM


@pytest.mark.parametrize("name", starting_orders(1, 1))
def test_a_walk_does_every_tile_once_and_no_two_at_once(name):
    found = walk(starting_orders(3, 5)[name], sms=4)
    assert Counter((w.head, w.tile) for w in found) == Counter(
        itertools.product(range(3), range(5))
    )
    assert all(w.end - w.start == w.tile + 1 for w in found)
    for sm in range(4):
        mine = sorted((w.start, w.end) for w in found if w.sm == sm)
        assert all(end == start for (_, end), (start, _) in zip(mine, mine[1:]))


# The simulator


def random_durations(seed):
    generator = random.Random(seed)
    return Durations(*(TICK * generator.randint(1, 30) for _ in Durations._fields))


def spans(tasks, **wanted):
    return sorted(
        (t.start, t.end) for t in tasks if all(getattr(t, k) == v for k, v in wanted.items())
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("overlap", "ping_pong"), VARIANTS)
def test_the_simulator_obeys_its_resources(overlap, ping_pong, seed):
    d, blocks = random_durations(seed), 5
    tasks = Simulation(d, blocks, overlap, ping_pong, apart=2 * TICK * seed).run()
    done = [task for task in tasks if not task.what.startswith("wait")]
    for unit in {task.unit for task in done}:  # one thing at a time, everywhere
        mine = spans(done, unit=unit)
        assert all(end <= start for (_, end), (start, _) in zip(mine, mine[1:])), unit
    landed = {(t.what, t.block): t.end for t in tasks if t.unit.startswith("slot")}
    for c, j in itertools.product(range(2), range(blocks)):
        s = spans(tasks, unit=TENSOR_CORE, what="S", consumer=c, block=j)
        pv = spans(tasks, unit=TENSOR_CORE, what="PV", consumer=c, block=j)
        exp = spans(tasks, unit=EXP_UNIT, consumer=c, block=j)
        (soft,) = spans(tasks, what="softmax", consumer=c, block=j)
        (correct,) = spans(tasks, what="correct", consumer=c, block=j)
        for found, cycles in ((s, d.product), (pv, d.product), (exp, d.exponentials)):
            assert sum(end - start for start, end in found) == cycles
        assert landed["K", j] <= s[0][0] and landed["V", j] <= pv[0][0]
        assert s[-1][1] + d.answer <= soft[0] and soft[1] <= exp[0][0]
        assert exp[-1][1] <= correct[0] and correct[1] <= pv[0][0]
        if j:  # the accumulator is corrected between two products that add to it
            before = spans(tasks, unit=TENSOR_CORE, what="PV", consumer=c, block=j - 1)
            assert before[-1][1] <= correct[0] or not overlap
        if j + STAGES < blocks:  # a slot is not filled again before both have read it
            (again,) = spans(done, what="K", block=j + STAGES)
            assert s[-1][1] <= again[0]
            (again,) = spans(done, what="V", block=j + STAGES)
            assert pv[-1][1] <= again[0]
    assert total(tasks) >= 4 * blocks * d.product


def test_the_simulator_is_good_to_ten_percent():
    found = gantt.speeds()
    simulated, measured = found["simulated, half a block apart"], found["measured on an H200"]
    assert simulated == pytest.approx(measured, rel=0.1)


# Numbers in pictures


def test_the_tree_ends_in_attention_over_all_keys():
    for n in range(1, 9):
        scores, values = (torch.from_numpy(x).flatten() for x in splits.inputs(n))
        expected = torch.softmax(scores * math.log(2), 0) @ values
        (root,) = splits.levels(n)[-1]
        assert root.acc / root.l == pytest.approx(expected.item(), rel=1e-12)
    with pytest.raises(ValueError, match="n=9"):
        splits.levels(9)


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


# Committed files


@pytest.mark.parametrize("name", committed.PICTURES)
def test_committed_pictures_are_of_todays_data(name):
    """Else: python -m lessons.pictures, in notebooks/."""
    plot = committed.PICTURES[name]
    assert digest(plot.data({})) in path_of(name, plot).read_text()


def test_the_committed_animation_is_of_todays_data():
    """Else: python -m lessons.pictures, in notebooks/."""
    assert committed.ANIMATION.stat().st_size < 1_500_000
    shown = animation.film()
    with Image.open(committed.ANIMATION) as gif:
        assert gif.info["comment"].decode() == digest(shown)
        assert gif.n_frames == len(shown.moments) == animation.BLOCKS**2
        assert gif.size == animation.pixels(animation.draw(shown, 7)).size
