"""Checking mode: each observation by a kernel that is wrong, and by one that is right."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from flash_versions.simulator import AccessError
from flash_versions.simulator.checking import Watch
from flash_versions.simulator.origins import origin_of


@triton.jit
def add_one(x, y, n, MASKED: tl.constexpr, BLOCK: tl.constexpr = 8):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n if MASKED else index >= 0
    tl.store(y + index, tl.load(x + index, mask=mask) + 1, mask=mask)


@triton.jit
def total(x, y, n, OTHER: tl.constexpr):
    index = tl.arange(0, 8)
    values = tl.load(x + index, mask=index < n, other=OTHER)
    tl.store(y, tl.sum(values, 0))


@triton.jit
def total_without_other(x, y, n):
    index = tl.arange(0, 8)
    tl.store(y, tl.sum(tl.load(x + index, mask=index < n), 0))


@triton.jit
def store_own(y, OWN: tl.constexpr):
    tl.store(y + tl.program_id(0) * OWN, 1.0)


@triton.jit
def read_neighbour(x, y, DISTANCE: tl.constexpr):
    own = tl.program_id(0)
    tl.store(y + own, 1.0)
    tl.store(x + own, tl.load(y + own - own % 2 * DISTANCE))


@triton.jit
def hand_over(y, z, flag, COUNTS: tl.constexpr):
    own = tl.program_id(0)
    if own == 0:
        tl.store(y, 1.0)
    if own < COUNTS:
        tl.atomic_add(flag, 1)
    if own == 1:
        tl.store(z, tl.load(y))


@triton.jit
def add_rows(x, y, stride, N: tl.constexpr):
    row = tl.arange(0, 4)
    tl.store(y + row, tl.load(x + row * stride))


@triton.jit
def normalized(x, y, GUARDED: tl.constexpr):
    values = tl.load(x + tl.arange(0, 4))
    largest = tl.max(values, 0)
    if GUARDED:
        largest = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(y + tl.arange(0, 4), tl.exp(values - largest))


@triton.jit
def divided(x, y):
    p = tl.exp(tl.load(x + tl.arange(0, 4)))
    tl.store(y + tl.arange(0, 4), p / tl.sum(p, 0))


def line_of(text):
    """Which line of this file has a text first."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def watched(run, **inputs):
    """What a function that launches kernels returns, and what was seen."""
    watch = Watch(inputs)
    with watch.watching():
        return run(), watch


def said(run, **inputs):
    """What a function is refused with."""
    with pytest.raises(AccessError) as refused:
        watched(run, **inputs)
    return str(refused.value)


def test_an_access_outside_names_the_element():
    x, line = torch.randn(15), f"line {line_of('tl.load(x + index, mask=mask) + 1')} of add_one"

    def run(masked):
        y = torch.empty_like(x)
        add_one[(2,)](x, y, 15, masked)
        return y

    y, watch = watched(lambda: run(True), x=x)
    assert torch.equal(y, x + 1) and watch.loads("x") == 15 and not watch.never_written(y).any()
    refused = said(lambda: run(False), x=x)
    assert refused.startswith(line) and "a load goes to element 15 of x, which has 15" in refused


def test_what_lies_between_rows_is_outside():
    x = torch.randn(4, 6)[:, :2]

    def run(stride):
        y = torch.empty(4)
        add_rows[(1,)](x, y, stride, 4)
        return y

    assert torch.equal(watched(lambda: run(6), x=x)[0], x[:, 0])
    assert "outside of x, 2 elements behind its begin: it is not contiguous" in said(
        lambda: run(2), x=x
    )


def test_lanes_without_other_are_no_number():
    x, numbers = torch.ones(5), torch.ones(5, dtype=torch.int32)

    def run(kernel, x, *arguments):
        y = torch.empty(1, dtype=x.dtype)
        kernel[(1,)](x, y, 5, *arguments)
        return y.item()

    assert watched(lambda: run(total, x, 0.0))[0] == 5
    value = watched(lambda: run(total_without_other, x))[0]
    assert value != value
    assert abs(watched(lambda: run(total_without_other, numbers))[0]) > 10**6
    assert run(total_without_other, x) == 5  # what is not watched is 0, as on a GPU by chance


def test_memory_that_nothing_wrote():
    def run(y):
        z = torch.empty(8)
        add_one[(1,)](y, z, 8, True)
        return z

    assert watched(lambda: run(torch.zeros(8)))[0].eq(1).all()
    assert "x[0] is read, and nothing wrote it yet" in said(lambda: run(torch.empty(8)))
    y, watch = watched(lambda: run(torch.zeros(8)))
    assert not watch.never_written(y).any()

    def half():
        y = torch.empty(8)
        add_one[(1,)](torch.zeros(8), y, 4, True)
        return y

    y, watch = watched(half)
    assert watch.never_written(y).tolist() == [False] * 4 + [True] * 4


def test_an_input_stays_as_it_is():
    x = torch.zeros(8)
    assert "a store changes x; inputs" in said(lambda: add_one[(1,)](x, x, 8, True), x=x)


def test_two_programs_at_one_element():
    def run(own):
        y = torch.empty(3)
        store_own[(3,)](y, own)
        return y

    assert watched(lambda: run(1))[0].eq(1).all()
    assert "two programs store y[0]: program 1 stores it, and program 0 stores it, too" in said(
        lambda: run(0)
    )

    def read(distance):
        x, y = torch.empty(2), torch.empty(2)
        read_neighbour[(2,)](x, y, distance)

    watched(lambda: read(0))
    assert "program 1 reads y[0], which program 0 stores" in said(lambda: read(1))


def test_an_atomic_operation_of_both_orders_two_programs():
    def run(counts):
        y, z, flag = torch.empty(1), torch.empty(1), torch.zeros(1, dtype=torch.int32)
        hand_over[(2,)](y, z, flag, counts)
        return z

    assert watched(lambda: run(2))[0] == 1
    assert "program 1 reads y[0], which program 0 stores" in said(lambda: run(1))  # the first only


def origin(kernel, x, value, *arguments):
    """Where the first number of a kernel's result comes from."""

    def run():
        y = torch.empty(4)
        kernel[(1,)](x, y, *arguments)
        return y[0].item()

    return origin_of(run, __file__, value)


def test_the_origin_of_a_nan_is_named():
    hidden, nan = torch.full((4,), float("-inf")), float("nan")
    line = line_of("tl.exp(values - largest)")
    assert f"`values - largest` in line {line}, which is -inf - -inf" in origin(
        normalized, hidden, nan, False
    )
    found = origin(divided, torch.tensor([300.0, 1.0, 0.0, 0.0]), nan)
    line = line_of("p / tl.sum(p, 0)")
    assert f"`p / tl.sum(p, 0)` in line {line}, which is inf / inf; its inf comes from" in found
    assert f"in line {line - 1}, which is exp(300): it overflows" in found
    assert f"`p / tl.sum(p, 0)` in line {line}, which is 0 / 0" in origin(divided, hidden, nan)
