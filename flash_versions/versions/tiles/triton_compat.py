"""Differences between Triton versions. `blackwell/tensor_memory.py` has those of tensor memory."""

from typing import Any, dataclass_transform

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import semantic

GLUON_DTYPES = {
    torch.float32: gl.float32,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.int32: gl.int32,
}
FROM_3_8 = hasattr(tma, "async_atomic_add")
# The most columns of O in a tile with 128 keys. A thread has 240 registers: O takes one for two
# columns, S takes 64 and P 32. With 192 columns, Triton 3.8 spills under a window and 3.9
# serialises products.
MOST_DIMS_BESIDE_128_KEYS = 160 if FROM_3_8 else 192
# Triton 3.7 renamed these.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def add_tile_by_builder(desc, coordinates, tile, _semantic=None):
    """TMA adds a tile to a box in memory; the operation has a name only from Triton 3.8 on."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = semantic.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coordinates, tile.handle)


add_tile = getattr(tma, "async_atomic_add", None) or builtin(add_tile_by_builder)


@builtin
def reinterpret(tile, shape, layout, _semantic=None):
    """The same bytes of shared memory as tiles of another shape."""
    shape, layout = [getattr(n, "value", n) for n in shape], getattr(layout, "value", layout)
    return _semantic.memdesc_reinterpret(tile, tile.dtype, shape, layout)


@builtin
def replaced(record, _semantic=None, **fields):
    """An aggregate with other values in some of its fields."""
    made = object.__new__(type(record))
    vars(made).update(vars(record))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@gluon.jit
def as_tensors(numbers):
    """Numbers as tensors, which fields of aggregates are."""
    found = ()
    for i in gl.static_range(len(numbers)):
        found = found + (gl.to_tensor(numbers[i]),)
    return found


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """A record of values that a kernel passes around as one; the constructor takes the annotated
    fields in order.
    """
    if hasattr(gluon, "aggregate"):
        return gluon.aggregate(cls)
    from triton.language.core import _aggregate

    fields = cls.__annotations__

    def __init__(self, *values):
        for (name, kind), value in zip(fields.items(), values, strict=True):
            is_constant = kind is gl.constexpr and not isinstance(value, gl.constexpr)
            setattr(self, name, gl.constexpr(value) if is_constant else value)

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return _aggregate(cls)
