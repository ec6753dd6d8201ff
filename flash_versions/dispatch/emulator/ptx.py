"""Inline PTX for emulator.py: what the kernels for Hopper write that Gluon has no word for.

`elementwise` reads the text, so that what is wrong in it has its effect. A register is one of all
threads of a partition at once, with 32 bits or a predicate: a tensor (warps, lanes, calls), as the
text is executed once for every `pack` elements that a thread holds. What all threads have alike, a
scalar or a pointer, is one element for all; where threads are elected, one of each warp of the
partition counts.
"""

import re

import torch

from flash_versions.dispatch.emulator.machine import here, named_barrier
from flash_versions.dispatch.emulator.tma import wait_stored
from flash_versions.dispatch.emulator.values import Pointer

UNWRITTEN = torch.tensor(-1, dtype=torch.int32)  # a NaN
ELECTED = torch.arange(32).view(1, 32, 1).expand(4, 32, 1) == 0
FENCES = "fence.acq_rel.gpu", "fence.proxy.async.global"  # relaxed: both; acquire: the second
FP8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def to_threads(x, pack):
    """The elements of the accumulator (64, columns) of a warpgroup, of a number per row of it or of
    a scalar, as (warps, lanes, calls, pack).

    A thread has two neighbouring columns of eight and two rows, and so on for every eight columns.
    As the operand of a product of 8 bits, of which four are packed, it has four neighbours.
    """
    if x.dim() == 0:
        return x.view(1, 1, 1, 1)
    if x.dim() == 2 and pack == 1:  # no matter which thread has which
        return x.reshape(1, 1, -1, 1)
    if x.dim() == 1:  # the four threads of a row have the same
        return x.view(4, 2, 8, 1).permute(0, 2, 3, 1).repeat(1, 1, 4, 1).view(4, 32, -1, pack)
    width = 4 if pack == 4 else 2
    parts = x.reshape(4, 2, 8, -1, 4, width)  # warp, half of its rows, row, group, thread, column
    return parts.permute(0, 2, 4, 3, 1, 5).reshape(4, 32, -1, pack)


def from_threads(x, shape):
    """The inverse of `to_threads`, for elements that may have another type."""
    if len(shape) == 0:
        return x.view(())
    if len(shape) == 2 and x.shape[3] == 1:
        return x.reshape(shape)
    if len(shape) == 1:
        return x.view(4, 8, 4, 2)[:, :, 0].transpose(1, 2).reshape(shape)
    width = 4 if x.shape[3] == 4 else 2
    parts = x.reshape(4, 8, 4, -1, 2, width)
    return parts.permute(0, 4, 1, 3, 2, 5).reshape(shape)


def elementwise(asm, constraints, args, dtype, pack):
    """The torch tensor that `inline_asm_elementwise` makes of torch tensors, which are broadcast to
    one shape; without any, a number.
    """
    if len(args) > 1 and not any(isinstance(x, Pointer) for x in args):
        args = torch.broadcast_tensors(*args)
    arguments = [x for arg in args for x in registers_of(arg, pack)]
    kinds = constraints.split(",")
    number = sum(kind.startswith("=") for kind in kinds)
    assert len(kinds) == number + len(arguments), "constraints do not match the arguments"
    alike = not args or isinstance(args[0], Pointer)
    shape = () if alike else args[0].shape
    unwritten = UNWRITTEN.expand((1, 1, 1) if alike else arguments[0].shape)
    registers = {f"${i}": unwritten for i in range(number)}
    for i, (kind, value) in enumerate(zip(kinds[number:], arguments, strict=True)):
        registers[f"${number + i}"] = value
        if kind.isdigit():  # in the register of that result
            registers[f"${kind}"] = value
    execute(asm, registers)
    results = torch.broadcast_tensors(*(registers[f"${i}"] for i in range(number)))
    results = torch.stack(results, -1)
    return from_threads(results.view(dtype), shape)


def registers_of(x, pack):
    """The registers that a call is given of an argument: two elements of 16 bits share one."""
    if isinstance(x, Pointer):
        return [x]
    if x.element_size() == 2:
        pairs = to_threads(x.view(torch.int16), pack).contiguous()
        return pairs.view(torch.int32).unbind(-1)
    return to_threads(bits(x), pack).unbind(-1)


def bits(x):
    """32-bit numbers as int32."""
    return x.view(torch.int32)


def execute(asm, registers):
    """Execute a text. Threads that have taken a branch forward do nothing until its label; while
    some have taken one backward, the others do nothing until it is not taken any more.
    """
    text = asm.strip().removeprefix("{").removesuffix("}")
    statements = [x.strip(" ;\n") for x in re.split(r"(?<=[:;])", text)]
    away = {}  # label, or place of a branch backward -> threads that wait there
    place = 0
    while place < len(statements):
        statement = statements[place]
        if statement.endswith(":"):
            away.pop(statement[:-1], None)
        elif " bra " in statement:
            place = branch(statement, place, statements, registers, away)
        elif statement and not statement.startswith(".reg"):
            step(statement, registers, away)
        place += 1
    assert not away, f"no label {', '.join(map(str, away))} that follows"


def branch(statement, place, statements, registers, away):
    """Take a branch; returns the place behind which the text goes on.

    A branch backward waits for what other programs write to memory: it is taken again when that has
    changed.
    """
    guard, label = re.fullmatch(r"@(!?\w+) bra (\w+)", statement).groups()
    away.pop(place, None)
    here_now = active(away)
    if not here_now.any():
        return place
    taken = guarded(guard, registers) & here_now
    if f"{label}:" not in statements[:place]:
        away[label] = taken
        return place
    if not taken.any():
        return place
    away[place] = here_now & ~taken
    pointer, seen = registers["loaded"]
    here.partition.pause(lambda: bool(pointer.data[pointer.offset] != seen))
    return statements.index(f"{label}:")


def guarded(guard, registers):
    """The threads whose predicate says so."""
    return registers[guard.removeprefix("!")] ^ guard.startswith("!")


def active(away):
    """The threads that wait nowhere."""
    found = torch.ones(1, 1, 1, dtype=torch.bool)
    for stay in away.values():
        found = found & ~stay
    return found


def step(statement, registers, away):
    guard, name, operands = re.fullmatch(r"(?:@(!?\w+) )?(\S+) ?(.*)", statement).groups()
    operands = re.findall(r"\{[^}]*\}|[^\s,]+", operands)
    threads = active(away)
    if name.startswith("red."):
        add(name, operands, registers, threads & guarded(guard, registers) if guard else threads)
        return
    assert guard is None, f"no guard in front of {name} is known"
    if not threads.any():
        return
    if name.startswith(("bar.", "fence.", "cp.")):
        synchronize(name, operands, registers)
        return
    target, *operands = operands
    if target.startswith("{"):  # two registers of 16 bits from one
        low, high = re.findall(r"\w+", target)
        both = value(*operands, registers)
        registers |= {low: both & 0xFFFF, high: both >> 16 & 0xFFFF}
        return
    if name.startswith("ld."):
        found = load(name, *operands, registers)
    elif name == "elect.sync":  # a thread of each warp
        target, found = target.partition("|")[2], ELECTED
    else:
        found = instruction(name, [value(x, registers) for x in operands])
    for stay in away.values():
        before = registers.get(target, UNWRITTEN).to(found.dtype)
        found = torch.where(stay, before, found)
    registers[target] = found


def synchronize(name, operands, registers):
    """Barriers, fences, and the wait for what TMA writes."""
    if name.startswith("fence."):
        assert name in FENCES, f"no {name} is known"
        here.partition.before_tma -= {name}
        here.partition.before_count -= {name}
    elif name == "cp.async.bulk.wait_group":
        wait_stored(int(operands[0]))
    elif name in ("bar.sync", "bar.arrive"):
        number, threads = (int(value(x, registers).flatten()[0]) for x in operands)
        named_barrier(name.removeprefix("bar."), number, threads)
    else:
        assert name == "bar.warp.sync", f"no instruction {name} is known"


def load(name, operand, registers):
    """A number in memory that threads load together."""
    kind = re.fullmatch(r"ld\.(acquire|relaxed)\.gpu\.global\.u32", name)[1]
    pointer = registers[operand.strip("[]")]
    here.partition.pause()
    seen = pointer.data[pointer.offset].clone()
    registers["loaded"] = pointer, seen
    here.partition.before_tma = set(FENCES if kind == "relaxed" else FENCES[1:])
    return seen.view(1, 1, 1)


def add(name, operands, registers, threads):
    """An addition in memory by each of these threads of a warpgroup."""
    kind = re.fullmatch(r"red\.(release|relaxed)\.gpu\.global\.add\.u32", name)[1]
    missing = here.partition.before_count
    assert kind == "release" or not missing, f"what TMA wrote is counted without {missing}"
    pointer = registers[operands[0].strip("[]")]
    here.partition.pause()
    threads = threads.expand(ELECTED.shape)[: here.partition.threads // 32]
    added = torch.where(threads, value(operands[1], registers), 0).sum()
    pointer.data[pointer.offset] += added.to(pointer.data.dtype)


def value(operand, registers):
    """A register, a constant, or two registers of 16 bits as one."""
    if operand.startswith("{"):
        low, high = (registers[x] for x in re.findall(r"\w+", operand))
        return low | high << 16
    if operand in registers:
        return registers[operand]
    constant = int(operand.replace("0f", "0x"), 16 if operand.startswith("0") else 10)
    return torch.tensor(constant).to(torch.int32)


def instruction(name, operands):
    match name.split("."):
        case ["mov", _]:
            return operands[0]
        case ["mul", "f32"]:
            return bits(operands[0].view(torch.float32) * operands[1].view(torch.float32))
        case ["lg2", "approx", "ftz", "f32"]:
            return bits(torch.log2(operands[0].view(torch.float32)))
        case ["setp", "ne", "b32"]:
            return operands[0] != operands[1]
        case ["setp", "lt", "u32"]:  # of counts, which are no larger than an int32
            return operands[0] < operands[1]
        case ["setp", "ge", "u32"]:
            return operands[0] >= operands[1]
        case ["setp", "ne", *more, "f32"]:
            a, b = (x.view(torch.float32) for x in operands[:2])
            found = (a != b) & ~a.isnan() & ~b.isnan()
            return found | operands[2] if more == ["or"] else found
        case ["selp", "b32"]:
            return torch.where(operands[2], operands[0], operands[1])
        case ["vote", "sync", "any", "pred"]:
            return operands[0].any(1, keepdim=True).expand_as(operands[0])
        case ["shl", "b32"]:
            return operands[0] << operands[1]
        case ["and", "b32"]:
            return operands[0] & operands[1]
        case ["prmt", "b32"]:
            assert int(operands[2]) == 0x5410, "no other choice of bytes is known"
            return operands[0] & 0xFFFF | operands[1] << 16
        case ["add" | "max" as kind, "f16x2"]:
            function = {"add": torch.add, "max": torch.fmax}[kind]
            return joined(map(function, *map(halves, operands)))
        case ["fma", "rn", "f16x2"]:  # in fp64, which holds a product and a sum of fp16 nearly
            a, b, c = ([x.double() for x in halves(x)] for x in operands)
            return joined((x * y + z).half() for x, y, z in zip(a, b, c))
        case ["max", "f16"]:
            return half_bits(torch.fmax(*map(half, operands)))
        case ["ex2", "approx", "f16"]:
            return half_bits(torch.exp2(half(operands[0]).float()).half())
        case ["add", "f32"]:
            return bits(operands[0].view(torch.float32) + operands[1].view(torch.float32))
        case ["cvt", "u32", "u16"]:
            return operands[0] & 0xFFFF
        case ["cvt", "f32", "f16"]:
            return bits(half(operands[0]).float())
        case ["cvt", "rn", "satfinite", "f16", "f32"]:
            return half_bits(operands[0].view(torch.float32).clamp(-65504, 65504).half())
        case ["cvt", "rn", "bf16x2" | "f16x2" as kind, "f32"]:
            dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
            high, low = (x.view(torch.float32).to(dtype).view(torch.int16) for x in operands)
            return low.to(torch.int32) & 0xFFFF | high.to(torch.int32) << 16
        case ["cvt", "rn", "satfinite", kind, "f16x2"]:
            low, high = (x.float() for x in halves(operands[0]))
            return saturated(low, FP8[kind]) | saturated(high, FP8[kind]) << 8
        case ["cvt", "rn", "satfinite", kind, "f32"]:
            high, low = (x.view(torch.float32) for x in operands)
            return saturated(low, FP8[kind]) | saturated(high, FP8[kind]) << 8
    raise AssertionError(f"no instruction {name} is known")


def saturated(x, dtype):
    """fp32 rounded to 8 bits, those of int32."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).view(torch.uint8).to(torch.int32)


def half(x):
    """The fp16 in the lower half of a register."""
    return x.to(torch.int16).view(torch.float16)


def half_bits(x):
    """fp16 as the lower half of a register."""
    return x.view(torch.int16).to(torch.int32) & 0xFFFF


def halves(x):
    """The two fp16 of a register."""
    return half(x), half(x >> 16)


def joined(numbers):
    """Two fp16 as a register."""
    low, high = map(half_bits, numbers)
    return low | high << 16
