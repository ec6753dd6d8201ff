"""The functions of triton.language, on tiles. Triton's documentation says what they do."""

import builtins
import math as python_math
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from flash_versions.simulator import memory
from flash_versions.simulator.dtypes import (
    bfloat16,
    converted,
    dtype,
    float16,
    float32,
    float64,
    int1,
    int8,
    int32,
    int64,
    uint32,
    uint64,
)
from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.loops import RunTimeRange
from flash_versions.simulator.state import here
from flash_versions.simulator.values import (
    Pointer,
    PointerType,
    Tile,
    cast,
    check_broadcast,
    check_shape,
    common,
    constant,
    described,
    rounded,
    to_tensor,
)

MIN_DOT = 16  # of the size that is summed over; 32 of 8 bits
PropagateNan = SimpleNamespace(NONE=0, ALL=0xFFFF)


# ------------------------------------------------------------------------------ programs and shapes
def place(of_grid: bool) -> Callable[[int], Tile]:
    """tl.num_programs or tl.program_id."""

    def apply(axis: int) -> Tile:
        if axis not in (0, 1, 2):
            raise CompileError(f"a grid has the axes 0, 1 and 2, and not {described(axis)}")
        program = here.program
        return Tile(np.int32((program.grid if of_grid else program.ids)[axis]), int32)

    return apply


program_id, num_programs = place(of_grid=False), place(of_grid=True)


def sizes(shape: tuple) -> Sequence[Any]:
    """A shape that may come as one argument or as several."""
    return shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape


def arange(start: int, end: int, layout: Any = None) -> Tile:
    for one in (start, end):
        if not isinstance(one, int):
            raise CompileError(
                f"tl.arange needs numbers that are known when the kernel is compiled, and this is "
                f"{described(one)}; annotate it with tl.constexpr"
            )
    if end <= start:
        raise CompileError(f"tl.arange({start}, {end}) is empty")
    check_shape((end - start,))
    return Tile(np.arange(start, end, dtype=np.int32), int32)


def full(shape: Any, value: Any, dtype: dtype, layout: Any = None) -> Tile:  # noqa: A002
    shape = check_shape(shape)
    if isinstance(value, Tile) and value.shape:
        raise CompileError(f"tl.full takes one number, and this is {described(value)}")
    if isinstance(value, float) and dtype.kind < 2:
        raise CompileError(f"tl.full of {dtype} takes a whole number, and this is {value}")
    one = cast(value, dtype) if isinstance(value, Tile) else constant(value, dtype)
    return Tile(np.full(shape, one.a)[()], dtype)


def zeros(shape: Any, dtype: dtype, layout: Any = None) -> Tile:
    return Tile(np.zeros(check_shape(shape), dtype.np)[()], dtype)


def zeros_like(input: Tile) -> Tile:
    return zeros(input.shape, input.dtype)


def rewrapped(x: Any, a: Any) -> Any:
    """Other elements of the kind of a tile or of a tile of pointers."""
    return Pointer(x.memory, a, x.element) if isinstance(x, Pointer) else Tile(a, x.dtype)


def elements(x: Any) -> Any:
    """The array of a tile, or of the offsets of pointers."""
    return x.offset if isinstance(x, Pointer) else to_tensor(x).a


def broadcast_to(input: Any, *shape: Any) -> Any:
    shape = check_shape(sizes(shape))
    check_broadcast(elements(input).shape, shape)
    input = to_tensor(input)
    return rewrapped(input, np.broadcast_to(elements(input), shape))


def broadcast(input: Any, other: Any) -> tuple:
    check_broadcast(input.shape, other.shape)
    shape = np.broadcast_shapes(input.shape, other.shape)
    return broadcast_to(input, shape), broadcast_to(other, shape)


def reshape(input: Any, *shape: Any, can_reorder: bool = False) -> Any:
    shape = check_shape(sizes(shape))
    if input.numel != python_math.prod(shape):
        raise CompileError(
            f"{described(input)} has {input.numel} elements, and {list(shape)} has not"
        )
    return rewrapped(input, elements(input).reshape(shape))


view = reshape


def ravel(x: Any, can_reorder: bool = False) -> Any:
    return reshape(x, (x.numel,))


def permute(input: Any, *dims: Any) -> Any:
    dims = tuple(int(i) for i in sizes(dims))
    if sorted(d % builtins.max(1, len(input.shape)) for d in dims) != list(
        range_(len(input.shape))
    ):
        raise CompileError(
            f"{described(input)} has {len(input.shape)} axes, and not those of {dims}"
        )
    return rewrapped(input, np.transpose(elements(input), dims))


def trans(input: Any, *dims: Any) -> Any:
    rank = len(input.shape)
    if not dims and rank < 2:
        raise CompileError(f"{described(input)} has no two axes to exchange")
    return permute(input, *(dims or (*range_(rank - 2), rank - 1, rank - 2)))


def axis_of(axis: Any, rank: int) -> int:
    """An axis that may count from the end."""
    if not -rank <= axis < rank:
        raise CompileError(f"there is no axis {axis}: the tile has {rank}")
    return axis % rank


def expand_dims(input: Any, axis: Any) -> Any:
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    return rewrapped(to_tensor(input), np.expand_dims(elements(input), tuple(axes)))


def squeeze(x: Any, dim: int) -> Any:
    return rewrapped(x, np.squeeze(elements(x), dim))


unsqueeze = expand_dims


def join(a: Any, b: Any) -> Any:
    a, b = broadcast(to_tensor(a), to_tensor(b)) if a.shape or b.shape else (a, b)
    if a.dtype is not b.dtype:
        raise CompileError(f"{described(a)} and {described(b)} differ in their type")
    return rewrapped(a, np.stack((elements(a), elements(b)), -1))


def split(a: Any) -> tuple:
    if not a.shape or a.shape[-1] != 2:
        raise CompileError(f"{described(a)} cannot be split: its last axis has to have 2 elements")
    return rewrapped(a, elements(a)[..., 0]), rewrapped(a, elements(a)[..., 1])


def interleave(a: Any, b: Any) -> Any:
    c = join(a, b)
    return c if len(c.shape) == 1 else reshape(c, (*c.shape[:-2], 2 * c.shape[-2]))


def cat(input: Tile, other: Tile, can_reorder: bool = False, dim: int = 0) -> Tile:
    if not can_reorder and dim is None:
        raise CompileError("tl.cat needs can_reorder=True")
    return Tile(np.concatenate((input.a, other.a), dim), input.dtype)


def flip(x: Tile, dim: Any = None) -> Tile:
    return Tile(np.flip(x.a, -1 if dim is None else dim), x.dtype)


def gather(src: Tile, index: Tile, axis: int) -> Tile:
    return Tile(np.take_along_axis(src.a, index.a.astype(np.int64), axis), src.dtype)


def histogram(input: Tile, num_bins: int, mask: Any = None) -> Tile:
    values = input.a if mask is None else input.a[np.broadcast_to(mask.a, input.shape)]
    return Tile(
        np.bincount(values.reshape(-1), minlength=num_bins)[:num_bins].astype(np.int32), int32
    )


def swizzle2d(i: Tile, j: Tile, size_i: Any, size_j: Any, size_g: Any) -> tuple:
    ij = i * size_j + j
    first = ij // (size_g * size_j) * size_g
    rows, ij = minimum(size_i - first, size_g), ij % (size_g * size_j)
    return first + ij % rows, ij // rows


def item(input: Tile) -> Tile:
    return Tile(input.a.reshape(-1)[0], input.dtype)


# ------------------------------------------------------------------------------------------ numbers
def elementwise(compute: Callable, kinds: tuple = (float32, float64)) -> Callable[[Any], Tile]:
    """A function of one number, defined of these types."""

    def apply(x: Any) -> Tile:
        x = to_tensor(x)
        if x.dtype not in kinds:
            raise CompileError(
                f"this function takes {' and '.join(map(str, kinds))}, and this is {described(x)}; "
                "convert it with .to(tl.float32)"
            )
        return rounded(compute(x.a), x.dtype)

    return apply


exp, exp2, log, log2 = map(elementwise, (np.exp, np.exp2, np.log, np.log2))
sin, cos, sqrt, floor, ceil = map(elementwise, (np.sin, np.cos, np.sqrt, np.floor, np.ceil))
sqrt_rn = elementwise(np.sqrt, (float32,))
rsqrt = elementwise(lambda a: 1 / np.sqrt(a))
erf = elementwise(np.vectorize(python_math.erf))
rint = elementwise(np.rint)


def abs(x: Any) -> Tile:  # noqa: A001
    x = to_tensor(x)
    return x if np.dtype(x.dtype.np).kind in "ub" else Tile(np.abs(x.a), x.dtype)


def sigmoid(x: Any) -> Tile:
    return 1 / (1 + exp(-x))


def softmax(x: Tile, dim: Any = None, keep_dims: bool = False, ieee_rounding: bool = False) -> Tile:
    dim = 0 if dim is None else dim
    number = exp(x - max(x, dim, keep_dims=True))
    return number / sum(number, dim, keep_dims=True)


def fma(x: Any, y: Any, z: Any) -> Tile:
    a, b, kind = common(x, y)
    # fp64 holds the product of smaller numbers exactly: one rounding is left, nearly always.
    return cast(Tile(np.float64(a) * b + cast(z, kind).a, float64), kind)


def fdiv(x: Any, y: Any, ieee_rounding: bool = False) -> Tile:
    a, b, kind = common(x, y)
    return rounded(np.true_divide(a, b), kind)


def div_rn(x: Any, y: Any) -> Tile:
    return fdiv(x, y)


def umulhi(x: Any, y: Any) -> Tile:
    a, b, kind = common(x, y)
    if kind.primitive_bitwidth == 32:
        high = np.uint64(a.astype(np.uint32)) * b.astype(np.uint32) >> np.uint64(32)
        return Tile(high.astype(kind.np), kind)
    exact = np.asarray(a, np.uint64).astype(object) * np.asarray(b, np.uint64).astype(object) >> 64
    return Tile(np.asarray(exact).astype(np.uint64).astype(kind.np)[()], kind)


def cdiv(x: Any, div: Any) -> Any:
    return (x + (div - 1)) // div


def written_out(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """An operator as a function."""
    return lambda x, y, sanitize_overflow=True: operation(to_tensor(x), y)


add, sub, mul = map(written_out, (operator.add, operator.sub, operator.mul))


def larger(without_nan: Callable, with_nan: Callable) -> Callable[..., Tile]:
    """Of two numbers the larger, or the smaller."""

    def apply(x: Any, y: Any, propagate_nan: Any = 0) -> Tile:
        a, b, kind = common(x, y)
        return rounded((with_nan if propagate_nan else without_nan)(a, b), kind)

    return apply


maximum, minimum = larger(np.fmax, np.maximum), larger(np.fmin, np.minimum)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = 0) -> Tile:  # noqa: A002
    if to_tensor(x).dtype.kind < 2:
        raise CompileError("tl.clamp takes floating-point numbers; use tl.minimum and tl.maximum")
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def where(condition: Any, x: Any, y: Any) -> Any:
    condition = to_tensor(condition)
    chosen = condition.a if condition.dtype is int1 else condition.a != 0
    if isinstance(x, Pointer) and isinstance(y, Pointer):
        if x.element is not y.element:
            raise CompileError(f"{described(x)} and {described(y)} differ in their type")
        if not condition.shape:
            return x if chosen else y
        if x.memory.data is not y.memory.data:
            raise CompileError("tl.where of pointers into two tensors is not simulated")
        return Pointer(x.memory, np.where(chosen, x.offset, y.offset)[()], x.element)
    a, b, kind = common(x, y)
    try:
        return Tile(np.where(chosen, a, b)[()], kind)
    except ValueError:
        check_broadcast(chosen.shape, np.broadcast_shapes(a.shape, b.shape))
        raise


def logical(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`and` or `or` of tiles."""
    return lambda x, y: operation(cast(x, int1), cast(y, int1))


logical_and, logical_or = logical(operator.and_), logical(operator.or_)


# --------------------------------------------------------------------------------------- reductions
def widened(x: Tile) -> Tile:
    """At least 32 bits, as sums of integers and all maxima have."""
    if x.dtype.primitive_bitwidth >= 32:
        return x
    if x.dtype.kind == 2:
        return cast(x, float32)
    return cast(x, int32)


def reduced(compute: Callable, x: Tile, axis: Any, keep_dims: bool) -> Tile:
    """One of NumPy's reductions along an axis, or of all elements."""
    if not isinstance(x, Tile) or not x.shape:
        raise CompileError(f"{described(x)} has no axis to reduce")
    axis = None if axis is None else axis_of(axis, len(x.shape))
    return rounded(compute(x.a, axis=axis, keepdims=keep_dims), x.dtype)


def sum(  # noqa: A001
    input: Tile, axis: Any = None, keep_dims: bool = False, dtype: Any = None
) -> Tile:
    if dtype is not None:
        input = cast(input, dtype)
    elif input.dtype.kind < 2 and input.dtype.primitive_bitwidth < 32:
        input = cast(input, int32 if input.dtype.signed else uint32)
    return reduced(np.add.reduce, input, axis, keep_dims)


def extreme(value: Callable, index: Callable) -> Callable[..., Any]:
    """tl.max or tl.min."""

    def apply(
        input: Tile,
        axis: Any = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
    ) -> Any:
        if return_indices:
            input = cast(input, float32) if input.dtype is bfloat16 else input
            where = reduced(index, input, axis, keep_dims)
            return reduced(value, input, axis, keep_dims), Tile(where.a.astype(np.int32), int32)
        return reduced(value, widened(input), axis, keep_dims)

    return apply


max, min = extreme(np.fmax.reduce, np.argmax), extreme(np.fmin.reduce, np.argmin)  # noqa: A001


def index_of(compute: Callable) -> Callable[..., Tile]:
    """tl.argmax or tl.argmin."""

    def apply(input: Tile, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Tile:
        return Tile(reduced(compute, input, axis, keep_dims).a.astype(np.int32), int32)

    return apply


def of_bits(compute: Callable) -> Callable[..., Tile]:
    """tl.xor_sum or tl.reduce_or."""
    return lambda input, axis=None, keep_dims=False: reduced(compute, input, axis, keep_dims)


argmax, argmin = index_of(np.argmax), index_of(np.argmin)
xor_sum, reduce_or = of_bits(np.bitwise_xor.reduce), of_bits(np.bitwise_or.reduce)


def folded(input: Any, axis: int, combine: Callable) -> list[tuple]:
    """The results of a combine function, after each element along an axis."""
    given = input if isinstance(input, tuple) else (input,)
    steps: list[tuple] = []
    for i in range_(given[0].shape[axis]):
        own = tuple(Tile(np.take(x.a, i, axis), x.dtype) for x in given)
        if steps:
            made = combine(*steps[-1], *own)
            made = made if isinstance(made, tuple) else (made,)
            own = tuple(cast(new, old.dtype) for new, old in zip(made, own))
        steps.append(own)
    return steps


def reduce(input: Any, axis: Any, combine_fn: Callable, keep_dims: bool = False) -> Any:
    first = input[0] if isinstance(input, tuple) else input
    if axis is None:
        input = tuple(map(ravel, input)) if isinstance(input, tuple) else ravel(input)
    at = 0 if axis is None else axis_of(axis, len(first.shape))
    last = folded(input, at, combine_fn)[-1]
    if keep_dims:
        axes = tuple(range_(len(first.shape))) if axis is None else at
        last = tuple(Tile(np.expand_dims(x.a, axes), x.dtype) for x in last)
    return last if isinstance(input, tuple) else last[0]


def turned(x: Tile, axis: int, reverse: bool) -> Tile:
    """A tile, or its elements in reverse order."""
    return flip(x, axis) if reverse else x


def associative_scan(input: Any, axis: int, combine_fn: Callable, reverse: bool = False) -> Any:
    given = input if isinstance(input, tuple) else (input,)
    axis = axis_of(axis, len(given[0].shape))
    steps = folded(tuple(turned(x, axis, reverse) for x in given), axis, combine_fn)
    stacked = [Tile(np.stack([x[i].a for x in steps], axis), y.dtype) for i, y in enumerate(given)]
    made = tuple(turned(x, axis, reverse) for x in stacked)
    return made if isinstance(input, tuple) else made[0]


def scanned(compute: Callable) -> Callable[..., Tile]:
    """tl.cumsum or tl.cumprod."""

    def apply(input: Tile, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Tile:
        if dtype is not None:
            input = cast(input, dtype)
        elif input.dtype is bfloat16 or (compute is np.cumsum and input.dtype.kind < 2):
            input = widened(input)
        axis = axis_of(axis, len(input.shape))
        made = compute(turned(input, axis, reverse).a, axis=axis, dtype=input.dtype.np)
        return turned(Tile(made, input.dtype), axis, reverse)

    return apply


cumsum, cumprod = scanned(np.cumsum), scanned(np.cumprod)


def sort(x: Tile, dim: Any = None, descending: bool = False) -> Tile:
    if dim not in (None, -1, len(x.shape) - 1):
        raise CompileError("only the last axis can be sorted")
    made = np.sort(x.a, -1)
    return Tile(np.flip(made, -1) if descending else made, x.dtype)


def topk(x: Tile, k: int, dim: Any = None) -> Tile:
    return Tile(sort(x, dim, descending=True).a[..., : check_shape((k,))[0]], x.dtype)


# ----------------------------------------------------------------------------------------- products
def dot(
    input: Tile,
    other: Tile,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: dtype = float32,
) -> Tile:
    for x in (input, other):
        if not isinstance(x, Tile) or len(x.shape) not in (2, 3):
            raise CompileError(f"tl.dot takes tiles of 2 or 3 axes, and this is {described(x)}")
    a, b = input.dtype, other.dtype
    if a is not b and not (a.is_fp8() and b.is_fp8()):
        raise CompileError(f"tl.dot of {a} and {b}: both operands need one type; convert with .to")
    if a.kind < 2 and a is not int8 or out_dtype is bfloat16:
        raise CompileError(f"tl.dot of {a} to {out_dtype} is not defined")
    K = input.shape[-1]
    if other.shape[-2] != K or input.shape[:-2] != other.shape[:-2]:
        raise CompileError(
            f"shapes {list(input.shape)} and {list(other.shape)} cannot be multiplied"
        )
    least = 32 if a.primitive_bitwidth == 8 else MIN_DOT
    if least > K:
        raise CompileError(f"tl.dot sums over K = {K}; with {a} K has to be at least {least}")
    kind = {int8: int32, float64: float64, float16: out_dtype}.get(
        a, out_dtype if a.is_fp8() else float32
    )
    wide = {int32: int32, float64: float64}.get(kind, float32)
    product = np.matmul(converted(input.a, a, wide), converted(other.a, b, wide))
    if acc is not None:
        if acc.dtype is not kind or acc.shape != product.shape:
            raise CompileError(
                f"tl.dot makes {list(product.shape)} of {kind}, and acc is {described(acc)}"
            )
        product = product + acc.a
    return rounded(product, kind)


# --------------------------------------------------------------------------------- random numbers
def philox_impl(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: int = 10) -> tuple:
    wide = c0.dtype is uint64
    a, b = (0xD2E7470EE14C6C93, 0xCA5A826395121157) if wide else (0xD2511F53, 0xCD9E8D57)
    raise_a = 0x9E3779B97F4A7C15 if wide else 0x9E3779B9
    raise_b = 0xBB67AE8584CAA73B if wide else 0xBB67AE85
    for _ in range_(n_rounds):
        c0, c1, c2, c3 = umulhi(b, c2) ^ c1 ^ k0, c2 * b, umulhi(a, c0) ^ c3 ^ k1, c0 * a
        k0, k1 = k0 + raise_a, k1 + raise_b
    return c0, c1, c2, c3


def philox(seed: Any, c0: Any, c1: Any, c2: Any, c3: Any, n_rounds: int = 10) -> tuple:
    seed = cast(seed, uint64)
    counters = [to_tensor(x) for x in (c0, c1, c2, c3)]
    if counters[0].dtype.primitive_bitwidth == 32:
        kind, low, high = uint32, cast(seed & 0xFFFFFFFF, uint32), cast(seed >> 32, uint32)
    else:
        kind, low, high = uint64, seed, full((1,), 0, uint64)
    c0, c1, c2, c3 = (cast(x, kind, bitcast=True) for x in counters)
    return philox_impl(c0, c1, c2, c3, low, high, n_rounds)


def randint4x(seed: Any, offset: Any, n_rounds: int = 10) -> tuple:
    low = cast(offset, uint32)
    none = low * 0
    high = cast(offset >> 32, uint32) if offset.dtype.primitive_bitwidth > 32 else none
    return philox(seed, low, high, none, none, n_rounds)


def first_of(four: Callable[..., tuple]) -> Callable[..., Tile]:
    """One number of four."""
    return lambda seed, offset, n_rounds=10: four(seed, offset, n_rounds)[0]


def uint_to_uniform_float(x: Tile) -> Tile:
    wide = x.dtype.primitive_bitwidth == 64
    x = cast(x, int64 if wide else int32, bitcast=True)
    scale = Tile(np.float32(1.0842020432385337e-19 if wide else 4.6566127342e-10), float32)
    return where(x < 0, -x - 1, x) * scale


def rand4x(seed: Any, offsets: Any, n_rounds: int = 10) -> tuple:
    return tuple(map(uint_to_uniform_float, randint4x(seed, offsets, n_rounds)))


def pair_uniform_to_normal(u1: Tile, u2: Tile) -> tuple:
    u1 = maximum(1.0e-7, u1)
    angle, radius = 6.283185307179586 * u2, sqrt(-2.0 * log(u1))
    return radius * cos(angle), radius * sin(angle)


def randn4x(seed: Any, offset: Any, n_rounds: int = 10) -> tuple:
    u1, u2, u3, u4 = rand4x(seed, offset, n_rounds)
    return (*pair_uniform_to_normal(u1, u2), *pair_uniform_to_normal(u3, u4))


randint, rand, randn = map(first_of, (randint4x, rand4x, randn4x))


# ------------------------------------------------------------------------ what the compiler is told
def unchanged(input: Any, *values: Any) -> Any:
    """What only tells the compiler something."""
    return input


def nothing(*arguments: Any, **named: Any) -> None:
    """What only the compiler or the hardware does something about."""


def static_assert(cond: Any, msg: str = "") -> None:
    if isinstance(cond, Tile):
        raise CompileError("static_assert needs what is known when the kernel is compiled")
    if not cond:
        raise CompileError(f"static_assert failed{': ' if msg else ''}{msg}")


def device_assert(cond: Any, msg: str = "", mask: Any = None) -> None:
    if here.dry:
        return
    holds = to_tensor(cond).a if mask is None else to_tensor(cond).a | ~to_tensor(mask).a
    if not np.all(holds):
        raise AssertionError(msg or "device_assert failed")


def device_print(prefix: str, *args: Any, hex: bool = False) -> None:  # noqa: A002
    if not isinstance(prefix, str):
        raise CompileError("the first argument of a print is a text")
    if here.dry:
        return
    values = [x.a if isinstance(x, Tile) else x for x in args]
    print(f"program {here.program.ids}: {prefix}", *values)  # noqa: T201


def static_print(*values: Any, **options: Any) -> None:
    print(*values)  # noqa: T201


def builtin_extreme(of_numbers: Callable, of_tiles: Callable) -> Callable[..., Any]:
    """min and max as a kernel finds them without `tl.`."""

    def apply(*values: Any) -> Any:
        if not any(isinstance(x, Tile) for x in values):
            return of_numbers(*values)
        made = values[0]
        for x in values[1:]:
            made = of_tiles(made, x)
        return made

    return apply


range_, range = builtins.range, RunTimeRange  # noqa: A001
pointer_type = PointerType
load, store = memory.load, memory.store
atomic_add, atomic_cas, atomic_xchg = memory.atomic_add, memory.atomic_cas, memory.atomic_xchg
atomic_max, atomic_min = memory.atomic_max, memory.atomic_min
atomic_and, atomic_or, atomic_xor = memory.atomic_and, memory.atomic_or, memory.atomic_xor
make_tensor_descriptor, make_block_ptr = memory.make_tensor_descriptor, memory.make_block_ptr
advance = memory.advance
multiple_of = max_contiguous = max_constancy = unchanged
debug_barrier = assume = nothing
load_tensor_descriptor, store_tensor_descriptor = (
    lambda desc, offsets: desc.load(offsets),
    lambda desc, offsets, value: desc.store(offsets, value),
)

# What a tile has as methods, too.
METHODS = (
    abs, argmax, argmin, atomic_add, atomic_and, atomic_cas, atomic_max, atomic_min, atomic_or,
    atomic_xchg, atomic_xor, associative_scan, broadcast_to, cdiv, ceil, cos, cumprod, cumsum, erf,
    exp, exp2, expand_dims, flip, floor, gather, histogram, item, log, log2, logical_and,
    logical_or, max, min, permute, ravel, reduce, reduce_or, reshape, rsqrt, sigmoid, sin, softmax,
    sort, split, sqrt, sqrt_rn, store, sum, trans, view, xor_sum,
)  # fmt: skip


def as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a method of its first argument; not each is a function of Python."""
    return lambda self, *more, **named: function(self, *more, **named)


for _name, _function in list(globals().items()):
    if any(_function is x for x in METHODS):
        for _class in (Tile, Pointer):
            setattr(_class, _name, as_method(_function))
Tile.T = Pointer.T = property(trans)  # type: ignore[attr-defined]
