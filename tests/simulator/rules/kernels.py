"""Small kernels as learners write them: each breaks one rule of Triton's compiler, or none.

`refused` takes a name that the message has to hold; a line that may be blamed has `# here`. Where a
kernel becomes fine with other lines, these stand behind `fine: `, each at the line it replaces.
ARGUMENTS holds what kernels are called with, by the names of their parameters. Rules that a single
line breaks are in lines.py.
"""
# ruff: noqa: B007, F821, F841, PIE790, SIM105, SIM113, SIM300

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

KERNELS = {}


@dataclass(frozen=True)
class Rule:
    """A kernel, and what its author expects of the compiler.

    Attributes:
        name: what the message about a refused kernel has to hold.
        before: the first version of Triton that does not refuse it.
    """

    kernel: triton.JITFunction
    refused: bool
    name: str = ""
    before: tuple[int, int] = (99, 0)


def fine(function):
    """A kernel that compiles."""
    KERNELS[function.__name__] = Rule(triton.jit(function), refused=False)
    return KERNELS[function.__name__].kernel


def refused(name="", before=(99, 0)):
    """A kernel that does not compile."""

    def add(function):
        rule = Rule(triton.jit(function), True, name, before)
        KERNELS[function.__name__] = rule
        return rule.kernel

    return add


ARGUMENTS = {
    "x": torch.linspace(0.1, 1, 1024), "y": torch.linspace(1, 2, 1024), "out": torch.zeros(1024),
    "half": torch.ones(1024, dtype=torch.float16), "index": torch.arange(1024, dtype=torch.int32),
    "small": torch.ones(1024, dtype=torch.int8), "byte": torch.ones(1024, dtype=torch.uint8),
    "n": 100, "flag": 3, "scale": 0.5, "nothing": None, "BLOCK": 16, "ACT": "relu",
}  # fmt: skip
LIMIT = 100
WARPS = tl.constexpr(4)
SIZES = [16, 32]


def plain(a):
    return a + 1


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def double(a, factor=2.0):
    return a * factor


@triton.jit
def pair_of(a):
    return a, a * 2.0


# Loops: a name keeps its type.


@refused("total")
def scalar_becomes_a_tile(x, out, n, BLOCK: tl.constexpr):
    total = 0.0  # fine: total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        total += tl.load(x + i + tl.arange(0, BLOCK))  # here
    tl.store(out, tl.sum(total, 0))


@refused("offset")
def int32_becomes_int64(x, out, n):
    offset = 0  # fine: offset = tl.program_id(0).to(tl.int64)
    for i in range(n):
        offset += tl.program_id(0).to(tl.int64) * n  # here, fine: offset += tl.program_id(0) * n
    tl.store(out, tl.load(x + offset))


@refused("best")
def nothing_becomes_a_tile(x, out, n, BLOCK: tl.constexpr):
    best = None
    for i in range(0, n, BLOCK):
        best = tl.load(x + i + tl.arange(0, BLOCK))  # here
    tl.store(out + tl.arange(0, BLOCK), best)


@refused("BLOCK")
def constexpr_changes_in_a_loop(x, out, n, BLOCK: tl.constexpr):
    first = BLOCK * 2  # fine: BLOCK = BLOCK * 2
    for i in range(n):
        BLOCK = BLOCK * 2  # here, fine: BLOCK += 2
    tl.store(out, BLOCK)


@refused("pair")
def tuple_changes_type(x, out, n):
    pair = (0.0, 1.0)
    for i in range(n):
        pair = (pair[0], i)  # here, fine: pair = (pair[1], pair[0] + tl.load(x + i))
    tl.store(out, pair[0])


# Loops: what may stand in them.


@refused("last")
def bound_in_a_loop_only(x, out, n):
    first = 0.0  # fine: last = 0.0
    for i in range(n):
        last = tl.load(x + i)
    tl.store(out, last)  # here


@refused("break")
def break_in_a_loop(x, out, n):
    for i in range(n):
        if i > 10:
            break  # here
        tl.store(out + i, tl.load(x + i))


@refused("continue")
def continue_in_a_loop(x, out, n):
    for i in range(n):
        if i == 3:
            continue  # here, fine: pass
        tl.store(out + i, tl.load(x + i))


@refused("return")
def return_in_a_loop(x, out, n):
    for i in range(n):
        if i > 1000:
            return  # here
        tl.store(out + i, tl.load(x + i))


@refused("else")
def for_with_else(out, n):
    i = 0
    for k in range(n):  # here
        i += 1
    else:
        tl.store(out, i)  # here


@refused()
def for_over_a_name(x, out):
    pointers = (x, out)
    for pointer in pointers:  # here, fine: for i in tl.static_range(len(pointers)):
        tl.store(pointer, 1)  # fine: tl.store(pointers[i], i)


@refused("append")
def list_that_grows(x, out):
    parts = []  # fine: parts = [tl.load(x + i) for i in (0, 1, 2, 3)]
    for i in tl.static_range(4):
        parts.append(tl.load(x + i))  # here, fine: pass
    tl.store(out, parts[0])


# Conditions.


@refused("value")
def bound_in_one_branch(x, out, n, BLOCK: tl.constexpr):
    if n > 10:  # fine: if BLOCK == 16:
        value = tl.load(x)
    tl.store(out, value)  # here


@refused("value")
def branches_bind_other_types(x, out, n):
    if n > 10:
        value = tl.load(x)
        unused = 1
    else:
        value = 0  # here, fine: value = 0.0
    tl.store(out, value)


@refused(before=(3, 9))
def chained_comparison(out, n, flag):
    if 0 < n < 200:  # here, fine: if 0 < n and not (n > 200 or flag == 4):
        tl.store(out, 1.0)


@refused("third")
def elif_chain_with_a_gap(x, out, n):
    third = 0
    if n < 10:
        third = 1
    elif n < 20:
        third = 2.0  # here, fine: third = 2
    tl.store(out, third)


# Sizes are known at compile time.


@refused("half_size")
def size_is_halved_in_a_loop(x, out, BLOCK: tl.constexpr):
    half_size = BLOCK // 2
    for i in tl.static_range(2):
        cols = tl.arange(0, half_size)  # here, fine: cols = tl.arange(0, BLOCK >> i)
        tl.store(out + cols, 1.0)


# Calls.


@triton.jit
def two_types(a):
    if a > 1000:
        return a  # here
    return 0.5  # here


@refused("two_types")
def helper_returns_two_types(out, n):
    tl.store(out, two_types(n))  # here, fine: tl.store(out, one_type(n))


@triton.jit
def one_type(a):
    if a > 1000:
        return a
    return 5


@triton.jit
def first(a):
    return a[0]  # here


@refused()
def helper_breaks_a_rule(x, out, BLOCK: tl.constexpr):
    tl.store(out, first(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def shifted(x, shift=None, LEFT: tl.constexpr = True):
    if LEFT:
        x = -x
    if shift is not None:
        return x + shift
    return x


@fine
def helper_with_defaults(x, out):
    value = shifted(tl.load(x))
    value = shifted(value, tl.load(x), LEFT=False)
    tl.store(out, shifted(value, shift=3))


# Statements.


@refused("try")
def try_statement(x, out):
    try:  # here
        tl.store(out, tl.load(x))
    except ValueError:
        pass


@refused("match")
def match_statement(out, n):
    match n:  # here
        case 1:
            tl.store(out, 1.0)


@refused(before=(3, 8))
def named_expression(out, n):
    if (m := n - 1) > 0:  # here
        tl.store(out, m)


@fine
def string_is_compared(x, out, ACT: tl.constexpr):
    """A docstring is no statement."""
    value = tl.load(x)
    if ACT == "relu":
        value = tl.maximum(value, 0.0)
    pass
    tl.store(out, value)
