"""The model of FA4's schedule on Blackwell: its limits, and the documents that quote it."""

from dataclasses import fields, replace

import pytest

from flash_versions.diff.files import ROOT
from lessons.modelled import compare, counts, model, trace
from lessons.modelled.rates import B200, SOURCES, Rates
from lessons.pictures.pipeline import blackwell

pytestmark = pytest.mark.xdist_group("modelled")  # one worker, so that it is compiled once
DOCS = ROOT.parent / "docs"
FAST = Rates(**{field.name: 1e12 for field in fields(Rates)} | {"latency": 0.0, "signal": 0.0})
BLOCKS = 8
SCORES = 128 * 128 * BLOCKS * 2  # of both tiles


@pytest.fixture(scope="module")
def found():
    """The trace of a run with both ideas."""
    return trace.record(8.0, 2, BLOCKS)


@pytest.fixture(scope="module")
def softmax():
    return counts.of_softmax()[2]


def test_the_traced_run_is_right(found):
    assert found.error < 2e-2  # bf16; the emulator's own tests hold the error budget
    assert found.blocks == BLOCKS and set(found.roles) == set(trace.PRINTED_ORDER)


def test_nothing_but_products_takes_time(found, softmax):
    """Then a run takes as long as its products, two of 2 x 128 operations for each score, and the
    instructions of the first block, which nothing hides.
    """
    run = model.replay(found, softmax, replace(FAST, tensor=B200.tensor))
    products = 4 * 128 * SCORES / B200.tensor
    assert run.busy[model.TENSOR] == pytest.approx(products)
    assert products < run.cycles < products + softmax.issued


@pytest.mark.parametrize("unit", ["exponentials", "arithmetic"])
def test_nothing_but_one_unit_takes_time(found, softmax, unit):
    """Then a run takes as long as that unit needs for the instructions of all blocks."""
    rate = getattr(B200, unit) / 64  # so slow that the issue slots do not matter
    run = model.replay(found, softmax, replace(FAST, **{unit: rate}))
    instructions = getattr(softmax, unit) * 128 * BLOCKS * 2
    assert run.cycles == pytest.approx(instructions / rate, rel=0.05)


def test_no_unit_is_busy_for_longer_than_the_run(found, softmax):
    run = model.replay(found, softmax)
    assert all(0 < cycles <= run.cycles for cycles in run.busy.values())
    assert all(span.start <= span.end <= run.cycles for span in run.spans if span.lane != "copies")


def test_products_are_computed_one_after_the_other(found, softmax):
    spans = [x for x in model.replay(found, softmax).spans if x.lane == model.TENSOR]
    assert all(a.end <= b.start for a, b in zip(spans, spans[1:]))
    assert len(spans) == 2 * 2 * BLOCKS


def test_a_faster_unit_makes_no_run_slower(found, softmax):
    """But for a schedule's luck: by less than one part in a hundred."""
    before = model.replay(found, softmax).cycles
    for name in set(SOURCES) - {"latency", "signal"}:
        assert model.replay(found, softmax, B200.times(2, name)).cycles < 1.01 * before, name


def test_a_dead_lock_is_an_error(found, softmax):
    """The softmax of tile 0 never says that P is written."""
    role = found.roles["softmax 0"]
    roles = found.roles | {"softmax 0": tuple(x for x in role if not isinstance(x, trace.Arrive))}
    with pytest.raises(RuntimeError, match="no role can go on.*softmax 1"):
        model.replay(found._replace(roles=roles), softmax)


def test_each_idea_is_on_and_off(found):
    """The correction stores O where the threshold is 0, and the compiler's counts differ."""
    always = trace.record(0.0, 2, BLOCKS)
    stores = [
        sum(isinstance(x, trace.Moved) and x.what == "store" for x in run.roles["correction"])
        for run in (always, found)
    ]
    assert stores[0] > 5 * stores[1]
    made = counts.of_softmax()
    assert [made[e].exponentials for e in (0, 1, 2, 4)] == [128 * (8 - e) // 8 + 1 for e in made]


def test_the_page_says_what_the_model_found():
    page = (DOCS / "understand/blackwell.md").read_text()
    rows = compare.compared()
    for name, row in rows.items():
        busy = (row.busy[unit] for unit in (model.TENSOR, model.EXPONENTIALS))
        line = [name, f"{row.cycles:.0f}", *(f"{x:.0%}" for x in busy), f"{row.gain:.2f}"]
        assert f"| {' | '.join(line)} | {row.least:.2f} to {row.most:.2f} |" in page
    for name, source in SOURCES.items():
        assert f"| {name.replace('_', ' ')} | {getattr(B200, name):.0f} | {source} |" in page
    assert (
        f"expects {rows['both'].gain:.2f} times the speed"
        in (ROOT.parent / "README.md").read_text()
    )


def test_the_film_shows_a_block_of_both_tiles():
    spans = compare.run("both").spans
    inside = [x for x in spans if blackwell.BEGIN <= x.start < blackwell.BEGIN + blackwell.FILM]
    assert {x.tile for x in inside if x.lane == model.TENSOR} == {0, 1}
    assert 10 <= len(blackwell.moments()) <= 30
    blackwell.memory(blackwell.moments()[0])
