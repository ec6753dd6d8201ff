"""2^x on the multiply-add units, which relieves the special function unit.

An SM of Hopper computes 16 exponentials and 128 multiply-adds in a cycle, and a tile of attention
needs one exponential for each score. FlashAttention 4 computes a share of them with a polynomial,
where the multiply-add units have time left.

    x = n + f, n the nearest integer, f in -1/2 .. 1/2         Cody-Waite range reduction
    2^f ~ p(f) = 1 + c_1 f + ... + c_d f^d                      minimax, `fit_exp2` derives it
    2^x ~ p(f), with n added to the exponent in its bits

Adding MAGIC = 1.5 * 2^23, whose last bit is worth 1, rounds x to n and leaves n in the lowest
bits of the sum. Each element takes 5 + DEGREE instructions on a GPU (maximum, add, subtract,
subtract, DEGREE multiply-adds, and a shift and an add in one), in place of one that takes 8 cycles
of a warp.

Sources: Cody and Waite 1980, "Software Manual for the Elementary Functions"; its use for a share of
the elements: Zadouri et al. 2026, "FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for
Asymmetric Hardware Scaling", arXiv:2603.05451.
"""

import torch
import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
# By degree, c_d first, each rounded to fp32: `lessons/fit_exp2.py` derives them.
COEFFICIENTS = tl.constexpr(
    {
        2: (0.2398640215396881, 0.7029417753219604),
        3: (0.05500893294811249, 0.24221095442771912, 0.6932829022407532),
        4: (0.009582852944731712, 0.055906426161527634, 0.24024099111557007, 0.6931241750717163),
        5: (0.001326472731307149, 0.009671512991189957, 0.05550733581185341,
            0.24022242426872253, 0.6931470036506653),
    }
)  # fmt: skip
# The smallest degree whose error, once P is rounded to a dtype, is within what rounding alone may
# do: the same command.
DEGREES = {torch.bfloat16: 3, torch.float16: 4, torch.float8_e4m3fn: 2, torch.float8_e5m2: 2}


@triton.jit
def polynomial_exp2(x, DEGREE: tl.constexpr = 3):
    """2^x for fp32 x up to 127, without the special function unit.

    Exactly 1 at 0. At -127 and below, -inf included, exactly 0: there p(0) = 1, and the exponent of
    1 less 127 is that of 0. Between -127 and -126 some number below 2^-126. NaN gives NaN, or on a
    GPU, where it has all bits set, the largest finite number, which 16-bit P rounds to infinity.
    """
    x = tl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    p = f * COEFFICIENTS[DEGREE][0] + COEFFICIENTS[DEGREE][1]
    for i in tl.static_range(2, DEGREE):
        p = p * f + COEFFICIENTS[DEGREE][i]
    p = p * f + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def mixed_exp2(x, EIGHTHS: tl.constexpr, DEGREE: tl.constexpr = 3):
    """2^x of a (rows, columns) tile: EIGHTHS eighths of it by the polynomial, the rest by the
    special function unit. Needs a multiple of 32 columns unless EIGHTHS is 0 or 8.

    The unit that computes a column depends on bits 4, 3 and 0 of its number. In the accumulator of
    a tensor core a thread has columns 8 i + 2 l + j, where l is its own and i and j are in
    registers: these bits are of i and j, so the choice is one of registers, and no data moves.
    """
    if EIGHTHS == 0:
        return tl.exp2(x)
    elif EIGHTHS == 8:
        return polynomial_exp2(x, DEGREE)
    else:
        ROWS: tl.constexpr = x.shape[0]
        COLUMNS: tl.constexpr = x.shape[1]
        tl.static_assert(COLUMNS % 32 == 0, "eighths are of 32 columns")
        UNIT: tl.constexpr = EIGHTHS & -EIGHTHS
        y = share_exp2(tl.reshape(x, (ROWS, COLUMNS // 32, 32)), EIGHTHS, 8, UNIT, DEGREE)
        return tl.reshape(y, (ROWS, COLUMNS))


@triton.jit
def share_exp2(x, PARTS: tl.constexpr, OF: tl.constexpr, UNIT: tl.constexpr, DEGREE: tl.constexpr):
    """2^x of (rows, groups, columns), PARTS of OF parts of each group by the polynomial: of two
    halves, the first gets as much of it as it can take.

    Both are halved further, down to UNIT parts, even where one needs it no more: only then do they
    have the same layout in Gluon.
    """
    if OF > UNIT:
        HALF: tl.constexpr = OF // 2
        FIRST: tl.constexpr = HALF if PARTS > HALF else PARTS
        first, second = halve(x)
        first = share_exp2(first, FIRST, HALF, UNIT, DEGREE)
        second = share_exp2(second, PARTS - FIRST, HALF, UNIT, DEGREE)
        return unite(first, second)
    elif PARTS == OF:
        return polynomial_exp2(x, DEGREE)
    else:
        return tl.exp2(x)


@triton.jit
def halve(x):
    """(rows, groups, columns) as its left and its right columns; 8 columns, which go over all
    threads that share a row, as the even and the odd ones.
    """
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1]
    HALF: tl.constexpr = x.shape[2] // 2
    if HALF == 4:
        return tl.split(tl.reshape(x, (ROWS, GROUPS, HALF, 2)))
    else:
        return tl.split(tl.permute(tl.reshape(x, (ROWS, GROUPS, 2, HALF)), (0, 1, 3, 2)))


@triton.jit
def unite(first, second):
    """What `halve` took apart."""
    ROWS: tl.constexpr = first.shape[0]
    GROUPS: tl.constexpr = first.shape[1]
    HALF: tl.constexpr = first.shape[2]
    pairs = tl.join(first, second)
    if HALF != 4:
        pairs = tl.permute(pairs, (0, 1, 3, 2))
    return tl.reshape(pairs, (ROWS, GROUPS, 2 * HALF))
