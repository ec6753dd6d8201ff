"""Reading SASS, what a GPU executes: its instructions, its loops, and the order of events in them.

The listing is nvdisasm's.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import triton

MATRIX_PRODUCTS = ("HGMMA", "QGMMA", "HMMA", "QMMA", "UTCHMMA", "UTCQMMA")
LOCAL_MEMORY = ("LDL", "STL")  # where spilled registers go
ENDS = ("EXIT", "RET")
EVENTS = {  # beginning of an opcode -> what it is called in a hot loop's events
    "MUFU": None,
    "LDL": None,
    "STL": None,
    "BAR": None,
    "LDGSTS": "LDGSTS",
    "UTMALDG": "UTMALDG",
    "UTMASTG": "UTMASTG",
    "SYNCS.PHASECHK": "mbarrier wait",
    "SYNCS.ARRIVE": "mbarrier arrive",
}


class Instruction(NamedTuple):
    """One line of a listing; predicate is "" or as in "@!P0"."""

    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]


class Event(NamedTuple):
    """Something that a loop does a number of times before it does something else."""

    name: str
    times: int

    def __str__(self) -> str:
        return self.name if self.times == 1 else f"{self.name} x{self.times}"


@dataclass(frozen=True)
class HotLoop:
    """An innermost loop; the instructions in the order of addresses."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def opcodes(self) -> Counter[str]:
        """How often each opcode occurs, modifiers left off."""
        return Counter(instruction.name for instruction in self.instructions)

    @property
    def local_memory(self) -> int:
        """Loads and stores of spilled registers."""
        return sum(self.opcodes[name] for name in LOCAL_MEMORY)

    @cached_property
    def events(self) -> list[Event]:
        """What happens in which order, arithmetic left out.

        "HGMMA smem" multiplies with A in shared memory (in a forward: Q K^T), "HGMMA regs" with A
        in registers (P V, and Q K^T where Q is, too); "wait 1" waits until at most one batch of
        products is unfinished; MUFU.EX2 is the exponential.
        """
        events: list[Event] = []
        for instruction in self.instructions:
            name = event_name(instruction)
            if name is None:
                continue
            if events and events[-1].name == name:
                events[-1] = Event(name, events[-1].times + 1)
            else:
                events.append(Event(name, 1))
        return events


def event_name(instruction: Instruction) -> str | None:
    """What an instruction is called among a loop's events; None for arithmetic."""
    _, opcode, operands = instruction
    if instruction.name in ("HGMMA", "QGMMA"):
        place = "smem" if "gdesc" in operands.split(",")[1] else "regs"
        return f"{instruction.name} {place}"
    if instruction.name in MATRIX_PRODUCTS:
        return instruction.name
    if opcode.startswith("WARPGROUP.DEPBAR"):
        return f"wait {int(operands.split(',')[1], 0)}"
    for beginning, name in EVENTS.items():
        if opcode.startswith(beginning):
            return name or ".".join(opcode.split(".")[:2])
    return None


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a listing by `nvdisasm -c`, and the instruction that each label stands
    before.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := re.match(r"\s*(\.L_\w+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s)?\s*([A-Z][\w.]*)(.*?);", line):
            instructions.append(Instruction((found[1] or "").strip(), found[2], found[3].strip()))
    return instructions, labels


def innermost_loops(listing: str, wanted: Callable[[HotLoop], bool]) -> list[HotLoop]:
    """The loops of a listing that are wanted and have no other such loop in them, in the order of
    addresses: from a head to the last jump back to it.

    A jump back over the end of the kernel makes no loop: it comes from code that is rarely run,
    such as the retries of a wait, which ptxas puts behind that end.
    """
    instructions, labels = parse(listing)
    ends = [i for i, x in enumerate(instructions) if x.name in ENDS and not x.predicate]
    last: dict[int, int] = {}
    for i, instruction in enumerate(instructions):
        if instruction.name == "BRA":
            for head in (labels[x] for x in re.findall(r"\.L_\w+", instruction.operands)):
                if head <= i and not any(head <= end < i for end in ends):
                    last[head] = i
    loops = {(x, y): HotLoop(tuple(instructions[x : y + 1])) for x, y in sorted(last.items())}
    loops = {place: loop for place, loop in loops.items() if wanted(loop)}
    return [
        loop
        for (first, final), loop in loops.items()
        if sum(first <= x and y <= final for x, y in loops) == 1
    ]


def find_hot_loops(listing: str) -> list[HotLoop]:
    """The innermost loops of a listing that multiply matrices."""
    return innermost_loops(listing, lambda x: any(x.opcodes[name] for name in MATRIX_PRODUCTS))


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, with labels.

    Raises:
        RuntimeError: nvdisasm, which comes with Triton, is missing or refuses the cubin.
    """
    try:
        path = triton.knobs.nvidia.nvdisasm.path
    except RuntimeError:
        raise RuntimeError(
            "nvdisasm is missing: Triton's Linux wheels bring it along; install one, or name "
            "another in TRITON_NVDISASM_PATH."
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([path, "-c", str(file)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"code {done.returncode}"]
        raise RuntimeError(f"nvdisasm cannot read the kernel: {said[-1]}")
    return done.stdout
