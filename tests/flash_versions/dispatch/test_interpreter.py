"""The interpreter's repairs: its numbers, and what it says."""

import pytest
import torch
import triton
import triton.language as tl

from flash_versions import attention
from flash_versions.dispatch import interpreter
from flash_versions.dispatch.interpreter import switch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")


@triton.jit
def dot_kernel(x, y, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    a = tl.load(x + at)
    acc = tl.zeros([SIZE, SIZE], tl.float32)
    for _ in range(0, n, SIZE):  # a bound known at run time only
        acc += tl.dot(a, a)
    tl.store(y + at, acc)


@triton.jit
def cast_kernel(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def arithmetic_kernel(x, y, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) * tl.load(y + i) + tl.load(x + i))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_dot(dtype):
    x = torch.randn(16, 16).to(dtype)
    y = torch.empty(16, 16)
    dot_kernel[(1,)](x, y, 32, 16)
    exact = 2 * (x.double() @ x.double())
    assert (y - exact).abs().max() <= 16 * 2.0**-23 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_equal_torch(dtype):
    """Random bit patterns: every exponent, subnormals and ties; fp8 saturates as the GPU does."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 14,), dtype=torch.int32)
    x = torch.cat((bits.view(torch.float32)[:-64], torch.linspace(-500, 500, 64)))
    x = torch.where(x.isfinite(), x, 0.0)
    y = torch.zeros(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, y, x.numel())
    limit = torch.finfo(dtype).max if dtype.itemsize == 1 else float("inf")
    assert torch.equal(y.float(), x.clamp(-limit, limit).to(dtype).float())


def test_bf16_arithmetic_rounds_after_each_operation():
    x, y = torch.randn(2, 256).bfloat16()
    out = torch.zeros_like(x)
    arithmetic_kernel[(1,)](x, y, out, 256)
    assert torch.equal(out, x * y + x)


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def counting_kernel(out, first, UNSIGNED: tl.constexpr):
    i = tl.zeros([4], tl.int32) + first
    if UNSIGNED:
        i = i.to(tl.uint32)
    tl.store(out + tl.arange(0, 4), plus_one(plus_one(i)).to(tl.int64))


def test_integers_that_overflow_are_an_error_and_unsigned_ones_wrap_around():
    """Triton's own check drops what it finds; that of overflow.py does not."""
    largest = 2**31 - 1
    out = torch.zeros(4, dtype=torch.int64)
    counting_kernel[(1,)](out, largest - 2, False)
    assert out.tolist() == [largest] * 4
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        counting_kernel[(1,)](out, largest - 1, False)
    counting_kernel[(1,)](out, -2, True)
    assert out.tolist() == [0] * 4


def test_a_launch_leaves_triton_as_it_was():
    """What the interpreter replaces for a launch, it puts back, after an error, too."""

    def state():
        return {(owner, name): vars(owner)[name] for owner in (tl, tl.math) for name in vars(owner)}

    out = torch.zeros(4, dtype=torch.int64)
    before = state()
    counting_kernel[(1,)](out, 0, False)
    with pytest.raises(Exception, match="overflow"):
        counting_kernel[(1,)](out, 2**31 - 1, False)
    assert state() == before
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.math.exp2)


def test_the_first_kernel_says_that_it_is_interpreted(monkeypatch, capsys):
    monkeypatch.setattr(switch, "at_import", {"interpreted": True, "unsaid": True})
    out = torch.zeros(4, dtype=torch.int64)
    switch.say_at_first_launch()
    assert not capsys.readouterr().err
    for _ in range(2):
        counting_kernel[(1,)](out, 0, False)
    assert capsys.readouterr().err == switch.NOTICE


def test_cpu_tensors_are_refused_where_it_is_off(monkeypatch):
    monkeypatch.setattr(interpreter, "enabled", lambda: False)
    q = torch.ones(1, 2, 1, 16)
    with pytest.raises(ValueError, match="CPU tensors need Triton's interpreter, which is off"):
        attention(q, q, q, version="fa2")
