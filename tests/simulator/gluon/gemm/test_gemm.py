"""Matrix products for Hopper without a GPU, and those of a norm: simulated, as late as the rules
allow.
"""

from dataclasses import replace
from operator import index

import pytest
import torch

from flash_versions.simulator.checking import Watch
from flash_versions.simulator.gluon.machine import using
from flash_versions.simulator.rebind import rebound
from flash_versions.simulator.values import to_tensor
from tests.simulator.gluon.orders import in_every_order, in_turn
from tests.transformer.kernels.test_gemm import CONFIGS as ON_HOPPER
from tests.transformer.kernels.test_gemm import (
    assert_within_budget,
    assess,
    formula,
    multiply,
    operands,
)
from transformer.model.kernels.gemm import hopper as gemm_hopper
from transformer.model.kernels.gemm.config import GemmConfig

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


def once(compute):
    return compute()


def check(config, *shape, what="", dtype=torch.bfloat16, run=once):
    inputs = operands(*shape, what, dtype)
    with Watch({}).watching():
        found = run(lambda: {"c": multiply(config, **inputs)})
    accuracy = assess(found["c"], formula, **inputs)
    assert accuracy.ok, accuracy


@pytest.mark.parametrize("ping_pong", [False, True])
def test_every_order(ping_pong):
    """More tiles than programs, ragged in every dimension: the same bits."""
    config = replace(SMALL, ping_pong=ping_pong)
    check(config, 330, 264, 200, run=in_every_order)
    check(config, 330, 264, 136, what="bias residual", run=in_every_order)
    check(replace(config, stages=4), 200, 136, 200, what="swiglu", run=in_every_order)


@in_turn("name", CONFIGS)
def test_every_switch(name, order):
    check(CONFIGS[name], 300, 200, 200, what="residual")


@in_turn("what ping_pong", [(what, bool(i % 2)) for i, what in enumerate(FUSIONS + FUSIONS[1:2])])
def test_every_fusion(what, ping_pong, order):
    check(replace(SMALL, ping_pong=ping_pong), 200, 136, 200, what=what)


@in_turn("shape", [(1, 8, 8), (128, 256, 64), (129, 264, 72), (1, 520, 200), (64, 64, 1024)])
def test_shapes(shape, order):
    check(SMALL, *shape, dtype=torch.float16)
    check(GemmConfig(stages=4), *shape, what="bias")


def test_the_residual_may_be_what_is_written():
    inputs = operands(300, 264, 200, "residual")
    expected = multiply(SMALL, **inputs)
    gemm_hopper.gemm(inputs["a"], inputs["b"], inputs["residual"], residual=inputs["residual"])
    torch.testing.assert_close(inputs["residual"], expected, rtol=0, atol=0)


def test_a_residual_needs_a_second_buffer():
    with pytest.raises(ValueError, match="buffers=1"):
        check(replace(SMALL, buffers=1), 128, 128, 64, what="residual")


def test_every_tile_once():
    """Of any number of rows and columns of tiles, in groups of any height."""

    def located(rows, columns, group):
        numbers = map(to_tensor, (rows, columns, 1))
        problem = rebound(gemm_hopper.GemmProblem)(*numbers, 128, 64, group, False)
        tiles = range(index(problem.num_tiles()))
        return [tuple(map(index, problem.locate(to_tensor(i)))) for i in tiles]

    for rows, columns, group in [(1, 1, 8), (1280, 64, 3), (1000, 700, 4), (300, 1000, 8)]:
        wanted = {(i, j) for i in range(0, rows, 128) for j in range(0, columns, 64)}
        found = located(rows, columns, group)
        assert len(found) == len(wanted) and set(found) == wanted
    assert located(512, 128, 2)[:4] == [(0, 0), (128, 0), (0, 64), (128, 64)]


# ------------------------------------------------------------------------------- of a norm
@pytest.fixture
def no_fence():
    """What a product had in registers has been read when the product is done: no fence is needed
    behind the load.
    """
    with using(loads_need_fences=False):
        yield


NORM_CONFIGS = {name: config for name, config in ON_HOPPER.items() if name.startswith("norm")}
CASES = [
    ((200, 304, 256), "bias", 1.0), ((300, 520, 72), "", 1.0), ((1, 8, 8), "", 1.0),
    ((130, 280, 200), "swiglu", 1.0), ((130, 136, 392), "", 1e4),
]  # fmt: skip


def check_norm(config, shape, what, scale=1.0, run=once):
    dtype = torch.float16 if "bias" in what else torch.bfloat16
    inputs = operands(*shape, f"norm {what}", dtype, scale=scale)
    found = run(lambda: {"y": multiply(config, **inputs)})
    assert_within_budget(found["y"], **inputs)


def test_a_norm_in_every_order(no_fence):
    config = NORM_CONFIGS["norm"]
    check_norm(replace(config, stages=3), (200, 304, 320), "bias", run=in_every_order)
    check_norm(config, (100, 64, 72), "swiglu", 3.0, run=in_every_order)


@in_turn("name case", list(zip([*NORM_CONFIGS][1:], CASES + CASES)))
def test_every_switch_of_a_norm(name, case, order, no_fence):
    check_norm(NORM_CONFIGS[name], *case)
