"""What a kernel computes with: tiles in registers, and pointers.

A `Tile` is a NumPy array and its type; a number that is known at run time only is a Tile of no
dimension. What is known when a kernel is compiled (`tl.constexpr`, literals in expressions) is a
plain Python number. The rules by which operands get one type are those of Triton's compiler
(triton/language/semantic.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np

from flash_versions.simulator import dtypes
from flash_versions.simulator.dtypes import bfloat16, dtype, float16, float32, float64, int1
from flash_versions.simulator.errors import CompileError, refuse

LARGEST = 1 << 20  # elements of a tile


def divided(x: Any, y: Any) -> Tile:
    """x / y; integers become fp32."""
    a, b, kind = common(x, y, divides=True)
    if kind.kind < 2:
        a, b, kind = np.float32(a), np.float32(b), float32
    return rounded(np.true_divide(a, b), kind)


def floor_divided(x: Any, y: Any) -> Tile:
    """x // y of integers, rounded towards 0 as in C."""
    if type(x) is Tile and not x.a.shape and type(y) is int:
        kind = x.dtype
        if kind.kind == 1 and 0 < y <= kind.highest and x.a >= 0:
            return Tile(x.a // kind.np(y), kind)
    a, b, kind = common(x, y, divides=True)
    if kind.kind == 2:
        refuse(f"// needs integers, and these are {kind}")
    quotient = np.floor_divide(a, b)
    if kind.signed and (np.min(a) < 0 or np.min(b) <= 0):
        inexact = (quotient * b != a) & ((a < 0) != (b < 0)) & (b != 0)
        quotient = quotient + inexact.astype(quotient.dtype)
    return rounded(quotient, kind)


def remainder(x: Any, y: Any) -> Tile:
    """x % y with the sign of x, as in C."""
    a, b, kind = common(x, y, divides=True)
    return rounded(np.fmod(a, b), kind)


def sides(function: Callable[[Any, Any], Any], compute: Any = None) -> tuple[Any, Any]:
    """An operator, and the one whose left operand is a Python number.

    Args:
        function: computes it of any two operands.
        compute: computes it of two that have one of NumPy's types, if that is all there is to it.
    """

    def reflected(y: Tile, x: Any) -> Any:
        kind = y.dtype
        if compute is not None and kind.native:
            if type(x) is int:
                if kind.lowest <= x <= kind.highest and compute is not operator.truediv:
                    return Tile(compute(kind.np(x), y.a), kind)
            elif type(x) is kind.of_python and kind is not float16:
                return Tile(compute(kind.np(x), y.a), kind)
        return function(x, y)

    return function, reflected


def binary(symbol: str, compute: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """An operator of numbers of one type, such as +, whose result has that type; see `sides`."""

    def apply(x: Any, y: Any) -> Any:
        kind = x.dtype if type(x) is Tile else None
        if kind is not None and kind.native:
            if type(y) is Tile:
                other = y.dtype
                try:
                    if other is kind:
                        return Tile(compute(x.a, y.a), kind)
                    if kind.kind == 1 and other.kind == 1 and symbol in "+-*":
                        both = promoted(kind, other, False)
                        a = x.a if kind is both else x.a.astype(both.np)
                        b = y.a if other is both else y.a.astype(both.np)
                        return Tile(compute(a, b), both)
                except (ValueError, TypeError):
                    pass  # what follows says what does not fit
            elif type(y) is int and kind.lowest <= y <= kind.highest or type(y) is kind.of_python:
                return Tile(compute(x.a, kind.np(y)), kind)
        if isinstance(y, Pointer) and symbol == "+":
            return y + x
        a, b, kind = common(x, y)
        if kind.kind == 2 and symbol in "&|^<<>>":
            refuse(f"{symbol} needs integers, and one of these is {kind}")
        if kind is int1 and symbol in "+-*":  # one bit, which wraps around
            return Tile((np.logical_and if symbol == "*" else np.logical_xor)(a, b), kind)
        return rounded(compute(a, b), kind)

    return sides(apply, compute)


def comparison(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tile]:
    """An operator whose result is true or false."""

    def apply(x: Tile, y: Any) -> Tile:
        kind = x.dtype
        if type(y) is Tile:
            if y.dtype is kind and x.a.shape == y.a.shape:
                return Tile(compute(x.a, y.a), int1)
        elif type(y) is int and kind.lowest <= y <= kind.highest or type(y) is kind.of_python:
            return Tile(compute(x.a, kind.np(y)), int1)
        a, b, _ = common(x, y)
        return Tile(compute(a, b), int1)

    return apply


def cast(x: Any, kind: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Tile:
    """In another type, rounded to nearest even, or the same bits read as that type."""
    x = to_tensor(x)
    if "ptr" in kind.words:
        refuse("a cast to a pointer is not simulated; pass the tensor to the kernel")
    if isinstance(x, Pointer):
        return x.to(kind)
    if x.dtype is kind:
        return x
    if not bitcast:
        made = dtypes.converted(x.a, x.dtype, kind)
        return Tile(toward_zero(made, x.a, kind) if fp_downcast_rounding == "rtz" else made, kind)
    if x.dtype.primitive_bitwidth != kind.primitive_bitwidth:
        refuse(f"{described(x)} has not as many bits as {kind}")
    bits = dtypes.encode(x.a, x.dtype)
    return Tile(
        dtypes.decode(np.ascontiguousarray(bits).view(kind.stored).reshape(x.shape)[()], kind), kind
    )


class Tile:
    """An array of numbers of one type; of no dimension, a number."""

    __slots__ = ("a", "dtype", "layout")
    __hash__ = object.__hash__
    __add__, __radd__ = binary("+", operator.add)
    __sub__, __rsub__ = binary("-", operator.sub)
    __mul__, __rmul__ = binary("*", operator.mul)
    __lshift__, __rlshift__ = binary("<<", operator.lshift)
    __rshift__, __rrshift__ = binary(">>", operator.rshift)
    __and__, __rand__ = binary("&", operator.and_)
    __or__, __ror__ = binary("|", operator.or_)
    __xor__, __rxor__ = binary("^", operator.xor)
    __truediv__, __rtruediv__ = sides(divided, operator.truediv)
    __floordiv__, __rfloordiv__ = sides(floor_divided)
    __mod__, __rmod__ = sides(remainder)
    __eq__: Any = comparison(operator.eq)
    __ne__: Any = comparison(operator.ne)
    __lt__, __le__, __gt__, __ge__ = map(
        comparison, (operator.lt, operator.le, operator.gt, operator.ge)
    )

    def __init__(self, a: Any, kind: dtype) -> None:
        self.a, self.dtype = a, kind

    shape: Any = property(lambda self: self.a.shape)
    type: Any = property(lambda self: TileType(self.dtype, self.shape))
    numel: Any = property(lambda self: self.a.size)

    to = cast

    def __getitem__(self, index: Any) -> Tile:
        return Tile(expanded(self.a, index), self.dtype)

    def __bool__(self) -> bool:
        if self.a.size != 1:
            refuse("a tile has no truth; one number has: reduce it, or use tl.where")
        return bool(self.a.item())

    def __index__(self) -> int:
        if self.dtype.kind == 2 or self.a.size != 1:
            refuse(f"{described(self)} is no whole number")
        return int(self.a.item())

    def __int__(self) -> int:
        refuse("a number that is known at run time only is no Python number")

    __float__ = __iter__ = __len__ = __int__

    def __neg__(self) -> Tile:
        return self if self.dtype is int1 else Tile(-self.a, self.dtype)

    def __matmul__(self, other: Any) -> None:
        refuse("Triton has no @; tl.dot multiplies matrices")

    def __pos__(self) -> Tile:
        return self

    def __invert__(self) -> Tile:
        if self.dtype.kind == 2:
            refuse(f"~ needs integers, and this is {described(self)}")
        return Tile(~self.a, self.dtype)


OPERANDS = Tile, int, float, np.number, np.bool_


class TileType:
    """A Tile's type and shape, as Triton prints it."""

    def __init__(self, scalar: Any, shape: tuple[int, ...]) -> None:
        self.scalar = self.element_ty = scalar
        self.shape, self.layout = shape, None

    def is_block(self) -> bool:  # noqa: D102
        return bool(self.shape)

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        sizes = "".join(f"{n}, " for n in self.shape)
        return f"<[{sizes[:-2]}], {self.scalar}>" if sizes else str(self.scalar)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scalar, name)


@cache
def pointer_type(element: dtype) -> dtype:
    """The type of pointers to elements of a type."""
    made = dtype(f"pointer<{element}>", 64, np.int64, None)
    made.element_ty, made.words = element, {"ptr"}
    return made


class Pointer:
    """Where elements of a tensor in memory are: the tensor's memory, and how far from its begin."""

    __slots__ = ("memory", "offset", "element")

    def __init__(self, memory: Any, offset: Any, element: dtype) -> None:
        self.memory, self.offset, self.element = memory, offset, element

    shape = property(lambda self: self.offset.shape)
    type = property(lambda self: TileType(self.dtype, self.shape) if self.shape else self.dtype)
    numel = property(lambda self: self.offset.size)
    dtype: Any = property(lambda self: pointer_type(self.element))

    def __add__(self, offset: Any) -> Pointer:
        if type(offset) is Tile:
            if offset.dtype.kind == 2:
                refuse(f"an address needs whole numbers, and this is {described(offset)}")
            steps = offset.a.astype(np.int64)
        elif isinstance(offset, int):
            steps = np.int64(offset)
        else:
            refuse(f"{described(offset)} cannot be added to a pointer")
        return Pointer(self.memory, self.offset + steps, self.element)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, expanded(self.offset, index), self.element)

    def to(self, kind: Any, bitcast: bool = False) -> Tile:
        """The address as a number; 0 of an empty tensor."""
        if "ptr" in kind.words:
            return cast(Tile(np.int64(0), dtypes.int64), kind)
        if kind not in (dtypes.int64, dtypes.uint64):
            refuse(f"an address has 64 bits; {kind} cannot hold it")
        address = self.memory.address + self.offset * self.element.itemsize
        return Tile(np.asarray(address).astype(kind.np)[()], kind)

    def __bool__(self) -> bool:
        refuse("a pointer has no truth; compare its address: p.to(tl.int64) != 0")


def expanded(a: Any, index: Any) -> Any:
    """a[index] with an index of None and `:` only: a tile's elements have no numbers."""
    for one in index if isinstance(index, tuple) else (index,):
        if one is not None and one != slice(None):
            refuse("a tile can be indexed by None and `:` only; load a part of it, or reduce it")
    return a[index]


def described(x: Any) -> str:
    """What a value is, in words of a kernel's author."""
    if isinstance(x, Tile | Pointer):
        return f"a tile {x.type}" if x.shape else f"a number {x.dtype}"
    return f"{x!r}"


def check_known(n: Any, what: str) -> None:
    """Refuse what is no whole number that the compiler knows."""
    if not isinstance(n, int | np.integer) or isinstance(n, bool):
        refuse(
            f"{what} is {described(n)}; it has to be known when the kernel is compiled: a "
            "parameter or a name that is annotated with tl.constexpr, or a literal"
        )


def check_shape(shape: Any) -> tuple[int, ...]:
    """A shape of compile-time powers of two, given as one length, as several or as one sequence.

    Raises:
        CompileError: it has other lengths.
    """
    shape = (shape,) if isinstance(shape, int | Tile) else tuple(shape)
    return sizes_of(tuple(shape[0]) if shape and isinstance(shape[0], tuple | list) else shape)


@lru_cache(typed=True)
def sizes_of(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """See `check_shape`."""
    sizes = []
    for n in shape:
        check_known(n, "a size")
        if n < 1 or n & (n - 1):
            refuse(f"a size is {n}; Triton has tiles with powers of two only")
        sizes.append(int(n))
    if (numel := int(np.prod(sizes, dtype=np.int64))) > LARGEST:
        refuse(f"a tile of {numel} elements; Triton allows {LARGEST}")
    return tuple(sizes)


def type_of_number(x: Any) -> dtype:
    """The type that a Python number gets at run time."""
    if isinstance(x, bool | np.bool_):
        return int1
    if isinstance(x, int | np.integer):
        for kind in (dtypes.int32, dtypes.uint32, dtypes.int64, dtypes.uint64):
            if kind.lowest <= x <= kind.highest:
                return kind
        refuse(f"{x} has more than 64 bits")
    if isinstance(x, float):
        fits = x != x or x in (0.0, np.inf, -np.inf) or 2.0**-126 <= abs(x) <= 3.4028234663852886e38
        return float32 if fits else float64
    if isinstance(x, Tile):
        x.a  # noqa: B018 - of a product in flight, which says why it cannot be read
    raise CompileError(f"{described(x)} is no number")


def constant(x: Any, kind: dtype) -> Tile:
    """A Python number as one of a type."""
    if kind.round is not None:
        return Tile(kind.round(np.asarray(x, np.float32))[()], kind)
    return Tile(kind.np(x), kind)


def to_tensor(x: Any) -> Any:
    """A Python number as one at run time; tiles and pointers as they are."""
    return x if isinstance(x, Tile | Pointer) else constant(x, type_of_number(x))


def toward_zero(rounded: Any, exact: Any, kind: dtype) -> Any:
    """Of numbers that were rounded to the nearest, those that became larger, one step smaller."""
    if kind is bfloat16:
        bits = np.ascontiguousarray(exact, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).reshape(exact.shape)[()]
    larger = np.abs(np.float64(rounded)) > np.abs(np.float64(exact))
    return np.where(larger, np.nextafter(rounded, kind.np(0)), rounded)[()]


def promoted_integer(a: dtype, b: dtype) -> dtype:
    """The type of two integers: the wider; of one width, the unsigned."""
    if a.signed == b.signed:
        return a if a.primitive_bitwidth > b.primitive_bitwidth else b
    unsigned, signed = (b, a) if a.signed else (a, b)
    return unsigned if unsigned.primitive_bitwidth >= signed.primitive_bitwidth else signed


@cache
def promoted(a: dtype, b: dtype, divides: bool) -> dtype:
    """The type in which two tiles are computed."""
    if a is b and not divides:
        return a
    for wide in (float64, float32):
        if wide in (a, b):
            return wide
    if float16 in (a, b):
        return float32 if divides else float16
    if bfloat16 in (a, b):
        return float32
    if a.is_fp8() and b.is_fp8():
        return a if a is b else float16
    if a.kind == 2 or b.kind == 2:
        refuse(f"{a} and {b} have no common type; convert one with .to")
    if divides and a.signed != b.signed:
        refuse(f"{a} and {b} differ in their sign; convert one with .to")
    return promoted_integer(a, b)


def beside(x: Any, kind: dtype, divides: bool) -> dtype:
    """The type in which a tile of a type and a Python number are computed."""
    own = type_of_number(x)
    if own.kind <= kind.kind:
        common = float32 if divides and kind in (float16, bfloat16) else kind
    else:
        common = promoted(own, kind, divides)
    if common.kind < 2:
        if x < 0 and not common.signed:
            refuse(f"{x} beside an unsigned {common}; convert the tile with .to first")
        if not common.lowest <= x <= common.highest:
            refuse(f"{x} is out of the range of {common}; convert the tile with .to first")
    return common


def common(x: Any, y: Any, divides: bool = False) -> tuple[Any, Any, dtype]:
    """The arrays of two operands in the type in which they are computed, and that type."""
    if type(x) is not Tile or type(y) is not Tile:
        for one in (x, y):
            if isinstance(one, Pointer):
                refuse("a pointer can only be added to, or compared as p.to(tl.int64)")
            if not isinstance(one, OPERANDS):
                refuse(f"{described(one)} is no number")
        if type(x) is Tile:
            y = constant(y, beside(y, x.dtype, divides))
        elif type(y) is Tile:
            x = constant(x, beside(x, y.dtype, divides))
        else:
            x, y = to_tensor(x), to_tensor(y)
    kind = promoted(x.dtype, y.dtype, divides)
    a = x.a if x.dtype is kind else dtypes.converted(x.a, x.dtype, kind)
    b = y.a if y.dtype is kind else dtypes.converted(y.a, y.dtype, kind)
    if a.shape != b.shape:
        check_broadcast(a.shape, b.shape)
    return a, b, kind


def check_broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Refuse shapes that do not fit together."""
    if a != b:
        for m, n in zip(reversed(a), reversed(b)):
            if m != n and m != 1 and n != 1:
                refuse(f"shapes {list(a)} and {list(b)} do not fit together")


def rounded(a: Any, kind: dtype) -> Tile:
    """A result of NumPy as a Tile of a type."""
    if kind.round is not None:
        return Tile(kind.round(np.asarray(a, np.float32))[()], kind)
    return Tile(a if a.dtype == kind.np else a.astype(kind.np), kind)
