"""Small kernels of Triton's language, each with its inputs.

Most are one expression, from which `e` makes a kernel. The process that runs Triton's own
interpreter imports this file, so this file imports nothing of the project.
"""

import linecache
import math
import re
import types
import zlib
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate
from triton.tools.tensor_descriptor import TensorDescriptor

b, bf16 = torch.bool, torch.bfloat16
i8, i16, i32, i64 = torch.int8, torch.int16, torch.int32, torch.int64
u8, u16, u32, u64 = torch.uint8, torch.uint16, torch.uint32, torch.uint64
f16, f32, f64 = torch.float16, torch.float32, torch.float64
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = math.nan, math.inf


class Case(NamedTuple):
    """One launch: each input is a dtype, (dtype, shape), a value, or a function of a generator."""

    name: str
    kernel: Any
    inputs: tuple
    out: Any
    grid: Any = (1,)
    meta: dict = {}

    def arguments(self) -> list:
        """The kernel's arguments: the inputs, the same in each process, and a zeroed output."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        return [value(each, random) for each in self.inputs] + [zeros(self.out)]

    def run(self) -> list[torch.Tensor]:
        """Launch the kernel; all tensors that it could have written, the output last."""
        arguments = self.arguments()
        self.kernel[self.grid](*arguments, **self.meta)
        return list(tensors(arguments))


CASES: dict[str, Case] = {}


def case(out, *inputs, grid=(1,), **meta):
    """Register the decorated kernel."""

    def register(kernel):
        name = getattr(kernel, "fn", kernel).__name__
        CASES[name] = Case(name, kernel, inputs, out, grid, meta)
        return kernel

    return register


def zeros(out):
    dtype, shape = out if isinstance(out, tuple) else (out, (16,))
    return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)


def value(spec, random):
    if callable(spec):
        return spec(random)
    if isinstance(spec, torch.dtype):
        spec = spec, (16,)
    if not (isinstance(spec, tuple) and isinstance(spec[0], torch.dtype)):
        return spec.clone() if isinstance(spec, torch.Tensor) else spec
    dtype, shape = spec
    if dtype.is_floating_point:
        return torch.from_numpy(random.standard_normal(shape) * 3).to(dtype)
    raw = torch.from_numpy(random.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8))
    raw[..., 0] |= raw.sum(-1) == 0  # no zero, so that it can be a divisor
    return raw[..., 0] > 127 if dtype == b else raw.view(dtype)[..., 0].contiguous()


def exact(dtype, *shape):
    """Multiples of 0.5 from -2 to 2, whose products sum exactly in any order."""
    return lambda random: torch.from_numpy(random.integers(-4, 5, shape) / 2).to(dtype)


def bits(dtype, step=1):
    """All bit patterns of a type, or each `step`-th pattern."""
    half = 1 << 8 * dtype.itemsize - 1
    return torch.arange(-half, half, step).to({1: i8, 2: i16}[dtype.itemsize]).view(dtype)


def tensors(arguments):
    for each in arguments:
        if isinstance(each, tuple):
            yield from tensors(each)
        elif isinstance(each, TensorDescriptor):
            yield each.base
        elif isinstance(each, torch.Tensor):
            yield each


def t(dtype, *values):
    return torch.tensor(values, dtype=dtype)


def e(out, *inputs, **codes):
    """Kernels by name, each of which stores the value of the last statement of its code.

    That value has the type of `out`. The inputs are named x, y, z; x_ptr is the pointer to x, and i
    counts the elements of x.
    """
    for name, code in codes.items():
        *given, result = Case(name, None, inputs, out).arguments()
        pointers = {n: v.shape for n, v in zip("xyz", given) if isinstance(v, torch.Tensor)}
        names = [n + "_ptr" * (n in pointers) for n in "xyz"[: len(given)]]
        lines = ["@triton.jit", f"def {name}({', '.join([*names, 'out'])}):"]
        lines += [f"    {n} = tl.load({n}_ptr + {index(shape)})" for n, shape in pointers.items()]
        lines += [f"    i = {index(shape)}" for n, shape in pointers.items() if n == "x"]
        *before, last = code.split("; ")
        lines += [f"    {line}" for line in [*before, f"r = {last}"]]
        lines.append("    tl.static_assert(r.dtype == out.dtype.element_ty)")
        lines.append(f"    tl.store(out{f' + {index(result.shape)}' if result.shape else ''}, r)")
        file = f"<{name}>"
        linecache.cache[file] = (0, None, [line + "\n" for line in lines], file)
        scope = {}
        exec(compile("\n".join(lines), file, "exec"), globals(), scope)
        CASES[name] = Case(name, scope[name], inputs, out)


def index(shape):
    return f"tl.reshape(tl.arange(0, {math.prod(shape)}), {list(shape)})"


# What kernels below call


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def add_pair(a, b, c, d):
    return a + c, b + d


@triton.jit
def recur(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def scaled(x, factor=3, TWICE: tl.constexpr = False):
    if TWICE:
        return x * factor * 2
    return x * factor


@triton.jit
def apply(x, FUNCTION: tl.constexpr, TIMES: tl.constexpr):
    for _ in tl.static_range(TIMES):
        x = FUNCTION(x)
    return x


@triton.constexpr_function
def doubled(n):
    return 2 * n


@aggregate
class Line:
    slope: tl.tensor
    offset: tl.tensor

    @triton.constexpr_function
    def __init__(self, slope, offset):
        self.slope = slope
        self.offset = offset

    @triton.jit
    def at(self, x):
        return self.slope * x + self.offset


Pair = namedtuple("Pair", ["first", "second"])
LIMIT = tl.constexpr(5)
helpers = types.ModuleType("helpers")
helpers.scaled = scaled


SMALL = t(i32, *range(-8, 8))
SPECIAL = t(f32, NAN, 1.5, -0.25, INF, -INF, NAN, 2.5, -3.5, *range(1, 9))
OTHERS = t(f32, 1.0, NAN, -2.5, 1.0, 1.0, NAN, INF, -INF, *range(16, 8, -1))
POSITIVE = torch.tensor([2.0**k * 1.3 for k in range(-8, 8)])
AROUND_HALVES = torch.arange(-8, 8) * 0.25
MATRIX, CUBE = (f32, (4, 8)), (f32, (2, 4, 8))
STEPS = torch.arange(1 << 12) << 20  # of each sign and exponent
TIES = STEPS + 0x8000, STEPS + 0x80000  # halfway between two numbers of bf16, of FP8
PATTERNS = torch.cat([STEPS, *TIES, STEPS + 0x54321]).int().view(f32)

# Operators: what they give, and the type of it
OPERATIONS = """
i8+i8=i8 i32+i32=i32 i32*i32=i32 i64*i64=i64 u8-u8=u8 u64*u64=u64 i8*i32=i32 u8+i8=u8 u8+i16=i16
i32+u32=u32 u32+i64=i64 i32-u64=u64 b+b=b b*f32=f32 f16+f32=f32 f32+i64=f32 f64-f16=f64
bf16+f32=f32 bf16*bf16=bf16 bf16-bf16=bf16 bf16<bf16=b bf16/bf16=f32 f16/f16=f32 f16%f16=f32
f32%f32=f32 f32/f32=f32 i8//i8=i8 i32//i32=i32 i64%i64=i64 u32//u16=u32 u64%u32=u64 i32/i8=f32
i64/i64=f32 i32&i32=i32 u8|i32=i32 i8^i8=i8 i32<u32=b u8>=u8=b f32<f32=b f16==f32=b u16*u16=u16
i16-i16=i16 u16%u16=u16 i16//i16=i16 u16+i32=i32 i64>=i32=b u16<i16=b bf16+f16=f16 i32/f32=f32
"""
NAMES = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod"}
NAMES |= {"&": "and", "|": "or", "^": "xor", "<": "less", ">=": "not_less", "==": "equal"}
for first, sign, second, result in re.findall(r"(\w+)(\W+?)(\w+)=(\w+)", OPERATIONS):
    code = {f"{first}_{NAMES[sign]}_{second}": f"x {sign} y"}
    e(*(globals()[name] for name in (result, first, second)), **code)
e(i32, i32, 65537, scalars_wrap="x + y * y * 3")
e(f16, f16, SMALL, f16_add_int32="x + y")
e(f16, f16, exact(bf16, 16), f16_add_bf16="x + y")
e(i8, i8, i8_add_literal="x + 100", i8_negative="-x")
e(i8, i8, i8_right_shift="x >> 3", i8_left_shift="x << 3")
e(i32, i8, i8_add_assigned_literal="a = 100; x + a")
e(u32, i32, i32_add_u32_literal="a = 3000000000; x + a")
e(i64, i32, i32_add_i64_literal="a = 1 << 40; x + a")
e(i64, i32, 1 << 40, i32_add_i64_argument="x + y")
e(i32, i8, 7, i8_add_argument="x + y")
e(i8, i8, 1, i8_add_argument_of_one="x + y")
e(i32, i32, True, i32_add_bool_argument="x + y")
e(i32, b, b_add_literal="x + 1")
e(f32, i32, i32_mul_float_literal="x * 0.5")
e(f16, f16, f16_mul_literal="x * 2.3", f16_negative="-x")
e(f32, f16, f16_mul_assigned_literal="a = 2.3; x * a", f16_truediv_literal="x / 3")
e(f32, f16, 2.3, f16_mul_argument="x * y")
e(f64, f32, f32_add_f64_literal="a = 1e-50; x + a")
e(f32, f32, f32_mul_f64_literal="x * 1e-50")
e(bf16, bf16, bf16_mul_literal="x * 2.7", bf16_negative="-x")
e(bf16, bf16_full="tl.full([16], 2.7, tl.bfloat16)")
e(i32, SMALL, 3, floordiv_rounds_to_zero="x // y", mod_has_the_sign_of_the_first="x % y")
e(i32, SMALL, -5, mod_negative_argument="x % y", mod_negative_literal="x % -5")
e(i32, SMALL * 2 + 1, literal_floordiv="100 // x", literal_mod="-100 % x")
e(i32, i32, constexpr_floordiv_and_mod="x + (-7 // 2) * 10 + -7 % 4", i32_invert="~x")
e(i32, i32, assigned_floordiv_and_mod="a = -7; x + a // 2 * 10 + a % 4", i32_right_shift="x >> 3")
e(i32, i32, tuple_assigned_floordiv="a, c = -7, 2; x + a // c")
e(i32, i32, -7, argument_floordiv_and_mod="x + y // 2 * 10 + y % 4")
e(f32, SPECIAL, torch.zeros(16), truediv_by_zero="x / y")
e(u32, u32, t(u32, *range(16)), u32_right_shift="x >> y")
e(i64, i64, t(i32, *range(0, 64, 4)), i64_right_shift="x >> y")
e(i32, SMALL + 8, literal_left_shift="1 << x")
e(u32, u32, u32_invert="~x", u32_negative="-x")
e(b, b, b_invert="~x")
e(f32, torch.zeros(16), f32_negative_of_zero="-x")

# Comparisons, choices, minima
e(b, SPECIAL, OTHERS, nan_less_than="x < y")
e(b, SPECIAL, nan_equal="x == x", nan_not_equal="x != x")
e(b, torch.full((16,), 0.1).half(), f16_equal_literal="x == 0.1")
e(b, u8, u8_greater_equal_literal="x >= 200")
e(i32, i32, 5, scalar_comparison="x + (y > 3)", where_scalar_condition="tl.where(y > 3, x, -x)")
e(b, f32, f32, bool_bitwise="((x > 0) & (y > 0)) | (x > y) ^ (y < 0)")
e(b, f32, f32, and_of_tensors="x > 0 and y > 0", or_of_tensors="x > 0 or y > 0")
e(b, b, not_of_a_tensor="not x")
e(f32, f16, f32, where_promotes="tl.where(x > 0, x, y)")
e(f16, f16, where_literal="tl.where(x > 0, x, float('-inf'))")
e(f16, f16, minimum_literal="tl.minimum(x, 0.1).to(tl.float16)")
e((i32, (4, 4)), (f32, (4, 1)), (i32, (1, 4)), where_broadcasts="tl.where(x > 0, y, 0)")
e(f32, SPECIAL, OTHERS, minimum_of_nan="tl.minimum(x, y)", maximum_of_nan="tl.maximum(x, y)")
e(f32, SPECIAL, OTHERS, maximum_propagates="tl.maximum(x, y, tl.PropagateNan.ALL)")
e(f32, SPECIAL, OTHERS, minimum_propagates="tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)")
e(u32, u32, u32, maximum_of_u32="tl.maximum(x, y)")
e(bf16, bf16, bf16, maximum_of_bf16="tl.maximum(x, y).to(tl.bfloat16)")
e(i64, i8, i64, maximum_of_i8_and_i64="tl.maximum(x, y)")
e(i32, i32, 5, 9, builtin_min_of_scalars="x + min(y, z) + max(y, 4) + max(2, 3)")
e(i32, i32, i32, builtin_max_of_tensors="max(x, y)")
e(f32, f32, clamp="tl.clamp(x, -1.0, 1.0)")
e(f32, SPECIAL, clamp_of_nan="tl.clamp(x, -1.0, 2.0)")
e(f32, SPECIAL, clamp_propagates="tl.clamp(x, -1.0, 1.0, tl.PropagateNan.ALL)")

# Mathematics
for f in ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil"]:
    e(f32, POSITIVE, **{f"{f}_f32": f"tl.{f}(x)"})
    e(f64, POSITIVE.double(), **{f"{f}_f64": f"tl.{f}(x)"})
for f in ["f16", "bf16", "f32", "i8"]:
    e(globals()[f], exact(globals()[f], 16), **{f"abs_{f}": "tl.abs(x) + x.abs()"})
e(f32, SPECIAL, exp_of_special_values="tl.exp(x)")
e(f32, AROUND_HALVES, floor_and_ceil_of_negatives="tl.floor(x) * 100 + tl.ceil(x)")
e(f32, f32, exp_method="x.exp() + x.abs()", sigmoid="tl.sigmoid(x) + x.sigmoid()")
e(f32, f32, softmax="tl.softmax(x)")
e(f32, POSITIVE, sqrt_rn="tl.sqrt_rn(x)")
e(f32, f32, f32, div_rn="tl.div_rn(x, y)", fdiv="tl.fdiv(x, y)")
e(f32, f32, f32, f32, fma_f32="tl.fma(x, y, z)")
e(f16, f16, f16, f16, fma_f16="tl.math.fma(x, y, z)")
e(u32, u32, u32, umulhi_u32="tl.umulhi(x, y)")
e(u64, u64, u64, umulhi_u64="tl.umulhi(x, y)")
e(i32, i32, i32, umulhi_i32="tl.umulhi(x, y)")
e(i32, i32, cdiv="tl.cdiv(x, 7) + tl.cdiv(10, 4)")
e(MATRIX, MATRIX, softmax_of_rows="tl.softmax(x, 1, keep_dims=True)")

# Reductions, scans, sorting
e((f32, ()), MATRIX, sum_of_all="tl.sum(x)")
e((f32, 8), MATRIX, sum_of_columns="tl.sum(x, 0)")
e((f32, 4), MATRIX, sum_of_rows="x.sum(1)")
e((f32, 2), (f32, (2, 512)), sum_of_long_rows="tl.sum(x, axis=1)")
e((f32, 2), (f32, (2, 512)), sum_of_transposed="tl.sum(tl.trans(x), 0)")
e((f32, 4), (f32, (256, 4)), sum_of_many_rows="tl.sum(x, axis=0)")
e((f32, (2, 1, 8)), CUBE, sum_keeps_dimensions="tl.sum(x, 1, keep_dims=True)")
e((f32, (2, 8)), CUBE, sum_of_the_middle="tl.sum(x, -2)")
e((f32, (4, 4)), MATRIX, (f32, (8, 4)), sum_of_products="tl.sum(x[:, :, None] * y[None, :, :], 1)")
e((f16, 2), (f16, (2, 64)), sum_of_f16="tl.sum(x, 1)")
e((bf16, 2), exact(bf16, 2, 16), sum_of_bf16="tl.sum(x, 1)")
e((i32, ()), i8, sum_of_i8="tl.sum(x, 0)", max_of_i8="tl.max(x, 0)")
e((u32, ()), u8, sum_of_u8="tl.sum(x, 0)")
e((u32, ()), b, sum_of_b="tl.sum(x, 0)")
e((i32, ()), SMALL + 2**30, sum_of_i32_wraps="tl.sum(x, 0)")
e((f32, ()), f16, sum_in_f32="tl.sum(x, 0, dtype=tl.float32)")
e((f32, 4), (f16, (4, 8)), max_of_f16="tl.max(x, 1)")
e((f32, 4), (bf16, (4, 8)), max_of_bf16="x.max(1)")
e((i32, ()), u8, max_of_u8="tl.max(x, 0)")
e((u32, ()), u32, min_of_u32="tl.min(x, 0)")
e((f32, ()), SPECIAL, max_ignores_nan="tl.max(x, 0)")
e((f32, (4, 1)), SPECIAL, min_ignores_nan="tl.min(tl.reshape(x, [4, 4]), 1, keep_dims=True)")
e((i32, 4), (u8, (4, 8)), argmax_of_ties="tl.argmax(x % 3, 1)")
e((i32, (1, 8)), exact(f32, 4, 8), argmin_of_ties="x.argmin(0, keep_dims=True)")
e((f32, 4), MATRIX, max_with_indices="v, at = tl.max(x, 1, return_indices=True); v * 8 + at")
e((f32, 4), MATRIX, reduce_product="tl.reduce(x, 1, multiply)")
e((i32, ()), f32, argmax_any_tie="tl.argmax(x, 0, tie_break_left=False)")
e((i32, 4), (i32, (4, 8)), xor_sum="tl.xor_sum(x, 1)")
e((i32, 8), (i32, (4, 8)), reduce_or="tl.reduce_or(x, 0)")
e((f32, ()), MATRIX, reduce_all="tl.reduce(x, None, multiply)")
e(f32, (f32, (8, 16)), reduce_pair="m, s = tl.reduce((x, x * x), 0, add_pair); m / s")
e(MATRIX, MATRIX, cumsum="tl.cumsum(x, 1)", cumsum_of_columns="x.cumsum(0)")
e(MATRIX, MATRIX, cumprod="tl.cumprod(x, 1)")
e(MATRIX, MATRIX, scan_reversed="tl.associative_scan(x, 1, multiply, reverse=True)")
e(MATRIX, MATRIX, flip_rows="tl.flip(x, 1)")
e(f32, f32, cumsum_reversed="tl.cumsum(x, 0, reverse=True)")
e(f32, f32, scan_maximum="tl.associative_scan(x, 0, maximum)", sort="tl.sort(x)")
e(f32, f32, flip="tl.flip(x, 0)")
e(i32, i8, cumsum_of_i8="tl.cumsum(x)")
e(f32, exact(bf16, 16), cumsum_of_bf16="tl.cumsum(x).to(tl.float32)")
e(f32, f32, f32, scan_pair="a, c = tl.associative_scan((x, y), 0, recur); a + c")
e((i32, (4, 8)), (i32, (4, 8)), sort_descending="tl.sort(x, descending=True)")
e((f16, (2, 8)), (f16, (2, 8)), sort_f16="tl.sort(x, dim=1)")
e(bf16, bf16, sort_bf16="tl.sort(x)")
e((f32, 4), f32, topk="tl.topk(x, 4)")
e((i32, 8), t(u32, *[0, 3, 3, 7, 1, 3, 0, 7] * 2), histogram="tl.histogram(x, 8)")
e((i32, 8), t(i32, *range(8), *range(8)), b, histogram_masked="tl.histogram(x, 8, mask=y)")
e((i32, 8), t(i32, *range(16)), histogram_out_of_range="tl.histogram(x, 8)")
e(MATRIX, MATRIX, t(i32, *range(32)).reshape(4, 8) * 5 % 8, gather="tl.gather(x, y, 1)")

# Shapes
e((i32, 32), i32, i32, cat="tl.sort(tl.cat(x, y, can_reorder=True))")
e((f32, (4, 8, 2)), MATRIX, MATRIX, join="tl.join(x, y)")
e((f32, (2, 4)), f32, split="a, c = tl.split(tl.reshape(x, [2, 4, 2])); a - c")
e((f32, 32), f32, f32, interleave="tl.interleave(x, y)")
e((f32, (8, 4)), MATRIX, reshape="x.reshape(8, 4)", trans="x.T - tl.trans(x) * 2")
e((f32, (2, 16)), MATRIX, view="tl.view(x, [2, 16])")
e((f32, 32), MATRIX, ravel="tl.ravel(x)")
e(MATRIX, MATRIX, trans_and_reshape="x.trans().reshape(4, 8)")
e((f32, (8, 2, 4)), CUBE, permute="tl.permute(x, (2, 0, 1))")
e((f32, (4, 8, 2)), CUBE, permute_method="x.permute(1, 2, 0)")
e((i32, (16, 16)), i32, i32, expand_dims="tl.expand_dims(x, 1) + tl.expand_dims(y, 0)")
e((i32, (16, 1, 16)), i32, i32, indexed_by_none="x[:, None, None] + y[None, None, :]")
e((i32, (16, 4)), i32, broadcast_to="tl.broadcast_to(x[:, None], (16, 4))")
e(MATRIX, MATRIX, (f32, (8,)), broadcast_of_ranks="x + y")
e(MATRIX, (f32, (4, 1)), (f32, (1, 8)), broadcast="a, c = tl.broadcast(x, y); a * c")
e(i16, full_and_zeros="tl.full([16], 300, tl.int16) + tl.zeros([16], tl.int8)")
e(f16, f16, 2.3, full_of_scalar="tl.full((16,), y, tl.float16) + tl.zeros_like(x)")
e(i32, arange="tl.arange(16, 32)")
e((i32, (4, 8)), MATRIX, shape_and_numel="i + x.shape[0] * 100 + x.numel")

# Matrix products
for f, acc, more in [
    ("f16", f32, ""),
    ("bf16", f32, ""),
    ("f32", f32, ", input_precision='ieee'"),
    ("e4m3", f32, ""),
    ("e5m2", f32, ""),
    ("f64", f64, ", out_dtype=tl.float64"),
]:
    x, y, z = exact(globals()[f], 16, 32), exact(globals()[f], 32, 16), exact(acc, 16, 16)
    e((acc, (16, 16)), x, y, z, **{f"dot_{f}": f"tl.dot(x, y, z{more})"})
SQUARE, EXACT = (f16, (16, 16)), exact(f16, 16, 16)
e((f32, (16, 16)), *[exact(f32, 16, 16)] * 2, dot_tf32="tl.dot(x, y)")
e((f32, (16, 16)), (f16, (16, 64)), (f16, (64, 16)), dot_rounds="tl.dot(x, y)")
e((f32, (16, 16)), SQUARE, SQUARE, (f32, (16, 16)), dot_of_transposed="tl.dot(x, y.T, acc=z)")
e(SQUARE, EXACT, EXACT, dot_to_f16="tl.dot(x, y, out_dtype=tl.float16)")
e((i32, (16, 16)), (i8, (16, 32)), (i8, (32, 16)), dot_i8="tl.dot(x, y)")
e((f32, (2, 16, 16)), *[exact(f16, 2, 16, 16)] * 2, dot_of_batches="tl.dot(x, y)")

# Casts
OTHER_NAMES = {"int1": b, "bfloat16": bf16, "float8e4nv": e4m3, "float8e5": e5m2}
for first, targets, source in [
    ("b", "int8", b),
    ("i8", "uint32 float16", i8),
    ("i16", "int1 bfloat16", i16),
    ("i32", "int8 uint64 float32", i32),
    ("u32", "int64", u32),
    ("i64", "float32", i64),
    ("u64", "float64", u64),
    ("f32", "int32 int1 uint8", torch.arange(0, 16) * 0.75 % 7),
    ("f16", "int64 int32", torch.arange(-8, 8).half() * 0.75),
    ("bf16", "int32", bf16),
    ("f64", "float32 bfloat16", f64),
    ("f32", "float16 bfloat16 float8e4nv float8e5", PATTERNS),
    ("f16", "float32 bfloat16 float8e4nv float8e5", bits(f16, 4)),
    ("bf16", "float32 float16 float8e4nv float8e5", bits(bf16, 4)),
    ("e4m3", "float32 float16", bits(e4m3)),
    ("e5m2", "float32 float16", bits(e5m2)),
]:
    for target in targets.split():
        out = OTHER_NAMES.get(target) or getattr(torch, target), getattr(source, "shape", (16,))
        e(out, source, **{f"{first}_to_{target}": f"x.to(tl.{target})"})
e(f16, f32, f32_to_float16_to_zero="x.to(tl.float16, fp_downcast_rounding='rtz')")
e(i32, f32, bits_of_f32="x.to(tl.int32, bitcast=True)")
e(f64, i64, f64_of_bits="tl.cast(x, tl.float64, bitcast=True)")
e(bf16, SMALL.short() * 999, bf16_of_bits="x.to(tl.bfloat16, bitcast=True)")
e((e5m2, 256), bits(u8), e5m2_of_bits="x.to(tl.float8e5, bitcast=True)")

# Memory
e(i32, i32, load_masked="tl.where(i < 5, tl.load(x_ptr + i, mask=i < 5), 7)")
e(i8, i8, load_masked_with_other="tl.load(x_ptr + i, i < 5, other=-1)")
e(f32, f32, load_out_of_bounds="tl.load(x_ptr + i * 1000000, i == 0, other=2.5)")
e(f32, f32, load_scalar="x + tl.load(x_ptr + 3)", load_pointer_arithmetic="tl.load(x_ptr + 15 - i)")
e(f32, f32, load_unsigned_offsets="tl.load(x_ptr + (15 - i).to(tl.uint8))")
e(MATRIX, MATRIX, load_mask_broadcasts="tl.load(x_ptr + i, (tl.arange(0, 4) < 2)[:, None], 0)")
VIEW = t(i32, *range(40)).reshape(5, 8)[1:, ::2]
e((i32, (4, 4)), lambda random: VIEW, load_strided="tl.load(x_ptr + i // 4 * 8 + i % 4 * 2)")
e(i32, b, load_bool="tl.where(x, 3, 4)")
e(f32, f32, load_hints="tl.load(tl.multiple_of(x_ptr, 16) + i, eviction_policy='evict_last')")
e(f32, f32, load_volatile="tl.load(x_ptr + tl.max_contiguous(i, 16), volatile=True)")
e(bf16, bf16, load_bf16_with_other="tl.load(x_ptr + i, i < 5, other=2.7)")
e(f32, f32, store_masked="tl.store(x_ptr + i, x * 2, mask=i % 3 == 0); tl.load(x_ptr + i)")
e(f16, f16, 2.3, store_scalar="tl.store(x_ptr + 3, y); tl.store(x_ptr + i, 1.5, i > 9); x")
e(f32, f16, f32, store_rounds="tl.store(x_ptr + i, y); y")
e(bf16, bf16, f32, store_rounds_to_bf16="tl.store(x_ptr + i, y); tl.load(x_ptr + i)")
e(e4m3, e4m3, f32, store_rounds_to_e4m3="tl.store(x_ptr + i, y); tl.load(x_ptr + i)")
for f in ["add", "max", "min", "and", "or", "xor", "xchg"]:
    e(i32, i32, i32, **{f"atomic_{f}_i32": f"tl.atomic_{f}(x_ptr + i, y)"})
    e(u64, u64, u64, **{f"atomic_{f}_u64": f"tl.atomic_{f}(x_ptr + i, y, sem='relaxed')"})
for f in ["add", "max", "min", "xchg"]:
    e(f32, f32, f32, **{f"atomic_{f}_f32": f"tl.atomic_{f}(x_ptr + i, y)"})
e(f16, f16, f16, atomic_add_f16="tl.atomic_add(x_ptr + i, y, mask=y < 9)")
e(bf16, exact(bf16, 16), exact(bf16, 16), atomic_add_bf16="tl.atomic_add(x_ptr + i, y)")
e(i32, i32, i32, atomic_add_same_place="tl.atomic_add(x_ptr + i % 4, y); x * 0")
e(i32, i32, i32, atomic_cas="tl.atomic_cas(x_ptr + i, tl.where(i < 5, x, ~x), y)")
e(f64, f64, f64, atomic_add_masked="tl.atomic_add(x_ptr + i, y, mask=i % 3 == 0); x * 0")
e((i32, ()), i32, atomic_add_scalar="tl.atomic_add(x_ptr, 5) + tl.atomic_max(x_ptr, 1 << 30)")

# Loops, assertions
e(i32, i32, -7, loop_index_floordiv="for k in range(y, 0): x = x * 3 + k // 2 * 10 + k % 4; x")
e(i32, i8, loop_index_type="a = x.to(tl.int32); for k in range(100, 101): a = x + k; a")
e((i64, ()), i8, 1 << 33, loop_of_i64="a = y; for k in tl.range(y, y + 9, 3): a += k * 2; a")
e(i32, i32, static_assertion="tl.static_assert(LIMIT.value == 5, f'{LIMIT}'); x")
e(i32, i32, assertions="tl.device_assert(i < 16, 'large'); assert i >= 0; tl.debug_barrier(); x")
e(i32, i32, 7, assumption="tl.assume(y > 0); tl.max_constancy(x, 1)")
e(i32, SMALL + 8, swizzle2d="a, c = tl.swizzle2d(x // 4, x % 4, 4, 4, 2); a * 10 + c")

# Random numbers
e(f32, i32, 7, rand="tl.rand(y, x)", randn="tl.randn(y, x)")
e(f32, i32, 7, rand4x="a, c, d, f = tl.rand4x(y, x); a + c * 3 + d * 5 + f * 7")
e(f32, i32, 7, randn4x="a, c, d, f = tl.randn4x(y, x); a + c * 3 + d * 5 + f * 7")
e(f32, i64, 1 << 40, rand_of_i64="tl.rand(y, x)")
e(u32, i32, -7, randint="tl.randint(y, x)")
e(u32, i32, 7, randint_few_rounds="tl.randint(y, x, n_rounds=3)")
e(u32, i32, 7, randint4x="a, c, d, f = tl.randint4x(y, x); a ^ c * 3 ^ d * 5 ^ f * 7")
e(u32, i32, 7, philox="a, c, d, f = tl.philox(y, x, x, ~x, i); a ^ c * 3 ^ d * 5 ^ f * 7")


# Control flow, functions and arguments


@case(i32, 10, -3)
@triton.jit
def loops(n, low, out):
    total = 0
    for i in range(n):
        total = total * 3 + i
    for i in tl.range(low, n, 2, num_stages=2):
        total = total * 5 - i
    for i in range(10, 0, -3):
        for j in range(i, n):
            total += i ^ j
    for _ in range(n, n):
        total = 0
    for i in tl.static_range(3):
        total = total * 7 + i // -2
    tl.store(out, total)


@case(i32, grid=(16,))
@triton.jit
def collatz(out):
    n, steps = tl.program_id(0) + 1, tl.program_id(0) * 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    tl.store(out + tl.program_id(0), steps)


@case(f32, grid=(16,))
@triton.jit
def branches(out):
    pid = tl.program_id(0)
    if pid == 3:
        return
    scale = 1.0
    if pid < 4:
        y = pid * 2
    elif pid < 8 and pid % 2 == 0:
        y = pid * 3
        scale = 0.1
    else:
        y = pid
        if not (pid == 9 or pid == 11):
            scale += 2
    tl.store(out + pid, (y if pid > 1 else -5) * scale)


@case(i32, grid=(2, 3, 2))
@triton.jit
def program_ids(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(axis=2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + at, x * 100 + y * 10 + z)


@case(f32, f32, 13, grid=lambda meta: (triton.cdiv(13, meta["BLOCK"]),), BLOCK=4, num_warps=1)
@triton.jit
def blocks(x_ptr, n, out, BLOCK: tl.constexpr, OFFSET: tl.constexpr = 0):
    HALF: tl.constexpr = BLOCK // 2
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=float("nan"))
    tl.store(out + at, x * HALF + OFFSET, mask=at < n)


@case(i32, f32, None)
@triton.jit
def compile_time_branches(x_ptr, y_ptr, out, KIND: tl.constexpr = tl.float16):
    if y_ptr is None and KIND.primitive_bitwidth < 32:
        kind: tl.constexpr = tl.int16
    else:
        kind: tl.constexpr = tl.int32
    x = tl.load(x_ptr + tl.arange(0, 16)).to(KIND).to(kind, bitcast=True)
    tl.store(out + tl.arange(0, 16), x)


@case(i32, i32, 5, FUNCTION=scaled, N=16)
@triton.jit
def functions(x_ptr, k, out, FUNCTION: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = scaled(x) + scaled(x, k) + scaled(x, TWICE=True, factor=k) + helpers.scaled(x, 2)
    y += apply(x, FUNCTION, 2) + FUNCTION(k) + doubled(N) + LIMIT + tl.math.abs(x)
    a, b = add_pair(x, y, *(k, LIMIT))
    tl.store(out + tl.arange(0, N), a - b)


@case(i32, (5, 1 << 40), Pair(t(i32, *range(16)), Pair(7, 3)))
@triton.jit
def tuples(numbers, pair, out):
    total = tl.load(pair.first + tl.arange(0, 16)) * pair.second.first + pair[1].second
    for i in tl.static_range(len(numbers)):
        total += (numbers[i] * 4).to(tl.int32)
    both = (total, (total * 2, 3))
    a, inner = both
    c, d = inner
    tl.store(out + tl.arange(0, 16), a + c * d + (both + (9,))[2])


@case(f32, f32, f32)
@triton.jit
def aggregates(x_ptr, y_ptr, out):
    i = tl.arange(0, 16)
    line = Line(tl.load(x_ptr + i), tl.load(y_ptr + i))
    tl.store(out + i, line.at(i) + line.slope)


def closure(FACTOR):
    @triton.jit
    def kernel(out):
        tl.store(out + tl.arange(0, 16), tl.arange(0, 16) * FACTOR)

    return kernel


CASES["closure"] = Case("closure", closure(tl.constexpr(3)), (), i32)


@case(f32, f32)
@triton.heuristics({"EVEN": lambda arguments: arguments["x_ptr"].numel() % 2 == 0})
@triton.jit
def heuristics(x_ptr, out, EVEN: tl.constexpr):
    tl.store(out, tl.load(x_ptr) if EVEN else 0.0)


@case(i32, (i32, (5, 6)), 5, 6)
@triton.jit
def block_pointers(x_ptr, m, n, out):
    x = tl.make_block_ptr(x_ptr, (m, n), (n, 1), (2, 0), (4, 4), (1, 0))
    first = tl.load(x, boundary_check=(0,), padding_option="zero")
    x = tl.advance(x, (0, 4))
    second = tl.load(x, boundary_check=(0, 1), padding_option="zero")
    y = tl.make_block_ptr(out, (4, 4), (4, 1), (0, 1), (4, 4), (1, 0))
    tl.store(y, first * 3 + second, boundary_check=(0, 1))


@case(f32, (f32, (5, 8)), 5)
@triton.jit
def device_descriptors(x_ptr, m, out):
    x = tl.make_tensor_descriptor(x_ptr, shape=[m, 8], strides=[8, 1], block_shape=[4, 4])
    y = tl.make_tensor_descriptor(out, [4, 4], [4, 1], [4, 4])
    total = tl.zeros([4, 4], tl.float32)
    for n in range(0, 8, 4):
        total += x.load([3, n]) * 2 + x.load([-1, n])
    z = tl.make_tensor_descriptor(x_ptr, [m, 8], [8, 1], [4, 4], padding_option="nan").load([3, 4])
    total += tl.where(z == z, z, 100)
    y.store([0, 0], total)


@case(f16, lambda random: TensorDescriptor.from_tensor(value((f16, (5, 8)), random), [4, 8]))
@triton.jit
def host_descriptors(x, out):
    last = x.load([4, 0])
    tl.static_assert(last.dtype == tl.float16)
    x.store([2, 0], last + 1)
    total = tl.sum(tl.load_tensor_descriptor(x, [1, 0]), 1)
    tl.store(out + tl.arange(0, 4), total)


@case((i32, ()), grid=(32,))
@triton.jit
def counter(out):
    tl.atomic_add(out, tl.program_id(0) + 1, sem="relaxed", scope="gpu")
