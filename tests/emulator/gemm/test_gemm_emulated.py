"""The matrix product for Hopper without a GPU: emulated, and as late as the rules allow."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from tests.emulator.gemm import products
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.rotation import pairwise, rotated
from tests.transformer.kernels.test_gemm import assess, formula, operands

LOADED = products.load("transformer.model.kernels.gemm.hopper")
gemm_hopper = LOADED["transformer.model.kernels.gemm.hopper"]
GemmConfig = gemm_hopper.GemmConfig
SMALL = GemmConfig(rows=64, columns=64, stages=2, group=2, ping_pong=False)
CONFIGS = {
    "as it is": GemmConfig(),
    "wide": GemmConfig(rows=64, columns=256, stages=4, ping_pong=False, epilogue_columns=64),
    "small": SMALL,
    "high": GemmConfig(stages=4, ping_pong=False),
    "ping-pong": replace(SMALL, ping_pong=True, stages=3),
    "two stages, ping-pong": replace(SMALL, ping_pong=True),
    "wide sub-tiles": replace(SMALL, epilogue_columns=64),
    "three buffers": replace(SMALL, buffers=3),
    "five rows of tiles": replace(SMALL, group=5),
}
FUSIONS = ["", "bias", "residual", "bias residual", "swiglu", "swiglu bias residual"]


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """So that programs walk over several tiles."""
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


@pytest.fixture
def order(request, monkeypatch):
    """Run a test in an order, named by its parameter."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[request.param])


def multiply(config, inputs):
    """C of the emulated kernel, which began as NaN."""
    c = inputs["a"].new_full((len(inputs["a"]), len(inputs["b"])), float("nan"))
    gemm_hopper.gemm(c=c, config=config, **inputs)
    return c


def check(config, *shape, what="", dtype=torch.bfloat16):
    inputs = operands(*shape, what, dtype)
    accuracy = assess(multiply(config, inputs), formula, **inputs)
    assert accuracy.ok, accuracy


@pytest.mark.parametrize(("name", "order"), rotated(CONFIGS, ORDERS), indirect=["order"])
def test_every_switch(name, order):
    """More tiles than programs, ragged in every dimension."""
    check(CONFIGS[name], 300, 200, 200)
    check(CONFIGS[name], 300, 200, 136, what="bias residual")


@pytest.mark.parametrize(
    ("what", "order", "ping_pong"), pairwise(FUSIONS, ORDERS, [False, True]), indirect=["order"]
)
def test_every_fusion(what, order, ping_pong):
    check(replace(SMALL, ping_pong=ping_pong), 200, 136, 200, what=what)


@pytest.mark.parametrize("shape", [
    (1, 8, 8), (128, 256, 64), (129, 264, 72), (1, 520, 200), (700, 8, 64), (64, 64, 1024),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("ping_pong", [False, True])
def test_shapes(shape, ping_pong):
    check(replace(SMALL, ping_pong=ping_pong), *shape, dtype=torch.float16)
    check(GemmConfig(stages=4, ping_pong=ping_pong), *shape, what="bias")


@pytest.mark.parametrize("shape", [(200, 328, 136), (300, 520, 136)], ids=["few", "many"])
def test_the_default_with_each_fusion(shape):
    """Of few tiles, and of more than multiprocessors."""
    for what in FUSIONS:
        check(None, *shape, what=what)


def test_the_residual_may_be_what_is_written():
    inputs = operands(300, 264, 200, "residual")
    expected = multiply(SMALL, inputs)
    gemm_hopper.gemm(inputs["a"], inputs["b"], inputs["residual"], residual=inputs["residual"])
    torch.testing.assert_close(inputs["residual"], expected, rtol=0, atol=0)


def test_a_residual_needs_a_second_buffer():
    with pytest.raises(ValueError, match="buffers=1"):
        check(replace(SMALL, buffers=1), 128, 128, 64, what="residual")


def test_every_tile_once():
    """Of any number of rows and columns of tiles, in groups of any height."""

    def located(rows, columns, group):
        problem = gemm_hopper.GemmProblem(rows, columns, 1, 128, 64, group, False)
        return [tuple(map(int, problem.locate(i))) for i in range(int(problem.num_tiles()))]

    for rows, columns, group in [(1, 1, 8), (1280, 64, 3), (1000, 700, 4), (300, 1000, 8)]:
        wanted = {(i, j) for i in range(0, rows, 128) for j in range(0, columns, 64)}
        found = located(rows, columns, group)
        assert len(found) == len(wanted) and set(found) == wanted
    assert located(512, 128, 2)[:4] == [(0, 0), (128, 0), (0, 64), (128, 64)]


def test_the_same_bits_in_every_order(monkeypatch):
    inputs = operands(300, 264, 200, "bias residual")
    results = []
    for order in (*ORDERS.values(), ORDERS["any order"]._replace(seed=9)):
        monkeypatch.setattr(gluon_machine, "order", order)
        results += [multiply(SMALL, inputs), multiply(replace(SMALL, stages=4), inputs)]
    assert all(torch.equal(result, results[0]) for result in results[1:])


USUAL = (SMALL, "")
RESIDUAL = (SMALL, "residual")
PING_PONG = (replace(SMALL, ping_pong=True), "")
BUGS = {
    "a slot is not released": Bug(
        "multiply", [("pipeline.release(before)", "pass")], "produce 2 in"
    ),
    "the last slot is not released": Bug(
        "consume", [("operands.b.release(stage)", "pass")], "produce 2 in"
    ),
    "a slot is released while it is read": Bug(
        "multiply",
        [("acc = warpgroup_mma_wait(1, deps=[operands.multiply(stage, acc, True, READER)])\n"
          "        pipeline.release(before)",
          "token = operands.multiply(stage, acc, True, READER)\n"
          "        pipeline.release(before)\n"
          "        acc = warpgroup_mma_wait(1, deps=[token])")],
        WRONG,
    ),
    "the last slot is released while it is read": Bug(
        "consume",
        [("acc = warpgroup_mma_wait(0, deps=[acc])\n        operands.b.release(stage)",
          "operands.b.release(stage)\n        acc = warpgroup_mma_wait(0, deps=[acc])")],
        WRONG,
    ),
    "a slot is read before it is there": Bug(
        "multiply", [("        pipeline.wait(stage)\n", "")], "more arrivals|" + WRONG
    ),
    "the product is not waited for": Bug(
        "consume", [("_wait(0, deps=[acc])", "_wait(1, deps=[acc])")], "in flight"
    ),
    "the first product adds to what was there": Bug(
        "multiply", [("acc, False, READER", "acc + 1, True, READER")], WRONG
    ),
    "a slot is filled before it is empty": Bug(
        "Operands.load", [("self.b.wait_empty(stage)", "pass")], "more arrivals"
    ),
    "one consumer reads the other's rows": Bug(
        "Operands.multiply", [("self.READERS + READER", "self.READERS")], WRONG
    ),
    "up takes the place of the gate": Bug(
        "Operands.load", [("full, both.index(1)", "full, both.index(0)")], WRONG, (SMALL, "swiglu")
    ),
    "a barrier counts one consumer": Bug(
        "make_operands", [("count=READERS", "count=1")], "more arrivals"
    ),
    "a sub-tile is overwritten while it is stored": Bug(
        "finish", [("tma.store_wait(schedule.BUFFERS - 1)", "pass")], WRONG
    ),
    "a sub-tile is stored without a fence": Bug(
        "finish", [("fence_async_shared()", "pass")], "without fence_async_shared"
    ),
    "the last sub-tiles are not waited for": Bug(
        "consume", [("\n    tma.store_wait(0)\n", "\n")], "stores in flight"
    ),
    "the bias of another sub-tile": Bug(
        "finish", [("columns = column + i * WIDTH +", "columns = column +")], WRONG, (SMALL, "bias")
    ),
    "the bias is read past its end": Bug(
        "finish",
        [("mask=columns < problem.columns", "mask=columns >= 0")],
        "load outside",
        (SMALL, "bias"),
    ),
    "a residual is read before it is there": Bug("finish", [("out.wait(stage)", "pass")],
                                                 f"{WRONG}|more arrivals", RESIDUAL),
    "a residual is loaded over a sum that is being stored": Bug(
        "finish", [("                tma.store_wait(1)\n", "")], WRONG, RESIDUAL
    ),
    "a buffer is not given back": Bug(
        "finish",
        [("            if i == PARTS - 1:\n                tma.store_wait(0)\n"
          "                out.release(stage)", "            pass")],
        "fetch 3 in",
        RESIDUAL,
    ),
    "the residual of the wrong consumer": Bug(
        "fetch", [("stage_out(out, reader,", "stage_out(out, 1 - reader,")], WRONG, RESIDUAL
    ),
    "the turn is not passed on": Bug(
        "consume",
        [("named_barrier_arrive(CONSUMER, CONSUMERS)\n        acc", "pass\n        acc")],
        "consume 1 in .*named_barrier_sync",
        PING_PONG,
    ),
    "nobody begins": Bug(
        "consume",
        [("named_barrier_arrive(CONSUMER, CONSUMERS)  # consumer 0 begins", "pass")],
        "consume 0 in .*named_barrier_sync",
        PING_PONG,
    ),
    "both take every tile": Bug("consume", [("stride *= CONSUMERS", "pass")], ".", PING_PONG),
    "the slots of the other's tile are not skipped": Bug(
        "consume",
        [("steps *= CONSUMERS", "pass")],
        ".",
        (replace(SMALL, ping_pong=True, stages=3), ""),
    ),
    "a tile is left out": Bug(
        "GemmProblem.num_tiles", [("gl.cdiv(self.rows", "gl.cdiv(self.rows - 128")], WRONG
    ),
    "a group is as high as the others at the end": Bug(
        "GemmProblem.locate", [("gl.minimum(down - first, self.GROUP)", "self.GROUP")], WRONG
    ),
}  # fmt: skip


def right(case):
    """Whether the result of a bug's case is."""
    config, what = case or USUAL
    inputs = operands(330, 264, 200, what)
    return assess(multiply(config, inputs), formula, **inputs).ok


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", dict.fromkeys(x.case for x in BUGS.values()))
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
