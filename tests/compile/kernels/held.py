"""Forwards on Hopper with Q in registers, a row for each loop of each kernel. See apart.py."""

import re

import torch

from flash_versions.dispatch.request import make_request
from flash_versions.inspect.command import compile_call
from flash_versions.inspect.sass import Instruction, control_flow, loops, parse

WIDTHS = {"16": 1, "32": 1, "64": 2, "96": 3, "128": 4}  # registers
PACKED = torch.tensor([0, 4096, 8192], dtype=torch.int32)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window, softcap": {"window": (1000, 5), "softcap": 20.0},
    "sink, lengths": {"causal": True, "sink": torch.zeros(8), "kv_lengths": torch.zeros(2).int()},
    "packed": {"causal": True, "cu_seqlens_q": PACKED, "cu_seqlens_k": PACKED},
    "groups": {"causal": True},
    "intervals": {"query_ends": torch.zeros(4096).int()},
    "fp8": {"precision": "fp8:block:e4m3"},
    "fp8, causal": {"precision": "fp8:block:e4m3", "causal": True},
}
DIMS = ((64, 64), (80, 80), (128, 128), (192, 192), (256, 256), (128, 256))


def written(operands: str, opcode: str) -> set[int]:
    """The registers that an instruction writes, if its first operand is one."""
    first = re.match(r"R(\d+)\b", operands)
    if first is None or opcode.startswith(("ST", "RED", "ATOMS", "R2UR")):
        return set()
    if product := re.match(r"[HQ]GMMA\.64x(\d+)x\d+\.F(16|32)", opcode):
        number = int(product[1]) * int(product[2]) // 64
    elif opcode.startswith("LDSM"):
        number = int(opcode.split(".")[-1])
    elif opcode.startswith("CS2R"):
        number = 1 if ".32" in opcode else 2
    else:
        wide = [WIDTHS[x] for x in opcode.split(".")[1:] if x in WIDTHS]
        number = max([2 if ".WIDE" in opcode else 1, *wide])
    return set(range(int(first[1]), int(first[1]) + number))


def hot_loops(listing: str) -> list[tuple[list[Instruction], list[Instruction]]]:
    """The innermost loops that multiply matrices, which walk over blocks of keys, each with the
    smallest loop around it, which walks over tiles: their instructions in the order of addresses,
    without what ptxas moved behind a loop's last jump to its head.
    """
    instructions, labels = parse(listing)
    following = control_flow(instructions, labels)

    hot = {
        head: body
        for head, body in loops(following).items()
        if any(is_product(instructions[i]) for i in body)
    }

    def text(head: int) -> list[Instruction]:
        last = max(i for i in hot[head] if head in following[i])
        return [instructions[i] for i in sorted(hot[head]) if i <= last]

    found = []
    for head, body in sorted(hot.items()):
        if not any(other < body for other in hot.values()):
            _, around = min((len(other), x) for x, other in hot.items() if body < other)
            found.append((text(head), text(around)))
    return found


def lost(loop: list[Instruction], loads: tuple[str, ...] = ()) -> tuple[int, list[int]]:
    """How many products of a loop are of a sum that begins there and have their left operand in
    registers, which is Q; and which of these registers have another value by then than what one of
    `loads` has read or a copy of what is kept elsewhere.
    """
    writer: dict[int, str] = {}
    sums, number, wrong = set(), 0, set()
    for x in loop * 2:  # what one round has written, the next one reads
        if is_product(x):
            to, left, *_ = [part.strip() for part in x.operands.split(",")]
            if ", RZ" in x.operands:
                sums.add(to)
            elif writer.get(int(to[1:])) != x.name:  # something else than products wrote there
                sums.discard(to)
            if to in sums and left.startswith("R"):
                number += 1
                first = int(left.split(".")[0][1:])
                allowed = ("MOV", *loads)
                wrong |= {n for n in range(first, first + 4) if writer.get(n, "MOV") not in allowed}
        copies = x.name == "MOV" or x.opcode.startswith("IMAD.MOV")
        for n in written(x.operands, x.opcode):
            writer[n] = "MOV" if copies else x.name
    return number // 2, sorted(wrong)


def is_product(x: Instruction) -> bool:
    """Whether an instruction is one of the tensor cores."""
    return x.name in ("HGMMA", "QGMMA")


def read(listing: str) -> dict[str, list]:
    """What `lost` says of the loops over blocks, and of those over tiles, where Q is loaded."""
    found = hot_loops(listing)
    return {
        "loops": [lost(blocks) for blocks, _ in found],
        "walks": [lost(tiles, ("LDSM",)) for _, tiles in found],
    }


def rows(part: str = "fa3") -> list[dict]:
    """The rows of a version."""
    found = []
    for d, d_v in DIMS:
        for name, options in OPTIONS.items():
            if "fp8" in name and d > 128:
                continue
            shape = (8192,) if name == "packed" else (2, 4096)
            kv_heads = 2 if name == "groups" else 8
            q, k, v = (
                torch.empty(*shape, heads, width, dtype=torch.bfloat16)
                for heads, width in ((8, d), (kv_heads, d), (kv_heads, d_v))
            )
            for kernel in compile_call(part, make_request(q, k, v, **options)):
                if kernel.kernel == "forward_kernel":
                    found.append({"call": f"{d}, {d_v}, {name}", **read(kernel.sass)})
    return found
