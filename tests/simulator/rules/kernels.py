"""Small kernels as learners write them: each breaks one rule of Triton's compiler.

`refused` takes a name that the message has to hold; a line that may be blamed has `# here`. Where a
kernel becomes fine with other lines, these stand behind `fine: `, each at the line it replaces.
ARGUMENTS holds what kernels are called with, by the names of their parameters. Rules that a single
line breaks are in lines.py.
"""
# ruff: noqa: B007, F841, SIM105, SIM113

from typing import NamedTuple

import torch
import triton
import triton.language as tl

KERNELS = {}


class Rule(NamedTuple):
    """A kernel, and what its author expects of the compiler.

    Attributes:
        name: what the message about a refused kernel has to hold.
        before: the first version of Triton that does not refuse it.
    """

    kernel: triton.JITFunction
    refused: bool
    name: str = ""
    before: tuple[int, int] = (99, 0)


def refused(name):
    """A kernel that does not compile."""

    def add(function):
        KERNELS[function.__name__] = Rule(triton.jit(function), True, name)

    return add


ARGUMENTS = {
    "x": torch.linspace(0.1, 1, 1024), "y": torch.linspace(1, 2, 1024), "out": torch.zeros(1024),
    "half": torch.ones(1024, dtype=torch.float16), "index": torch.arange(1024, dtype=torch.int32),
    "small": torch.ones(1024, dtype=torch.int8), "byte": torch.ones(1024, dtype=torch.uint8),
    "n": 100, "flag": 3, "scale": 0.5, "nothing": None, "BLOCK": 16,
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
def shifted(a, shift=None, LEFT: tl.constexpr = True):
    if LEFT:
        a = -a
    if shift is not None:
        return a + shift
    return a


@triton.jit
def pair_of(a):
    return a, a * 2.0


# Loops.


@refused("pair")
def tuple_changes_type(x, out, n):
    pair = (0.0, 1.0)
    for i in range(n):
        pair = (pair[0], i)  # here, fine: pair = (pair[1], pair[0] + tl.load(x + i))
    tl.store(out, pair[0])


@refused("last")
def bound_in_a_loop_only(x, out, n):
    first = 0.0  # fine: last = 0.0
    for i in range(n):
        last = tl.load(x + i)
    tl.store(out, last)  # here


@refused("else")
def for_with_else(out, n):
    i = 0
    for k in range(n):  # here
        i += 1
    else:
        tl.store(out, i)  # here


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


@refused("third")
def elif_chain_with_a_gap(x, out, n):
    third = 0
    if n < 10:
        third = 1
    elif n < 20:
        third = 2.0  # here, fine: third = 2
    tl.store(out, third)


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


@refused("")
def helper_breaks_a_rule(x, out, BLOCK: tl.constexpr):
    tl.store(out, first(tl.load(x + tl.arange(0, BLOCK))))


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
