"""`mine inspect`: what the compiler makes of a file's forward, next to FA1 to FA4.

Instructions per score is the number to compare: those of the hot loop, counted for every thread,
over the scores that one pass of the loop computes. The products of the loop say how many scores
these are, because a score costs 4 * head_dim floating-point operations.

On a B200 the number says little: exponentials take as long as the products there, and FA4 puts
several multiply-adds in the place of one, on units that are idle. So there is none for sm_100.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from triton.errors import TritonError

from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import VERSIONS
from flash_versions.inspect.compiled import ARCHES, Compiled, compile_call, last_line
from flash_versions.inspect.sass import HotLoop

PRODUCTS = {r"HMMA\.(\d+)(8)(16|8)\.": 32, r"HGMMA\.(\d+)x(\d+)x(\d+)": 128}  # of how many threads
ROW = "  {:<12} {:>22} {:>10} {:>8} {:>8}"
HEADER = ROW.format("version", "instructions per score", "registers", "spilled", "KiB")


def operations(loop: HotLoop) -> float:
    """Floating-point operations of a loop's matrix products, per thread."""
    total = 0.0
    for instruction in loop.instructions:
        for pattern, threads in PRODUCTS.items():
            if found := re.match(pattern, instruction.opcode):
                m, n, k = map(int, found.groups())
                total += 2 * m * n * k / threads
    return total


def per_score(kernel: Compiled, head_dim: int) -> float:
    """Instructions per score of the hot loop that needs the fewest: the one without a mask, in
    which a long sequence spends its time. Infinite without a loop of products.
    """
    found = [float("inf")]
    for loop in kernel.hot_loops:
        if done := operations(loop):
            found.append(len(loop.instructions) * 4 * head_dim / done)
    return min(found)


def row(name: str, kernel: Compiled, score: float) -> str:
    """A line of the ranking. Of a kernel whose warps have roles, it has the fewest and the most
    registers of a thread.
    """
    roles = sorted(role.registers for role in kernel.roles)
    registers = f"{roles[0]}-{roles[-1]}" if roles else str(kernel.registers)
    spilled = kernel.assembly.spill_stores + kernel.assembly.spill_loads
    said = "none" if score == float("inf") else f"{score:.1f}"
    fits = kernel.shared <= ARCHES[kernel.arch].shared_memory
    line = ROW.format(name, said, registers, spilled, f"{kernel.shared / 1024:.0f}")
    return line if fits else f"{line}  does not fit"


def lines(file: Path, arches: list[str], head_dim: int) -> Iterator[str]:
    """For each architecture, the forward kernels of FA1 to FA4 and of a file, the fewest
    instructions per score first: bf16, no mask.

    Raises:
        ValueError: the file's version does not take such a call, or does not compile.
    """
    q = torch.empty(1, 4096, 16, head_dim, dtype=torch.bfloat16)
    for arch in arches:
        call = f"head_dim {head_dim}, bfloat16, no mask"
        yield f"{arch} ({ARCHES[arch].example}), {call}\n{HEADER}"
        places = []
        for name in (*VERSIONS, str(file)):
            try:
                kernels = compile_call(name, make_request(q, q, q), arch)
            except TritonError as error:
                why = last_line(error)
                raise ValueError(f"{name} does not compile for {arch}: {why}") from None
            if not kernels:
                raise ValueError(f"{name} launches no Triton kernel, so nothing can be compiled.")
            scores = [(per_score(kernel, head_dim), kernel) for kernel in kernels]
            score, kernel = min(scores, key=lambda x: x[0])
            places.append((score, row(name, kernel, score)))
        yield from (line for _, line in sorted(places))
