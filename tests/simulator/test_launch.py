"""Which launches are simulated, and what is said of those that cannot be."""

import threading

import pytest
import torch
import triton
import triton.language as tl

from flash_versions import attention
from flash_versions.inspect.compiled import compiling
from flash_versions.simulator import CompileError, loops

BLOCK = 16


@triton.jit
def scaled(x):
    return x * 2


@triton.jit
def kernel(x, y, n, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, scaled(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


def run():
    x, y = torch.randn(40), torch.full((40,), torch.nan)
    kernel[(3,)](x, y, 40, SIZE=BLOCK)
    return x, y


def test_a_process_simulates_and_compiles_in_turns():
    for arch in ("sm_80", "sm_90"):
        x, y = run()
        assert torch.equal(y, 2 * x)
        with compiling(arch) as found:
            run()
        assert [one.arch for one in found] == [arch] and "ptx" in found[0].code.asm


def test_helpers_are_looked_up_anew(monkeypatch):
    """As in a notebook, where a cell defines a helper again."""

    @triton.jit
    def scaled(x):
        return x * 3

    run()
    monkeypatch.setitem(globals(), "scaled", scaled)
    x, y = run()
    assert torch.equal(y, 3 * x)


def test_a_grid_may_be_a_function_of_the_arguments():
    x, y = torch.randn(40), torch.full((40,), torch.nan)
    kernel[lambda given: (triton.cdiv(given["n"], given["SIZE"]),)](x, y, n=40, SIZE=BLOCK)
    assert torch.equal(y, 2 * x)


def test_eight_threads_call_at_once():
    """Forward and backward: each has the results that a call alone has."""
    torch.manual_seed(0)
    calls = [torch.randn(3, 1, 40 + i, 2, 32).bfloat16().requires_grad_() for i in range(8)]
    versions = ["fa1", "fa2", "fa3", "fa4"] * 2

    def compute(i):
        o = attention(*calls[i].unbind(), causal=True, version=versions[i])
        [gradient] = torch.autograd.grad(o.sum(), [calls[i]])
        return o.detach(), gradient

    alone, together, errors = [compute(i) for i in range(8)], [None] * 8, []

    def work(i):
        try:
            together[i] = compute(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for one, other in zip(alone, together):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("place", ["meta", "both"])
def test_tensors_where_no_kernel_runs(place):
    x = torch.empty(40, device="meta")
    with pytest.raises(ValueError, match="kernels take tensors that are all on the CPU"):
        kernel[(3,)](x, x if place == "meta" else torch.empty(40), 40, SIZE=BLOCK)


@triton.jit
def with_an_unknown_function(x):
    tl.store(x, tl.dot_scaled(x))


@triton.jit
def without_an_end(x):
    i = 0
    while i < 10:
        i = i * 1
    tl.store(x, i)


@triton.jit
def that_reads_a_variable(x):
    tl.store(x, BLOCK)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (with_an_unknown_function, r"line \d+ .*has no .*dot_scaled; of this module it has .*dot"),
        (without_an_end, r"line \d+ of without_an_end, `while i < 10:.*does not end within"),
        (that_reads_a_variable, r"line \d+ .*does not know BLOCK.*BLOCK = tl.constexpr"),
    ],
)
def test_what_cannot_be_simulated_is_told_with_its_line(refused, said, monkeypatch):
    monkeypatch.setattr(loops, "MOST_STEPS", 1000)
    with pytest.raises(CompileError, match=said):
        refused[(1,)](torch.empty(1))


@triton.jit
def copied(out, stage, steps, HOW: tl.constexpr):
    """`before` comes before the loop and in it; Triton looks at the first visit of the body."""
    if HOW == "a plain copy":
        before = stage
    elif HOW == "a value of its own":
        before = stage + 0
    else:
        before = steps
    for _ in range(steps):
        before = stage
        stage = stage + 1
    tl.store(out, before)


@triton.jit
def copied_behind(out, stage, steps):
    before = stage
    for _ in range(steps):
        stage = stage + 1
        before = stage
    tl.store(out, before)


def test_a_copy_that_triton_would_not_carry_is_refused():
    """The compiler keeps the first value of `before` in all steps, where Python changes it."""
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(CompileError, match=r"line \d+ of copied: before = stage also comes before"):
        copied[(1,)](out, 5, 3, "a plain copy")
    for how in ("a value of its own", "another name"):
        copied[(1,)](out, 5, 3, how)
        assert out.item() == 7
    copied_behind[(1,)](out, 5, 3)
    assert out.item() == 8
