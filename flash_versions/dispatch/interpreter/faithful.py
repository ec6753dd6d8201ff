"""Triton's interpreter, made numerically faithful.

`make_faithful` repairs three faults of the interpreter (present in Triton 3.6 to 3.9):

* bf16: `tl.dot` and arithmetic work on the raw bit patterns, and casts truncate instead of
  rounding;
* fp8: casts lose the mantissa carry, truncate subnormals and wrap instead of saturating;
* Triton 3.6 beside NumPy 2.4 or later: loops with a run-time bound raise a TypeError.

It replaces private functions of `triton.runtime.interpreter`, so
tests/flash_versions/dispatch/test_interpreter.py holds dots, casts and arithmetic against torch,
with every supported Triton.
"""

import importlib
from typing import Any

import numpy as np
import torch

from flash_versions.dispatch.interpreter.quick import make_quick


def make_faithful() -> None:
    """Install the repairs into `triton.runtime.interpreter`, and what makes it quicker; calling it
    again changes nothing.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_flash_versions_repaired"):
        _repair_casts(interpreter)
        _repair_arithmetic(interpreter)
        _repair_loop_bounds(interpreter)
        make_quick(interpreter)
        interpreter._flash_versions_repaired = True


def _torch_dtypes() -> dict:
    import triton.language as tl

    return {
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }


def _repair_casts(interpreter: Any) -> None:
    """Cast between float types with torch, which rounds to nearest even; saturate fp8 as the GPU
    does.
    """
    dtypes = _torch_dtypes()
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    original = interpreter._convert_float

    def convert(data, source, target, rounding):
        old, new = dtypes.get(source.scalar), dtypes.get(target.scalar)
        if old is None or new is None:
            return original(data, source, target, rounding)
        data = np.ascontiguousarray(data)
        values = torch.from_numpy(data.view(f"i{data.itemsize}")).view(old)
        if new.itemsize == 1:
            limit = torch.finfo(new).max
            values = values.float().clamp(-limit, limit)
        return values.to(new).view(as_bits[new.itemsize]).numpy().view(f"u{new.itemsize}")

    interpreter._convert_float = convert


def _repair_arithmetic(interpreter: Any) -> None:
    """Decode the types that NumPy lacks before a dot or a binary operation works on them."""
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    handle_of = interpreter.TensorHandle
    original_binary = builder.binary_op
    stored_as_integers = (tl.bfloat16, tl.float8e4nv, tl.float8e5)

    def decode(handle):
        dtype = handle.dtype.scalar
        if dtype not in stored_as_integers:
            return handle.data
        bits = interpreter._convert_float(handle.data, dtype, tl.float32, None)
        return bits.view(np.float32)

    def create_dot(self, a, b, acc, *_):
        product = np.matmul(decode(a), decode(b), dtype=acc.data.dtype)
        return handle_of(product + acc.data, acc.dtype.scalar)

    def binary_op(self, left, right, op):
        if "bf16" not in (left.dtype.scalar.name, right.dtype.scalar.name):
            return original_binary(self, left, right, op)
        result = op(decode(left), decode(right))
        if result.dtype == bool:
            return handle_of(result, tl.int1)
        result = result.astype(np.float32)
        bits = interpreter._convert_float(result, tl.float32, tl.bfloat16, None)
        return handle_of(bits, tl.bfloat16)

    builder.create_dot = create_dot
    builder.binary_op = binary_op


def _repair_loop_bounds(interpreter: Any) -> None:
    """Let a one-element tensor be a loop bound under any NumPy."""
    original = interpreter._patch_lang_tensor

    def index(self):
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    def patch(tensor, *scope):
        original(tensor, *scope)
        if scope:  # newer versions undo their patches when the launch ends
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patch
