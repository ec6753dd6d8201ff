"""Inline PTX: what kernels for Hopper write that Gluon has no word for.

The text is read, so that what is wrong in it has its effect. A register is one of all threads of a
partition at once, with 32 bits or a predicate: an array (warps, lanes, calls), as the text is
executed once for every `pack` elements that a thread holds. What all threads have alike, a scalar
or a pointer, is one element for all; where threads are elected, one of each warp of the partition
counts.
"""

import functools
import math
import operator
import re

import numpy as np

from flash_versions.simulator import dtypes
from flash_versions.simulator.dtypes import converted, decode, encode, float32
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.simulator.gluon.mbarrier import named_barrier
from flash_versions.simulator.gluon.tma import wait_stored
from flash_versions.simulator.state import here
from flash_versions.simulator.values import Pointer, Tile, to_tensor

u32 = np.uint32
UNWRITTEN = u32(0xFFFFFFFF)  # a NaN
EVERYONE = np.ones((1, 1, 1), bool)
ELECTED = (np.arange(32) == 0).reshape(1, 32, 1).repeat(4, 0)  # a thread of each warp
FENCES = "fence.acq_rel.gpu", "fence.proxy.async.global"  # relaxed: both; acquire: the second


@functools.cache
def places(shape, pack):
    """Which elements the threads of a warpgroup have of its accumulator (64, columns), or of a
    number per row of it, as (warps, lanes, calls, pack); and where those that have each are.

    A thread has two neighbouring columns of eight and two rows, and so on for every eight columns.
    As the operand of a product of 8 bits, of which four are packed, it has four neighbours.
    """
    index = np.arange(math.prod(shape))
    if len(shape) > 1 and pack == 1:  # no matter which thread has which
        index = index.reshape(1, 1, -1, 1)
    elif len(shape) == 1:  # the four threads of a row have the same
        rows = index.reshape(4, 2, 8, 1).transpose(0, 2, 3, 1)
        index = rows.repeat(4, 2).reshape(4, 32, -1, pack)
    else:  # warp, half of its rows, row, group, thread, column
        parts = index.reshape(4, 2, 8, -1, 4, 4 if pack == 4 else 2)
        index = parts.transpose(0, 2, 4, 3, 1, 5).reshape(4, 32, -1, pack)
    return index, np.unique(index, return_index=True)[1].reshape(shape)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    if "%clock64" in asm:
        return Tile(np.int64(here.partition.machine.tick()), dtypes.int64)
    args = [to_tensor(x) for x in args]
    shape = np.broadcast_shapes(*(x.shape for x in args))
    given = [x for arg in args for x in registers_of(arg, shape, pack)]
    results, names, tied = named_by(constraints)
    if len(names) != len(given):
        raise CompileError(f"{len(names)} constraints for {len(given)} registers")
    registers = dict.fromkeys(results, UNWRITTEN) | dict(zip(names, given))
    registers |= {result: registers[name] for result, name in tied}
    Threads(registers).execute(parsed(asm))
    found = [registers[name] for name in results]
    if shape:  # which a constant has not
        found = np.broadcast_arrays(given[0], *found)[1:]
    found = np.stack(found, -1)
    narrow = dtype.itemsize * pack < 4  # a register has one element of 8 or 16 bits
    found = found.astype(dtype.stored) if narrow else found.view(dtype.stored)
    return Tile(decode(found.take(places(shape, pack)[1] if shape else 0), dtype), dtype)


@functools.cache
def named_by(constraints):
    """The registers of results, those of arguments, and (result, argument) that share one."""
    kinds = constraints.replace(" ", "").split(",")
    names = [f"${i}" for i in range(len(kinds))]
    number = sum(kind[0] == "=" for kind in kinds)
    tied = [(f"${kind}", name) for kind, name in zip(kinds, names) if kind.isdigit()]
    return names[:number], names[number:], tied


def registers_of(x, shape, pack):
    """The registers that a call is given of an argument: two elements of 16 bits share one."""
    if isinstance(x, Pointer):
        return [x]
    size = x.dtype.itemsize
    bits = np.asarray(encode(x.a, x.dtype)).view(f"u{size}")
    if not x.shape:  # one number for all
        return [bits.astype(u32).reshape(1, 1, 1)] * (pack if shape else 1)
    threads = np.broadcast_to(bits, shape).take(places(shape, pack)[0])
    return list(np.moveaxis(threads.view(u32) if size * pack >= 4 else threads.astype(u32), -1, 0))


# ------------------------------------------------------------------------------- the text
@functools.cache
def parsed(asm):
    """The statements of a text: (guard or "", name, operands); a label has the name ":"."""
    text = re.sub(r"//.*", "", asm).strip().removeprefix("{").removesuffix("}")
    steps = []
    for statement in re.split(r"(?<=[:;])", text):
        statement = " ".join(statement.strip(" ;\n\t").split())
        if statement.endswith(":"):
            steps.append(("", ":", (statement[:-1],)))
        elif statement and not statement.startswith(".reg"):
            guard, name, rest = re.fullmatch(r"(?:@(!?\w+) )?(\S+) ?(.*)", statement).groups()
            operands = map(operand, re.findall(r"\{[^}]*\}|[^\s,]+", rest))
            steps.append((guard or "", name, tuple(operands)))
    return steps


def operand(text):
    """The name of a register, a constant, or the names of two registers of 16 bits."""
    if text[0] == "{":
        return tuple(re.findall(r"\w+", text))
    if not re.match(r"-?\d", text):
        return text.removeprefix("_|").strip("[]")
    return u32(int(text.replace("0f", "0x"), 16 if text[0] == "0" else 10) & 0xFFFFFFFF)


class Threads:
    """The threads of a partition, which execute a text. Those that have taken a branch forward do
    nothing until its label; a branch backward they take together.

    Attributes:
        active: which do not wait; away: label -> those that wait there.
        loaded: the pointer and the number of the last load.
    """

    def __init__(self, registers):
        self.registers, self.active, self.away, self.loaded = registers, EVERYONE, {}, None

    def execute(self, steps):
        place = 0
        while place < len(steps):
            guard, name, operands = steps[place]
            function = None if guard else INSTRUCTIONS.get(name)
            if function is not None:
                self.assign(operands[0], function(*(self.value(x) for x in operands[1:])))
            elif name == ":":
                self.active = self.active | self.away.pop(operands[0], False)
            elif name == "bra":
                place = self.branch(steps, place)
            else:
                self.synchronize(guard, name, operands)
            place += 1

    def value(self, x):
        """What is in a register, a constant, or two registers of 16 bits as one."""
        if type(x) is str:
            return self.registers[x]
        return x if type(x) is u32 else joined(*(self.registers[y] for y in x))

    def assign(self, target, found):
        """Give a register, or the two halves of a pair, a value in threads that wait nowhere."""
        if isinstance(target, tuple):
            self.assign(target[0], found & u32(0xFFFF))
            self.assign(target[1], found >> u32(16))
            return
        if self.away:
            found = np.where(self.active, found, self.registers.get(target, UNWRITTEN))
        self.registers[target] = found

    def chosen(self, guard):
        """The active threads whose predicate, if there is a guard, says so."""
        if not guard:
            return self.active
        return self.active & (self.registers[guard.strip("!")] ^ (guard[0] == "!"))

    def branch(self, steps, place):
        """Take a branch; returns the place behind which the text goes on.

        A branch backward waits for what other programs write to memory: it is taken when that has
        changed.
        """
        guard, _, (label,) = steps[place]
        if ("", ":", (label,)) not in steps:
            raise CompileError(f"there is no label {label}")
        taken, target = self.chosen(guard), steps.index(("", ":", (label,)))
        if not taken.any():
            return place
        if target > place and not taken.all():
            self.away[label] = self.away.get(label, False) | taken
            self.active = self.active & ~taken
            return place
        if target < place:
            if (self.active & ~taken).any():
                raise CompileError(f"some threads only go back to {label}, which is not simulated")
            pointer, seen = self.loaded
            has_changed = lambda: pointer.memory.data[pointer.offset] != seen  # noqa: E731
            here.partition.machine.polling.append((has_changed, here.partition))
            here.partition.wait()
        return target

    def synchronize(self, guard, name, operands):
        """Loads and additions in memory, barriers, fences, and the wait for what TMA writes."""
        partition, threads = here.partition, self.chosen(guard)
        if guard and not name.startswith("red."):
            raise CompileError(f"@{guard} in front of {name} is not simulated")
        if not threads.any():
            return
        if name in ("ld.acquire.gpu.global.u32", "ld.relaxed.gpu.global.u32"):
            pointer = self.pointer_in(operands[1])
            self.loaded = pointer, pointer.memory.data[pointer.offset]
            partition.before_tma = set(FENCES if "relaxed" in name else FENCES[1:])
            self.assign(operands[0], self.loaded[1].astype(u32).reshape(1, 1, 1))
        elif name in ("red.release.gpu.global.add.u32", "red.relaxed.gpu.global.add.u32"):
            if "relaxed" in name and partition.before_count:
                missing = " and ".join(partition.before_count)
                raise AccessError(f"what TMA wrote is counted without {missing}")
            pointer = self.pointer_in(operands[0])
            threads = np.broadcast_to(threads, ELECTED.shape)[: partition.threads // 32]
            added = np.where(threads, self.value(operands[1]), 0).sum()
            pointer.memory.data[pointer.offset] += added.astype(pointer.memory.data.dtype)
        elif name in FENCES:
            partition.before_tma -= {name}
            partition.before_count -= {name}
        elif name == "cp.async.bulk.wait_group":
            wait_stored(int(operands[0]))
        elif name in ("bar.sync", "bar.arrive"):
            number, count = (int(np.ravel(self.value(x))[0]) for x in operands)
            named_barrier(name.removeprefix("bar."), number, count)
        elif name != "bar.warp.sync":
            raise CompileError(f"the PTX instruction {name} is not simulated")

    def pointer_in(self, register):
        """A pointer to one number of a tensor, when others may have come before."""
        here.partition.pause()
        pointer = self.registers[register]
        pointer.memory.check(pointer.offset, "load")
        return pointer


# ------------------------------------------------------------------------------- instructions
def half(x):
    """The fp16 in the lower half of a register."""
    return x.astype(np.uint16).view(np.float16)


def joined(low, high, size=16):
    """Two numbers of so many bits as one."""
    return low | high << u32(size)


def of_half(function):
    """An instruction on the fp16 in the lower halves."""
    return lambda *x: function(*map(half, x)).view(np.uint16).astype(u32)


def of_halves(function):
    """An instruction on two fp16 at once."""
    one = of_half(function)
    return lambda *x: joined(one(*x), one(*(y >> u32(16) for y in x)))


def of_fp32(function):
    """An instruction on fp32."""
    return lambda *x: function(*(y.view(np.float32) for y in x)).view(u32)


def widened(x):
    """The fp16 in the lower half of a register as fp32."""
    return half(x).astype(np.float32).view(u32)


def rounded(x, kind):
    """fp32 as the bits of another type; 8 bits hold its largest number at most."""
    bits = encode(converted(x.view(np.float32), float32, kind), kind)
    return bits.view(f"u{kind.itemsize}").astype(u32)


def pair_of(kind):
    """The instruction that rounds two fp32 to one register, or to a half of one."""
    size = kind.primitive_bitwidth
    return lambda high, low: joined(rounded(low, kind), rounded(high, kind), size)


def pair_of_halves(kind):
    """The instruction that rounds two fp16 to 8 bits each."""
    return lambda x: pair_of(kind)(widened(x >> u32(16)), widened(x))


def not_equal(a, b, other=False):
    """Whether two fp32 differ, of which none is NaN; or another predicate holds."""
    a, b = a.view(np.float32), b.view(np.float32)
    return (a < b) | (a > b) | other


def lower_halves(a, b, choice):
    """The lower halves of two registers as one."""
    if choice != 0x5410:
        raise CompileError("prmt is simulated with 0x5410 only")
    return joined(a & u32(0xFFFF), b)


FP8 = {"e4m3x2": dtypes.float8e4nv, "e5m2x2": dtypes.float8e5}
INSTRUCTIONS = {
    **{f"mov.{kind}": lambda x: x for kind in ("u32", "b32", "s32", "f32")},
    **{f"{name}.f32": of_fp32(getattr(operator, name)) for name in ("mul", "add", "sub")},
    **{f"setp.{name}.u32": getattr(operator, name) for name in ("lt", "le", "gt", "ge")},
    **{f"setp.{name}.b32": getattr(operator, name) for name in ("eq", "ne")},
    **{f"{name}.b32": getattr(operator, f"{name}_") for name in ("and", "or")},
    **dict.fromkeys(("setp.ne.f32", "setp.ne.or.f32"), not_equal),
    "selp.b32": lambda a, b, predicate: np.where(predicate, a, b),
    "vote.sync.any.pred": lambda x, mask: np.broadcast_to(x.any(1, keepdims=True), x.shape),
    "shl.b32": operator.lshift,
    "prmt.b32": lower_halves,
    "elect.sync": lambda mask: ELECTED,
    "lg2.approx.ftz.f32": of_fp32(np.log2),
    "add.f16x2": of_halves(np.add),
    "max.f16x2": of_halves(np.fmax),
    # In fp64, which holds a product and a sum of fp16 nearly.
    "fma.rn.f16x2": of_halves(lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float16)),
    "max.f16": of_half(np.fmax),
    "ex2.approx.f16": of_half(lambda x: np.exp2(x.astype("f4")).astype("f2")),
    "cvt.u32.u16": lambda x: x & u32(0xFFFF),
    "cvt.f32.f16": widened,
    "cvt.rn.satfinite.f16.f32": lambda x: rounded(x.view("f4").clip(-65504, 65504), dtypes.float16),
    "cvt.rn.bf16x2.f32": pair_of(dtypes.bfloat16),
    "cvt.rn.f16x2.f32": pair_of(dtypes.float16),
    **{f"cvt.rn.satfinite.{name}.f32": pair_of(kind) for name, kind in FP8.items()},
    **{f"cvt.rn.satfinite.{name}.f16x2": pair_of_halves(kind) for name, kind in FP8.items()},
}
