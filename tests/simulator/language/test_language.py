"""The simulator computes each kernel of kernels.py as Triton's own interpreter does, bit for bit
but for the last ones of two products (ROUNDED).

COMPILER names the kernels for which the interpreter is no oracle, as it differs from what Triton's
compiler makes of them; their results are computed here. An H200 gave the same results with Triton
3.6, but for the last bits of exp_method and aggregates, and but for the two kernels that later
compilers treat differently.
"""

import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flash_versions.simulator.values import Tile
from tests.simulator.language.kernels import CASES, INF, bf16, e4m3, e5m2, f16, f32, i32, tensors

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU"),
    pytest.mark.xdist_group("language"),  # the interpreter runs once
]


def cast(dtype):
    """To the nearest number, ties to even; to FP8 as the GPU casts: no infinity, NaN stays."""
    limit = torch.finfo(dtype).max if dtype.itemsize == 1 else INF
    return lambda x, *_: x.float().clamp(-limit, limit).to(dtype)


def fused(x, y, z):
    return (x.double() * y.double() + z.double()).to(x.dtype)


def high_product(x, y):
    products = zip((x.long() % 2**32).tolist(), (y.long() % 2**32).tolist())
    return torch.tensor([a * b >> 32 for a, b in products]).to(x.dtype)


def loop_index(x, low):
    for k in range(low, 0):
        x = x * 3 + int(k / 2) * 10 + int(math.fmod(k, 4))
    return x


def shifted_blocks(x, m, n):
    whole = torch.nn.functional.pad(x, (0, 2, 0, 1))[2:]
    return torch.nn.functional.pad((whole[:, :4] * 3 + whole[:, 4:])[:, :3], (1, 0))


COMPILER: dict[str, Callable[..., Any]] = {  # of a case's inputs
    # An integer argument of 1 is a compile-time constant, which does not widen int8.
    "i8_add_argument_of_one": lambda x, one: x + 1,
    # A float argument is an fp32 scalar. The interpreter passes a Python number, which takes
    # the type of the tensor beside it.
    "f16_mul_argument": lambda x, y: x.float() * y,
    # A bool argument is an int1. The interpreter fails, as its array of int32 has more bits.
    "i32_add_bool_argument": lambda x, true: x + 1,
    # The index of a run-time loop is an int32 scalar, with C's division and remainder. The
    # interpreter's is a Python number: it rounds down, and takes the type of the tensor
    # beside it.
    "loop_index_floordiv": loop_index,
    "loop_index_type": lambda x: x.int() + 100,
    # Literals become scalars when a tuple assigns them, too. The interpreter keeps Python
    # numbers.
    "tuple_assigned_floordiv": lambda x: x - 3,
    # `and`, `or`, `not` and the built-in max work on each element of tensors. The interpreter
    # uses Python's, which choose one of the tensors.
    "and_of_tensors": lambda x, y: (x > 0) & (y > 0),
    "or_of_tensors": lambda x, y: (x > 0) | (y > 0),
    "not_of_a_tensor": lambda x: ~x,
    "builtin_max_of_tensors": torch.maximum,
    # int1 is an integer of one bit, which wraps. NumPy's + of two bools is `or`.
    "b_add_b": torch.logical_xor,
    # NumPy refuses -1 as an unsigned number, and as an int32 the int64 that it makes of a
    # sum.
    "u32_invert": lambda x: (~x.view(i32)).view(x.dtype),
    "sum_of_i32_wraps": lambda x: x.sum().to(i32),
    # umulhi takes the bits as unsigned numbers. The interpreter extends the sign.
    "umulhi_i32": high_product,
    # Without propagate_nan, minimum, maximum and clamp return the number beside a NaN.
    # np.minimum, np.maximum and np.clip return NaN.
    "minimum_of_nan": torch.fmin,
    "maximum_of_nan": torch.fmax,
    "clamp_of_nan": lambda x: x.fmax(torch.tensor(-1.0)).fmin(torch.tensor(2.0)),
    # fma rounds once. The interpreter rounds the product, and then the sum.
    "fma_f32": fused,
    "fma_f16": fused,
    # Functions of one number are methods of tensors, too; of these the interpreter misses
    # some.
    "exp_method": lambda x: torch.from_numpy(np.exp(x.numpy())) + x.abs(),
    # A value above the bins is in none. np.histogram has its upper limit in the last bin.
    "histogram_out_of_range": lambda x: torch.ones(8, dtype=i32),
    # A literal in a comparison has the type of the tensor. So it is in the compiler of 3.9;
    # those before it compare in fp32.
    "f16_equal_literal": lambda x: x == x,
    # -x changes the sign of 0. So it does in 3.8's compiler; those before it compute 0 - x.
    "f32_negative_of_zero": torch.neg,
    # bf16 is stored as integers, with which the interpreter computes.
    "bf16_mul_bf16": torch.mul,
    "bf16_sub_bf16": torch.sub,
    "bf16_less_bf16": torch.lt,
    "bf16_negative": torch.neg,
    "bf16_mul_literal": lambda x: x * torch.tensor(2.7, dtype=bf16),
    "abs_bf16": lambda x: x.abs() * 2,
    "sort_bf16": lambda x: x.sort().values,
    "sum_of_bf16": lambda x: x.double().sum(1).to(bf16),
    "dot_bf16": lambda x, y, z: (x.double() @ y.double() + z.double()).to(f32),
    "i16_to_bfloat16": cast(bf16),
    "f64_to_bfloat16": cast(bf16),
    "atomic_add_bf16": lambda x, y: (x + y, y, x),
    # As before. Until 3.8 both compute these in fp32, with the same results.
    "maximum_of_bf16": torch.maximum,
    "cumsum_of_bf16": lambda x: x.float().cumsum(0),
    # Casts to bf16 round to nearest even. The interpreter truncates, and it drops subnormals.
    "f16_to_bfloat16": cast(bf16),
    "f32_to_bfloat16": cast(bf16),
    "bf16_to_float32": cast(f32),
    "bf16_full": lambda: torch.full((16,), 2.7, dtype=bf16),
    "load_bf16_with_other": lambda x: torch.where(
        torch.arange(16) < 5, x, torch.tensor(2.7).to(bf16)
    ),
    "store_rounds_to_bf16": lambda x, y: (y.to(bf16), y, y.to(bf16)),
    # Casts to FP8 round to nearest even and saturate. The interpreter's lose the carry of the
    # mantissa, truncate subnormals and wrap; its casts from FP8 know no NaN and no infinity.
    **{
        f"{source}_to_{target}": cast(dtype)
        for source in ("f32", "f16", "bf16")
        for target, dtype in (("float8e4nv", e4m3), ("float8e5", e5m2))
    },
    **{f"{source}_to_float32": cast(f32) for source in ("e4m3", "e5m2")},
    **{f"{source}_to_float16": cast(f16) for source in ("e4m3", "e5m2")},
    "store_rounds_to_e4m3": lambda x, y: (cast(e4m3)(y), y, cast(e4m3)(y)),
    # The interpreter has no exchange of fp32, no methods of aggregates, no kernels in
    # functions.
    "atomic_xchg_f32": lambda x, y: (y, y, x),
    "aggregates": lambda x, y: x * torch.arange(16) + y + x,
    "closure": lambda: torch.arange(16, dtype=i32) * 3,
    # Triton 3.9 has no block pointers. The simulator has them with each version.
    "block_pointers": shifted_blocks,
}


def expected(name):
    """What the COMPILER table says of a case: its tensors after the launch, the output last."""
    *inputs, out = CASES[name].arguments()
    found = COMPILER[name](*inputs)
    return found if isinstance(found, tuple) else (*tensors(inputs), found.reshape(out.shape))


def raw(x):
    """The bytes of each element, the same ones for each NaN."""
    found = x.contiguous().flatten()[:, None].view(torch.uint8)
    return torch.where(x.double().isnan().reshape(-1, 1), 0xFF, found)


# Products in whose sums each addition may round: their order depends on the CPU's BLAS.
ROUNDED = "dot_rounds", "dot_of_transposed"


def equal(found, wanted):
    return len(found) == len(wanted) and all(
        (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(raw(a), raw(b))
        for a, b in zip(found, wanted)
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What Triton's interpreter makes of each case, or the text of its exception."""
    results = tmp_path_factory.mktemp("interpreted") / "results"
    script = Path(__file__).with_name("oracle.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, script, results], env=environment, check=True)
    return torch.load(results)


@pytest.fixture
def wrapping(monkeypatch):
    """Let integers wrap, which is an error in other tests."""
    for name in ("__add__", "__sub__", "__mul__"):
        checked = getattr(Tile, name)
        original = inspect.getclosurevars(checked).nonlocals.get("original", checked)
        monkeypatch.setattr(Tile, name, original)


@pytest.mark.parametrize("name", CASES)
def test_case(name, interpreted, wrapping):
    wanted = expected(name) if name in COMPILER else interpreted[name]
    assert not isinstance(wanted, str), wanted
    found = CASES[name].run()
    if name in ROUNDED:
        (x, y, *_, result), of_interpreter = found, wanted[-1]
        most = 2**-24 * x.shape[1] * x.abs().float().sum(1).max() * y.abs().max()
        torch.testing.assert_close(result, of_interpreter, rtol=0, atol=most.item())
        found, wanted = found[:-1], wanted[:-1]
    assert equal(found, wanted), f"\n{found}\nis not\n{wanted}"
