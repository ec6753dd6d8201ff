"""The norm's product for Hopper without a GPU: emulated, and as late as the rules allow."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from tests.emulator.gemm import products
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.rotation import rotated
from tests.transformer.kernels.test_gemm import assess
from tests.transformer.kernels.test_rmsnorm_gemm import (
    CONFIGS,
    ON_HOPPER,
    USUAL,
    Case,
    formula,
    multiply,
)

products.language.rsqrt = gluon_emulator.computed(torch.rsqrt)
products.language.DistributedLinearLayout = gluon_emulator.Layout
LOADED = products.load("transformer.model.kernels.gemm.rmsnorm_hopper")
emulated = LOADED["transformer.model.kernels.gemm.rmsnorm_hopper"]


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles. What a product had in
    registers has been read when the product is done: no fence is needed behind the load.
    """
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))
    monkeypatch.setattr(gluon_machine, "loads_need_fences", False)


@pytest.mark.parametrize(("name", "order"), rotated(CONFIGS, ORDERS))
def test_every_switch_emulated(name, order, monkeypatch):
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    config = CONFIGS[name]
    for case in ON_HOPPER:
        inputs = case.inputs(torch.float16 if case.bias else torch.bfloat16)
        case.assert_right(multiply(emulated.norm_gemm, config, **inputs), **inputs)


def test_the_same_bits_in_every_order(monkeypatch):
    inputs = Case(200, 304, 256, bias=True).inputs(torch.bfloat16)
    results = []
    for order in ORDERS.values():
        monkeypatch.setattr(gluon_machine, "order", order)
        for config in (USUAL, replace(USUAL, through_registers=True, stages=3)):
            results.append(multiply(emulated.norm_gemm, config, **inputs))
    assert all(torch.equal(y, results[0]) for y in results)


SMALL = Case(200, 304, 320, bias=True)
STEP = """            acc = warpgroup_mma_wait(1, deps=[product])
            if i > 0:
                pipeline.release(before)
"""
LAST = """        acc = warpgroup_mma_wait(0, deps=[acc])
        pipeline.release(before)
"""
BUGS = {
    "a slot of a chain is not released": Bug(
        "multiply", [(STEP, STEP.replace("pipeline.release(before)", "pass"))],
        "produce 2 in .*load"
    ),
    "the last slot of a chain is not released": Bug(
        "multiply", [(LAST, LAST.replace("pipeline.release(before)", "pass"))],
        "produce 2 in .*load"
    ),
    "a slot of a chain is released while it is read": Bug(
        "multiply",
        [(STEP, "            if i > 0:\n                pipeline.release(before)\n"
          "            acc = warpgroup_mma_wait(1, deps=[product])\n")],
        WRONG,
    ),
    "the last slot of a chain is released while it is read": Bug(
        "multiply",
        [(LAST, "        pipeline.release(before)\n"
          "        acc = warpgroup_mma_wait(0, deps=[acc])\n")],
        WRONG,
    ),
    "a slot is read before it is there": Bug(
        "multiply", [("pipeline.wait(stage, pred=step + i + 1 < steps)", "pass")], "more arrivals"
    ),
    "the first slot of a tile is read before it is there": Bug(
        "multiply", [("    pipeline.wait(stage)\n", "")], WRONG
    ),
    "the rest of a chain is not waited for": Bug(
        "multiply", [("_wait(0, deps=[acc])", "_wait(1, deps=[acc])")], "in flight"
    ),
    "both consumers have the first one's rows": Bug(
        "multiply", [("* CONSUMERS + CONSUMER", "* CONSUMERS")], WRONG
    ),
    "the squares of some slots are left out": Bug(
        "multiply", [("sum_of_squares(a)", "sum_of_squares(a) * (step > 0)")], WRONG
    ),
    "the sum is taken for the mean": Bug("consume", [("squares / inner", "squares")], WRONG),
    "the bias is scaled, too": Bug(
        "finish",
        [("parts[i] * scale", "parts[i]"), ("buffer.store(part", "buffer.store((part * scale)")],
        WRONG,
    ),
    "a gate is not scaled": Bug(
        "finish",
        [("silu(gates[i] * scale)", "silu(gates[i])")],
        WRONG,
        Case(100, 64, 72, swiglu=True, scale=3.0),
    ),
    "a buffer is overwritten while it is stored": Bug(
        "finish", [("        tma.store_wait(schedule.BUFFERS - 1)\n", "")], WRONG
    ),
    "the last stores are not waited for": Bug(
        "consume", [("    tma.store_wait(0)\n", "")], "stores in flight"
    ),
    "a buffer is stored without a fence": Bug(
        "finish", [("        fence_async_shared()\n", "")], "without fence_async_shared"
    ),
}  # fmt: skip


def right(case):
    """Whether the result of a bug's case is."""
    inputs = (case or SMALL).inputs(torch.bfloat16)
    return assess(multiply(emulated.norm_gemm, USUAL, **inputs), formula, **inputs).ok


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: right(bug.case), monkeypatch)


@pytest.mark.parametrize("case", dict.fromkeys(x.case for x in BUGS.values()))
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    assert list(outcomes(lambda: right(case), monkeypatch)) == ["", "", ""]
