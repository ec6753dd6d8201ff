"""`mine inspect`: what the compiler makes of a file's forward, next to FA1 to FA4.

Instructions per score is the number to compare: those of the hot loop, counted for every thread,
over the scores that one pass of the loop computes. The products of the loop say how many scores
these are, because a score costs 4 * head_dim floating-point operations.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from triton.errors import TritonError

from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import VERSIONS
from flash_versions.inspect.compiled import ARCHES, Compiled, compile_call
from flash_versions.inspect.sass import HotLoop

WARP, WARPGROUP = 32, 128  # threads
TILE = r"memdesc<(\d+)x(\d+)x"


class Place(NamedTuple):
    """A line of the ranking."""

    version: str
    kernel: Compiled
    per_score: float  # instructions; infinite without a loop of products on the tensor cores

    @property
    def registers(self) -> str:
        """Per thread; of a kernel whose warps have roles, the fewest and the most."""
        of_roles = sorted(role.registers for role in self.kernel.roles)
        return f"{of_roles[0]}-{of_roles[-1]}" if of_roles else str(self.kernel.registers)

    def __str__(self) -> str:
        spilled = self.kernel.assembly.spill_stores + self.kernel.assembly.spill_loads
        per_score = "none" if self.per_score == float("inf") else f"{self.per_score:.1f}"
        fits = self.kernel.shared <= ARCHES[self.kernel.arch].shared_memory
        return (
            f"  {self.version:<12} {per_score:>22} {self.registers:>10} {spilled:>8} "
            f"{self.kernel.shared / 1024:>8.0f}{'' if fits else '  does not fit'}"
        )


HEADER = (
    f"  {'version':<12} {'instructions per score':>22} {'registers':>10} {'spilled':>8} {'KiB':>8}"
)


def operations(kernel: Compiled, loop: HotLoop) -> float:
    """Floating-point operations of a loop's matrix products, per thread."""
    total = 0.0
    for instruction in loop.instructions:
        if found := re.match(r"HMMA\.(\d+)(8)(16|8)\.", instruction.opcode):
            m, n, k = map(int, found.groups())
            total += 2 * m * n * k / WARP
        elif found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", instruction.opcode):
            m, n, k = map(int, found.groups())
            total += 2 * m * n * k / WARPGROUP
    if loop.opcodes["UTCHMMA"]:  # its shape is not in the SASS; one does K = 16
        lines = re.findall(r"tc_gen5_mma .*", kernel.ttgir)
        products = {tuple(map(int, sum(re.findall(TILE, line)[:2], ()))) for line in lines}
        work = sum(2 * m * k * n for m, k, _, n in products)
        steps = sum(k / 16 for _, k, _, _ in products)
        total += loop.opcodes["UTCHMMA"] * work / steps / (kernel.num_warps * WARP)
    return total


def per_score(kernel: Compiled, head_dim: int) -> float:
    """Instructions per score of the hot loop that needs the fewest: the one without a mask, in
    which a long sequence spends its time.
    """
    found = [float("inf")]
    for loop in kernel.hot_loops:
        if done := operations(kernel, loop):
            found.append(len(loop.instructions) * 4 * head_dim / done)
    return min(found)


def ranking(file: str, arch: str, head_dim: int) -> Iterator[Place]:
    """The forward kernels of FA1 to FA4 and of a file, for one architecture: bf16, no mask.

    Raises:
        ValueError: the file's version does not take such a call, or does not compile.
    """
    q = torch.empty(1, 4096, 16, head_dim, dtype=torch.bfloat16)
    for name in (*VERSIONS, file):
        try:
            kernels = compile_call(name, make_request(q, q, q), arch)
        except TritonError as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ValueError(f"{name} does not compile for {arch}: {(said or ['?'])[-1]}") from None
        if not kernels:
            raise ValueError(f"{name} launches no Triton kernel, so nothing can be compiled.")
        yield min(
            (Place(name, kernel, per_score(kernel, head_dim)) for kernel in kernels),
            key=lambda place: place.per_score,
        )


def lines(file: Path, arches: list[str], head_dim: int) -> Iterator[str]:
    """The rankings as text, the fewest instructions per score first."""
    for arch in arches:
        yield f"{arch} ({ARCHES[arch].example}), head_dim {head_dim}, bfloat16, no mask"
        yield HEADER
        found = ranking(str(file), arch, head_dim)
        yield from map(str, sorted(found, key=lambda place: place.per_score))
