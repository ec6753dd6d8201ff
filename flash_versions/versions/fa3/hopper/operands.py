"""Operands of Hopper's tensor cores: Q, K and V from shared memory, P from registers.

WGMMA reads its right operand from shared memory, and its left one from there or from registers. The
accumulator of S = Q K^T, rounded, is the left operand of P V.

* 16 bits: a thread holds just the numbers of a row that the operand wants from it.
* 8 bits: the operand wants four neighbouring keys from a thread, the accumulator gives it two and
  two. The sum over keys has no order, so V's keys are stored in the order in which threads hold
  them (`quantize.KEY_GROUP`), and nothing moves. V is also stored with the keys of a dim side by
  side, as WGMMA reads 8-bit operands no other way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from flash_versions.versions.fa3.fp8.pairs import are_pairs
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, operand_layout


@gluon.constexpr_function
def is_fp8(dtype):
    """Whether a type has 8 bits."""
    return dtype in (gl.float8e4nv, gl.float8e5)


@gluon.constexpr_function
def rounding_ptx(dtype, pairs):
    """PTX that rounds four numbers to 8 bits each: those of two pairs; or four fp32, in the first
    of four results.
    """
    kind = "e4m3x2" if dtype == gl.float8e4nv else "e5m2x2"
    source, low, high = ("f16x2", "$1", "$2") if pairs else ("f32", "$5, $4", "$7, $6")
    others = "" if pairs else "mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    return (
        f"{{ .reg .b16 low, high; cvt.rn.satfinite.{kind}.{source} low, {low}; "
        f"cvt.rn.satfinite.{kind}.{source} high, {high}; mov.b32 $0, {{low, high}}; {others}}}"
    )


@gluon.jit
def multiply_qk(q_tile, k_tile, DTYPE: gl.constexpr = gl.float32):
    """Issue S = Q K^T, summed up in a type: a token to wait for."""
    BLOCK_KV: gl.constexpr = k_tile.shape[0]
    layout: gl.constexpr = accumulator_layout(BLOCK_KV, is_fp8(k_tile.dtype))
    zero = gl.zeros([WARPGROUP_ROWS, BLOCK_KV], DTYPE, layout)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def rounded(p, v_tile, acc):
    """P, rounded to V's type, in the registers that `multiply_pv` takes it from.

    8-bit numbers come four to an int32: a loop that carries single ones unpacks them.
    """
    if are_pairs(p):
        ROWS: gl.constexpr = p.shape[0]
        PAIRS: gl.constexpr = p.shape[1]
        PTX: gl.constexpr = rounding_ptx(v_tile.dtype, True)
        low, high = gl.split(p.reshape([ROWS, PAIRS // 8, 2, 4]).permute((0, 1, 3, 2)))
        fours = gl.inline_asm_elementwise(
            PTX, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
        return fours.reshape([ROWS, PAIRS // 2])
    elif is_fp8(v_tile.dtype):
        ROWS: gl.constexpr = p.shape[0]
        KEYS: gl.constexpr = p.shape[1]
        operand: gl.constexpr = operand_layout(acc.type.layout, fp8=True)
        PTX: gl.constexpr = rounding_ptx(v_tile.dtype, False)
        p = p.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, KEYS])
        p = gl.convert_layout(p, operand, assert_trivial=True)
        fours = gl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r,r,r,r", [p], dtype=gl.int32, is_pure=True, pack=4
        )
        pairs, _ = gl.split(fours.reshape([ROWS, KEYS // 4, 2, 2]))
        packed, _ = gl.split(pairs)
        return packed
    else:
        operand: gl.constexpr = operand_layout(acc.type.layout)
        return gl.convert_layout(p.to(v_tile.dtype), operand, assert_trivial=True)


@gluon.jit
def multiply_pv(p, v_tile, acc):
    """Issue acc + P V, of a P from `rounded`: a token to wait for."""
    if is_fp8(v_tile.dtype):
        KEYS: gl.constexpr = v_tile.shape[1]
        operand: gl.constexpr = operand_layout(acc.type.layout, fp8=True)
        pairs = gl.join(p, p)
        fours = gl.join(pairs, pairs).reshape([WARPGROUP_ROWS, KEYS])
        fours = gl.convert_layout(fours, operand, assert_trivial=True)
        p = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [fours], dtype=v_tile.dtype, is_pure=True, pack=4
        )
        return warpgroup_mma(p, v_tile.permute((1, 0)), acc, is_async=True)
    else:
        return warpgroup_mma(p, v_tile, acc, is_async=True)
