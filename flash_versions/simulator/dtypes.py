"""Triton's types of numbers, on NumPy's.

A value in registers is a NumPy array. Types that NumPy lacks (bf16 and FP8) are computed in fp32
and rounded after every operation, as the hardware does; in memory they are unsigned integers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class dtype:
    """A type of numbers, with the attributes that kernels ask Triton's for.

    Attributes:
        name: Triton's, such as "bf16"; written in a kernel it may be another, such as "bfloat16".
        np: NumPy's type in which it is computed.
        stored: NumPy's type in memory.
        torch: PyTorch's type.
        kind: 0 of booleans, 1 of integers, 2 of floating-point numbers.
        words: what it is, such as "floating": dtype.is_floating() and the like ask for these.
        round: fp32 to the nearest number of this type, in fp32; None where NumPy has the type.
    """

    def __init__(
        self, name: str, bits: int, computed: Any, of_torch: Any, round: Any = None
    ) -> None:
        self.name, self.primitive_bitwidth, self.torch = name, bits, of_torch
        self.np: Any = np.dtype(computed).type
        self.stored = np.dtype(f"u{bits // 8}") if round else np.dtype(computed)
        self.itemsize = self.stored.itemsize
        self.scalar = self.element_ty = self.type = self
        self.round: Callable[[np.ndarray], np.ndarray] | None = round
        self.kind = 2 if self.np(0).dtype.kind == "f" else int(bits > 1)
        self.signed = not name.startswith("u") and self.kind == 1
        self.native = round is None and bits > 1  # NumPy's operators give what Triton's do
        # A Python number of this type or an int in this range is computed as one of this dtype.
        self.of_python = float if self.kind == 2 and round is None else None
        if self.kind == 2:
            self.lowest, self.highest = (1, 0) if round else (-(2**11), 2**11)
        else:
            self.highest = 2 ** (bits - self.signed) - 1
            self.lowest = -self.highest - 1 if self.signed else 0
        self.words = {name, "floating" if self.kind == 2 else "int"}
        if self.kind == 2 and bits == 8:
            self.words.add("fp8")

    def __repr__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):  # is_floating, is_ptr, is_int32, is_fp64: one for each word
            return lambda: name[3:] in self.words
        raise AttributeError(name)


MANY = 2048  # elements from which on torch converts faster than NumPy


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to the nearest bf16, ties to even."""
    if x.size >= MANY:
        return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + (bits >> np.uint32(16) & np.uint32(1))
    rounded += np.uint32(0x7FFF)
    rounded &= np.uint32(0xFFFF0000)
    result = rounded.view(np.float32).reshape(x.shape)
    return np.where(x == x, result, np.float32(np.nan)) if np.isnan(np.sum(x)) else result


def round_to_fp8(kind: torch.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """fp32 to the nearest number of 8 bits; larger ones become the largest, as on a GPU."""
    largest = torch.finfo(kind).max

    def rounded(x: np.ndarray) -> np.ndarray:
        values = torch.from_numpy(np.array(x, np.float32)).clamp(-largest, largest)
        return values.to(kind).float().numpy()

    return rounded


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
int1 = dtype("int1", 1, np.bool_, torch.bool)
int8 = dtype("int8", 8, np.int8, torch.int8)
int16 = dtype("int16", 16, np.int16, torch.int16)
int32 = dtype("int32", 32, np.int32, torch.int32)
int64 = dtype("int64", 64, np.int64, torch.int64)
uint8 = dtype("uint8", 8, np.uint8, torch.uint8)
uint16 = dtype("uint16", 16, np.uint16, torch.uint16)
uint32 = dtype("uint32", 32, np.uint32, torch.uint32)
uint64 = dtype("uint64", 64, np.uint64, torch.uint64)
float16 = dtype("fp16", 16, np.float16, torch.float16)
bfloat16 = dtype("bf16", 16, np.float32, torch.bfloat16, round_to_bf16)
float32 = dtype("fp32", 32, np.float32, torch.float32)
float64 = dtype("fp64", 64, np.float64, torch.float64)
float8e4nv = dtype("fp8e4nv", 8, np.float32, _E4M3, round_to_fp8(_E4M3))
float8e5 = dtype("fp8e5", 8, np.float32, _E5M2, round_to_fp8(_E5M2))

# By the name that a kernel writes.
NAMED = {name: x for name, x in list(globals().items()) if isinstance(x, dtype)}
OF_NAME = {x.name: x for x in NAMED.values()} | {"void": None}
OF_TORCH = {x.torch: x for x in NAMED.values()}
# What 8 bits mean, for all of them.
DECODED = {
    kind: torch.arange(256, dtype=torch.uint8).view(kind.torch).float().numpy()
    for kind in (float8e4nv, float8e5)
}


def decode(stored: Any, kind: dtype) -> Any:
    """Elements as they are in memory, as they are computed."""
    if kind.round is None:
        return stored
    if kind is bfloat16:
        return (np.asarray(stored).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return DECODED[kind][stored]


def encode(values: Any, kind: dtype) -> Any:
    """The inverse of `decode`, of values that have been rounded."""
    if kind.round is None:
        return values
    values = np.ascontiguousarray(values, np.float32)
    if kind is bfloat16:
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(values.shape)
    encoded = torch.from_numpy(values.copy()).to(kind.torch).view(torch.uint8)
    return encoded.numpy().reshape(values.shape)


def converted(a: Any, source: dtype, target: dtype) -> Any:
    """An array of one type as another, rounded to nearest even; of a NaN as the GPU does."""
    if target.native and (target.kind == 2 or source.kind < 2):
        if a.size >= MANY and float16 in (source, target) and float32 in (source, target):
            return torch.from_numpy(np.ascontiguousarray(a)).to(target.torch).numpy()
        return a.astype(target.np)
    if target.round is not None:
        return target.round(np.asarray(a, np.float32))
    if target.kind == 0:
        return np.asarray(a) != 0
    inside = np.where(a == a, np.asarray(a).astype(target.np), 0)  # beyond it the nearest number
    low, high = target.np(target.lowest), target.np(target.highest)
    return np.where(a >= high, high, np.where(a <= low, low, inside))[()]
