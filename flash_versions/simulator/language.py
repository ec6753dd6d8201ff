"""The functions of triton.language, on tiles. Triton's documentation says what they do."""

import builtins
import functools
import math as python_math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from flash_versions.simulator import dtypes, floats, memory
from flash_versions.simulator.dtypes import bfloat16, dtype, float32, float64, int1, int32, uint32
from flash_versions.simulator.errors import refuse
from flash_versions.simulator.loops import RunTimeRange, static_range
from flash_versions.simulator.state import here
from flash_versions.simulator.values import (
    Pointer,
    Tile,
    cast,
    check_broadcast,
    check_known,
    check_shape,
    common,
    constant,
    described,
    pointer_type,
    rounded,
    to_tensor,
)

MIN_DOT = 16  # of the size that is summed over; 32 of 8 bits
PropagateNan = SimpleNamespace(NONE=0, ALL=0xFFFF)
Compute = Callable[..., Any]
range_, range = builtins.range, RunTimeRange  # noqa: A001


# ------------------------------------------------------------------------------ programs and shapes
def place(axis: Any, of_grid: bool) -> Tile:
    """tl.num_programs or tl.program_id."""
    if axis not in (0, 1, 2):
        refuse(f"a grid has the axes 0, 1 and 2, and not {described(axis)}")
    numbers = here.program.grid if of_grid else here.program.ids
    return Tile(np.int32(numbers[axis]), int32)


def arange(start: int, end: int, layout: Any = None) -> Tile:
    for one in (start, end):
        check_known(one, "a bound of tl.arange")
    if end <= start:
        refuse(f"tl.arange({start}, {end}) is empty")
    check_shape((end - start,))
    return Tile(np.arange(start, end, dtype=np.int32), int32)


def full(shape: Any, value: Any, dtype: dtype, layout: Any = None) -> Tile:  # noqa: A002
    shape = check_shape(shape)
    if isinstance(value, Tile) and value.shape:
        refuse(f"tl.full takes one number, and this is {described(value)}")
    if isinstance(value, float) and dtype.kind < 2:
        refuse(f"tl.full of {dtype} takes a whole number, and this is {value}")
    one = cast(value, dtype) if isinstance(value, Tile) else constant(value, dtype)
    return Tile(np.full(shape, one.a)[()], dtype)


def zeros(shape: Any, dtype: dtype, layout: Any = None) -> Tile:
    return Tile(np.zeros(check_shape(shape), dtype.np)[()], dtype)


def moved(x: Any, change: Compute, *arguments: Any) -> Any:
    """A tile or pointers whose elements NumPy puts into another order or shape."""
    x = to_tensor(x)
    if isinstance(x, Pointer):
        return Pointer(x.memory, change(x.offset, *arguments), x.element)
    return Tile(change(x.a, *arguments), x.dtype)


def broadcast_to(input: Any, *shape: Any) -> Any:
    shape = check_shape(shape)
    check_broadcast(to_tensor(input).shape, shape)
    return moved(input, np.broadcast_to, shape)


def broadcast(input: Any, other: Any) -> tuple:
    check_broadcast(input.shape, other.shape)
    shape = np.broadcast_shapes(input.shape, other.shape)
    return broadcast_to(input, shape), broadcast_to(other, shape)


def reshape(input: Any, *shape: Any, can_reorder: bool = False) -> Any:
    shape = check_shape(shape)
    if input.numel != python_math.prod(shape):
        refuse(f"{described(input)} has {input.numel} elements, and {list(shape)} has not")
    return moved(input, np.reshape, shape)


def permute(input: Any, *dims: Any) -> Any:
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    dims, rank = tuple(int(i) for i in given), len(input.shape)
    if sorted(d % builtins.max(1, rank) for d in dims) != [*range_(rank)]:
        refuse(f"{described(input)} has {rank} axes, and not those of {dims}")
    return moved(input, np.transpose, dims)


def trans(input: Any, *dims: Any) -> Any:
    rank = len(input.shape)
    if not dims and rank < 2:
        refuse(f"{described(input)} has no two axes to exchange")
    return permute(input, *(dims or (*range_(rank - 2), rank - 1, rank - 2)))


def axis_of(axis: Any, x: Any) -> int:
    """An axis of a tile; it may count from the end."""
    rank = len(x.shape)
    if not -rank <= axis < rank:
        refuse(f"there is no axis {axis}: the tile has {rank}")
    return axis % rank


def expand_dims(input: Any, axis: Any) -> Any:
    return moved(input, np.expand_dims, tuple(axis) if isinstance(axis, tuple | list) else (axis,))


def join(a: Any, b: Any) -> Any:
    a, b = broadcast(to_tensor(a), to_tensor(b)) if a.shape or b.shape else (a, b)
    if a.dtype is not b.dtype:
        refuse(f"{described(a)} and {described(b)} differ in their type")
    return Tile(np.stack((a.a, b.a), -1), a.dtype)


def split(a: Any) -> tuple:
    if not a.shape or a.shape[-1] != 2:
        refuse(f"{described(a)} cannot be split: its last axis has to have 2 elements")
    return moved(a, lambda x: x[..., 0]), moved(a, lambda x: x[..., 1])


def interleave(a: Any, b: Any) -> Any:
    c = join(a, b)
    return c if len(c.shape) == 1 else reshape(c, (*c.shape[:-2], 2 * c.shape[-2]))


def cat(input: Tile, other: Tile, can_reorder: bool = False, dim: int = 0) -> Tile:
    return Tile(np.concatenate((input.a, other.a), dim), input.dtype)


def histogram(input: Tile, num_bins: int, mask: Any = None) -> Tile:
    values = input.a if mask is None else input.a[np.broadcast_to(mask.a, input.shape)]
    counts = np.bincount(values.reshape(-1), minlength=num_bins)
    return Tile(counts[:num_bins].astype(np.int32), int32)


def swizzle2d(i: Tile, j: Tile, size_i: Any, size_j: Any, size_g: Any) -> tuple:
    ij = i * size_j + j
    first = ij // (size_g * size_j) * size_g
    rows, ij = minimum(size_i - first, size_g), ij % (size_g * size_j)
    return first + ij % rows, ij // rows


# ------------------------------------------------------------------------------------------ numbers
def elementwise(compute: Compute, kinds: tuple = (float32, float64)) -> Compute:
    """A function of one number, defined of these types."""

    def apply(x: Any) -> Tile:
        x = to_tensor(x)
        if x.dtype not in kinds:
            refuse(
                f"this function takes {' and '.join(map(str, kinds))}, and this is {described(x)}; "
                "convert it with .to(tl.float32)"
            )
        return rounded(compute(x.a), x.dtype)

    return apply


exp, exp2, log, log2 = map(elementwise, (np.exp, np.exp2, np.log, np.log2))
sin, cos, sqrt, floor, ceil = map(elementwise, (np.sin, np.cos, np.sqrt, np.floor, np.ceil))


def abs(x: Any) -> Tile:  # noqa: A001
    x = to_tensor(x)
    return x if np.dtype(x.dtype.np).kind in "ub" else Tile(np.abs(x.a), x.dtype)


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


def umulhi(x: Any, y: Any) -> Tile:
    a, b, kind = common(x, y)
    if kind.primitive_bitwidth == 32:
        high = np.uint64(a.astype(np.uint32)) * b.astype(np.uint32) >> np.uint64(32)
        return Tile(high.astype(kind.np), kind)
    exact = np.asarray(a, np.uint64).astype(object) * np.asarray(b, np.uint64).astype(object) >> 64
    return Tile(np.asarray(exact).astype(np.uint64).astype(kind.np)[()], kind)


def larger(without_nan: Compute, with_nan: Compute) -> Callable[..., Tile]:
    """Of two numbers the larger, or the smaller."""

    def apply(x: Any, y: Any, propagate_nan: Any = 0) -> Tile:
        a, b, kind = common(x, y)
        return rounded((with_nan if propagate_nan else without_nan)(a, b), kind)

    return apply


maximum, minimum = larger(np.fmax, np.maximum), larger(np.fmin, np.minimum)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = 0) -> Tile:  # noqa: A002
    if to_tensor(x).dtype.kind < 2:
        refuse("tl.clamp takes floating-point numbers; use tl.minimum and tl.maximum")
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def where(condition: Any, x: Any, y: Any) -> Any:
    condition = to_tensor(condition)
    chosen = condition.a if condition.dtype is int1 else condition.a != 0
    if isinstance(x, Pointer) and isinstance(y, Pointer):
        if x.element is not y.element:
            refuse(f"{described(x)} and {described(y)} differ in their type")
        if not condition.shape:
            return x if chosen else y
        if x.memory.data is not y.memory.data:
            refuse("tl.where of pointers into two tensors is not simulated")
        return Pointer(x.memory, np.where(chosen, x.offset, y.offset)[()], x.element)
    a, b, kind = common(x, y)
    try:
        return Tile(np.where(chosen, a, b)[()], kind)
    except ValueError:
        check_broadcast(chosen.shape, np.broadcast_shapes(a.shape, b.shape))
        raise


# --------------------------------------------------------------------------------------- reductions
def widened(x: Tile) -> Tile:
    """At least 32 bits, as sums of integers and all maxima have."""
    if x.dtype.primitive_bitwidth >= 32:
        return x
    return cast(x, float32 if x.dtype.kind == 2 else int32)


def reduced(compute: Compute, x: Tile, axis: Any, keep_dims: bool, kind: Any = None) -> Tile:
    """One of NumPy's reductions along an axis, or of all elements."""
    if not isinstance(x, Tile) or not x.shape:
        refuse(f"{described(x)} has no axis to reduce")
    axis = None if axis is None else axis_of(axis, x)
    return rounded(compute(x.a, axis=axis, keepdims=keep_dims), kind or x.dtype)


def sum(  # noqa: A001
    input: Tile, axis: Any = None, keep_dims: bool = False, dtype: Any = None
) -> Tile:
    if dtype is not None:
        input = cast(input, dtype)
    elif input.dtype.kind < 2 and input.dtype.primitive_bitwidth < 32:
        input = cast(input, int32 if input.dtype.signed else uint32)
    return reduced(np.add.reduce, input, axis, keep_dims)


def extreme(value: Compute, index: Compute) -> Compute:
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
            where = reduced(index, input, axis, keep_dims, int32)
            return reduced(value, input, axis, keep_dims), where
        return reduced(value, widened(input), axis, keep_dims)

    return apply


max, min = extreme(np.fmax.reduce, np.argmax), extreme(np.fmin.reduce, np.argmin)  # noqa: A001


def index_of(compute: Compute) -> Compute:
    """tl.argmax or tl.argmin."""
    return lambda input, axis, tie_break_left=True, keep_dims=False: reduced(
        compute, input, axis, keep_dims, int32
    )


def of_bits(compute: Compute) -> Compute:
    """tl.xor_sum or tl.reduce_or."""
    return lambda input, axis=None, keep_dims=False: reduced(compute, input, axis, keep_dims)


def in_tuple(x: Any) -> tuple:
    """One or several tiles, as several."""
    return x if isinstance(x, tuple) else (x,)


def folded(given: tuple, axis: int, combine: Compute) -> list[tuple]:
    """The results of a combine function, after each element along an axis."""
    steps: list[tuple] = []
    for i in range_(given[0].shape[axis]):
        own = tuple(Tile(np.take(x.a, i, axis), x.dtype) for x in given)
        if steps:
            made = in_tuple(combine(*steps[-1], *own))
            own = tuple(cast(new, old.dtype) for new, old in zip(made, own))
        steps.append(own)
    return steps


def reduce(input: Any, axis: Any, combine_fn: Compute, keep_dims: bool = False) -> Any:
    given = in_tuple(input)
    axes = [*range_(len(given[0].shape))] if axis is None else [axis_of(axis, given[0])]
    if axis is None:
        given = tuple(reshape(x, x.numel) for x in given)
    last = folded(given, 0 if axis is None else axes[0], combine_fn)[-1]
    if keep_dims:
        last = tuple(expand_dims(x, axes) for x in last)
    return last if isinstance(input, tuple) else last[0]


def turned(x: Tile, axis: int, reverse: bool) -> Tile:
    """A tile, or its elements in reverse order."""
    return moved(x, np.flip, axis) if reverse else x


def associative_scan(input: Any, axis: int, combine_fn: Compute, reverse: bool = False) -> Any:
    axis = axis_of(axis, in_tuple(input)[0])
    given = tuple(turned(x, axis, reverse) for x in in_tuple(input))
    steps = zip(*folded(given, axis, combine_fn))
    stacked = [Tile(np.stack([x.a for x in own], axis), own[0].dtype) for own in steps]
    made = tuple(turned(x, axis, reverse) for x in stacked)
    return made if isinstance(input, tuple) else made[0]


def scanned(compute: Compute) -> Callable[..., Tile]:
    """tl.cumsum or tl.cumprod."""

    def apply(input: Tile, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Tile:
        if dtype is not None:
            input = cast(input, dtype)
        elif input.dtype is bfloat16 or (compute is np.cumsum and input.dtype.kind < 2):
            input = widened(input)
        axis = axis_of(axis, input)
        made = compute(turned(input, axis, reverse).a, axis=axis, dtype=input.dtype.np)
        return turned(Tile(made, input.dtype), axis, reverse)

    return apply


def sort(x: Tile, dim: Any = None, descending: bool = False) -> Tile:
    if dim not in (None, -1, len(x.shape) - 1):
        refuse("only the last axis can be sorted")
    return turned(moved(x, np.sort), -1, descending)


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
            refuse(f"tl.dot takes tiles of 2 or 3 axes, and this is {described(x)}")
    a, b, K = input.dtype, other.dtype, input.shape[-1]
    if a is not b and not (a.is_fp8() and b.is_fp8()):
        refuse(f"tl.dot of {a} and {b}: both operands need one type; convert with .to")
    if a.kind < 2 and a is not dtypes.int8 or out_dtype is bfloat16:
        refuse(f"tl.dot of {a} to {out_dtype} is not defined")
    if other.shape[-2] != K or input.shape[:-2] != other.shape[:-2]:
        refuse(f"shapes {list(input.shape)} and {list(other.shape)} cannot be multiplied")
    least = 32 if a.primitive_bitwidth == 8 else MIN_DOT
    if least > K:
        refuse(f"tl.dot sums over K = {K}; with {a} K has to be at least {least}")
    kind = {dtypes.int8: int32, float64: float64, bfloat16: float32, float32: float32}.get(
        a, out_dtype
    )
    wide = kind if kind in (int32, float64) else float32
    product = floats.product(*(dtypes.converted(x.a, x.dtype, wide) for x in (input, other)))
    if acc is not None:
        if acc.dtype is not kind or acc.shape != product.shape:
            refuse(f"tl.dot makes {list(product.shape)} of {kind}, and acc is {described(acc)}")
        product = product + acc.a
    return rounded(product, kind)


# --------------------------------------------------------------------------------- random numbers
# The multipliers of 32 and of 64 bits, and what is added to the keys.
PHILOX = {
    32: (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85),
    64: (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
}


def philox_impl(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: int = 10) -> tuple:
    a, b, raise_a, raise_b = PHILOX[c0.dtype.primitive_bitwidth]
    for _ in range_(n_rounds):
        c0, c1, c2, c3 = umulhi(b, c2) ^ c1 ^ k0, c2 * b, umulhi(a, c0) ^ c3 ^ k1, c0 * a
        k0, k1 = k0 + raise_a, k1 + raise_b
    return c0, c1, c2, c3


def philox(seed: Any, c0: Any, c1: Any, c2: Any, c3: Any, n_rounds: int = 10) -> tuple:
    seed = cast(seed, dtypes.uint64)
    counters = [to_tensor(x) for x in (c0, c1, c2, c3)]
    if counters[0].dtype.primitive_bitwidth == 32:
        kind, low, high = uint32, cast(seed & 0xFFFFFFFF, uint32), cast(seed >> 32, uint32)
    else:
        kind, low, high = dtypes.uint64, seed, full((1,), 0, dtypes.uint64)
    c0, c1, c2, c3 = (cast(x, kind, bitcast=True) for x in counters)
    return philox_impl(c0, c1, c2, c3, low, high, n_rounds)


def randint4x(seed: Any, offset: Any, n_rounds: int = 10) -> tuple:
    low = cast(offset, uint32)
    none = low * 0
    high = cast(offset >> 32, uint32) if offset.dtype.primitive_bitwidth > 32 else none
    return philox(seed, low, high, none, none, n_rounds)


def uint_to_uniform_float(x: Tile) -> Tile:
    wide = x.dtype.primitive_bitwidth == 64
    x = cast(x, dtypes.int64 if wide else int32, bitcast=True)
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


# ------------------------------------------------------------------------ what the compiler is told
def static_assert(cond: Any, msg: str = "") -> None:
    if isinstance(cond, Tile):
        refuse("static_assert needs what is known when the kernel is compiled")
    if not cond:
        refuse(f"static_assert failed{': ' if msg else ''}{msg}")


def device_assert(cond: Any, msg: str = "", mask: Any = None) -> None:
    holds = to_tensor(cond).a if mask is None else to_tensor(cond).a | ~to_tensor(mask).a
    if not here.dry and not np.all(holds):
        raise AssertionError(msg or "device_assert failed")


def device_print(prefix: str, *args: Any, hex: bool = False) -> None:  # noqa: A002
    if not isinstance(prefix, str):
        refuse("the first argument of a print is a text")
    if not here.dry:
        values = [x.a if isinstance(x, Tile) else x for x in args]
        print(f"program {here.program.ids}: {prefix}", *values)  # noqa: T201


def builtin_extreme(of_numbers: Compute, of_tiles: Compute) -> Compute:
    """min and max as a kernel finds them without `tl.`."""

    def apply(*values: Any) -> Any:
        if any(isinstance(x, Tile) for x in values):
            return functools.reduce(of_tiles, values)
        return of_numbers(*values)

    return apply


# ------------------------------------------------------------------------------ what a kernel finds
NAMES = """
    PropagateNan abs arange associative_scan broadcast broadcast_to cast cat ceil clamp cos
    device_assert device_print dot exp exp2 expand_dims fdiv floor fma full histogram
    interleave join log log2 max maximum min minimum pair_uniform_to_normal permute philox
    philox_impl rand4x randint4x randn4x range reduce reshape sin softmax sort split sqrt
    static_assert sum swizzle2d to_tensor topk trans uint_to_uniform_float umulhi where zeros
"""
OF_MEMORY = """
    advance atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg atomic_xor
    load make_block_ptr make_tensor_descriptor store
"""
HINTS = "multiple_of max_contiguous max_constancy"  # to the compiler
FUNCTIONS: dict[str, Any] = {
    **{name: globals()[name] for name in NAMES.split()},
    **{name: getattr(memory, name) for name in OF_MEMORY.split()},
    **dtypes.NAMED,
    **dict.fromkeys(HINTS.split(), lambda input, values: input),
    **dict.fromkeys(("debug_barrier", "assume"), lambda *values, **options: None),
    "add": lambda x, y, sanitize_overflow=True: to_tensor(x) + y,
    "sub": lambda x, y, sanitize_overflow=True: to_tensor(x) - y,
    "mul": lambda x, y, sanitize_overflow=True: to_tensor(x) * y,
    "argmax": index_of(np.argmax),
    "argmin": index_of(np.argmin),
    "cdiv": lambda x, div: (x + (div - 1)) // div,
    "constexpr": lambda value: value,  # which has no wrapping in a kernel
    "cumprod": scanned(np.cumprod),
    "cumsum": scanned(np.cumsum),
    "div_rn": fdiv,
    "dtype": dtype,
    "erf": elementwise(np.vectorize(python_math.erf)),
    "flip": lambda x, dim=None: moved(x, np.flip, -1 if dim is None else dim),
    "gather": lambda src, index, axis: Tile(
        np.take_along_axis(src.a, index.a.astype(np.int64), axis), src.dtype
    ),
    "item": lambda input: Tile(input.a.reshape(-1)[0], input.dtype),
    "load_tensor_descriptor": lambda desc, offsets: desc.load(offsets),
    "num_programs": lambda axis: place(axis, of_grid=True),
    "pointer_type": pointer_type,
    "program_id": lambda axis: place(axis, of_grid=False),
    "rand": lambda seed, offset, n_rounds=10: rand4x(seed, offset, n_rounds)[0],
    "randint": lambda seed, offset, n_rounds=10: randint4x(seed, offset, n_rounds)[0],
    "randn": lambda seed, offset, n_rounds=10: randn4x(seed, offset, n_rounds)[0],
    "ravel": lambda x, can_reorder=False: reshape(x, (x.numel,)),
    "reduce_or": of_bits(np.bitwise_or.reduce),
    "rint": elementwise(np.rint),
    "rsqrt": elementwise(lambda a: 1 / np.sqrt(a)),
    "sigmoid": lambda x: 1 / (1 + exp(-x)),
    "sqrt_rn": elementwise(np.sqrt, (float32,)),
    "squeeze": lambda x, dim: moved(x, np.squeeze, dim),
    "static_range": static_range,
    "static_print": lambda *values, **options: print(*values),  # noqa: T201
    "store_tensor_descriptor": lambda desc, offsets, value: desc.store(offsets, value),
    "tensor": Tile,
    "unsqueeze": expand_dims,
    "view": reshape,
    "xor_sum": of_bits(np.bitwise_xor.reduce),
    "zeros_like": lambda input: zeros(input.shape, input.dtype),
}
METHODS = """
    abs argmax argmin atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or atomic_xchg
    atomic_xor associative_scan broadcast_to cdiv ceil cos cumprod cumsum erf exp exp2 expand_dims
    flip floor gather histogram item log log2 max min permute ravel reduce reduce_or reshape rsqrt
    sigmoid sin softmax sort split sqrt sqrt_rn store sum trans unsqueeze view xor_sum
"""
MEMBERS: dict[str, Any] = {  # of tiles
    **{name: FUNCTIONS[name] for name in METHODS.split()},
    "logical_and": lambda x, y: cast(x, int1) & cast(y, int1),
    "logical_or": lambda x, y: cast(x, int1) | cast(y, int1),
    "T": property(trans),
}
for _name, _function in MEMBERS.items():
    setattr(Tile, _name, _function)
    setattr(Pointer, _name, _function)
