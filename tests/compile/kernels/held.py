"""Forwards on Hopper with Q in registers, a row for each loop of each kernel. See apart.py."""

import re

import torch

from flash_versions.dispatch.request import make_request
from flash_versions.inspect.command import compile_call
from flash_versions.inspect.sass import HotLoop, Instruction

WIDTHS = {"16": 1, "32": 1, "64": 2, "96": 3, "128": 4}  # registers
PACKED = torch.tensor([0, 4096, 8192], dtype=torch.int32)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window, softcap": {"window": (1000, 5), "softcap": 20.0},
    "sink, lengths": {"causal": True, "sink": torch.zeros(8), "kv_lengths": torch.zeros(2).int()},
    "packed": {"causal": True, "cu_seqlens_q": PACKED, "cu_seqlens_k": PACKED},
    "fp8": {"precision": "fp8:block:e4m3"},
    "fp8, causal": {"precision": "fp8:block:e4m3", "causal": True},
}
DIMS = ((64, 64), (80, 80), (128, 128), (192, 192), (256, 256), (128, 256))


def written(operands: str, opcode: str) -> set[int]:
    """The registers that an instruction writes, if its first operand is one."""
    first = re.match(r"R(\d+)\b", operands)
    if first is None or opcode.startswith(("ST", "RED", "ATOMS", "R2UR")):
        return set()
    if product := re.match(r"[HQ]GMMA\.64x(\d+)", opcode):
        number = int(product[1]) // 2
    elif opcode.startswith("LDSM"):
        number = int(opcode.split(".")[-1])
    elif opcode.startswith("CS2R"):
        number = 1 if ".32" in opcode else 2
    else:
        wide = [WIDTHS[x] for x in opcode.split(".")[1:] if x in WIDTHS]
        number = max([2 if ".WIDE" in opcode else 1, *wide])
    return set(range(int(first[1]), int(first[1]) + number))


def lost(loop: HotLoop) -> tuple[int, list[int]]:
    """How many products of a loop begin a sum and have their left operand in registers, which is Q;
    and which of these registers have another value by then than a copy of what is kept elsewhere.
    """
    products = [x.operands for x in loop.instructions if is_product(x)]
    sums = {operands.split(",")[0] for operands in products if ", RZ" in operands}
    writer: dict[int, str] = {}
    number, wrong = 0, set()
    for x in loop.instructions * 2:  # what one round has written, the next one reads
        if is_product(x):
            to, left, *_ = [part.strip() for part in x.operands.split(",")]
            if to in sums and left.startswith("R"):
                number += 1
                first = int(left.split(".")[0][1:])
                wrong |= {n for n in range(first, first + 4) if writer.get(n, "MOV") != "MOV"}
        copies = x.name == "MOV" or x.opcode.startswith("IMAD.MOV")
        for n in written(x.operands, x.opcode):
            writer[n] = "MOV" if copies else x.name
    return number // 2, sorted(wrong)


def is_product(x: Instruction) -> bool:
    """Whether an instruction is one of the tensor cores."""
    return x.name in ("HGMMA", "QGMMA")


def rows(part: str = "fa3") -> list[dict]:
    """The rows of a version."""
    found = []
    for d, d_v in DIMS:
        for name, options in OPTIONS.items():
            if "fp8" in name and d > 128:
                continue
            shape = (8192,) if name == "packed" else (2, 4096)
            q, k = (torch.empty(*shape, 8, d, dtype=torch.bfloat16) for _ in range(2))
            v = torch.empty(*shape, 8, d_v, dtype=torch.bfloat16)
            for kernel in compile_call(part, make_request(q, k, v, **options)):
                if kernel.kernel == "forward_kernel":
                    loops = [lost(loop) for loop in kernel.hot_loops]
                    found.append({"call": f"{d}, {d_v}, {name}", "loops": loops})
    return found
