"""Reading SASS, what a GPU executes: its instructions, its loops, and the order of events in them.

The listing is nvdisasm's. Loops are found in the control flow and not by backward jumps: ptxas puts
code that is rarely run, such as the retries of a wait, behind the end of the kernel.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import triton

MATRIX_PRODUCTS = ("HGMMA", "QGMMA", "HMMA", "QMMA", "UTCHMMA", "UTCQMMA")
LOCAL_MEMORY = ("LDL", "STL")  # where spilled registers go
JUMPS = ("BRA", "BRX", "JMP")
ENDS = ("EXIT", "RET", "BRX", "JMP")  # nothing follows, if unconditional; nor after BRA
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
    """An innermost loop that multiplies matrices; the instructions in the order of addresses."""

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


def control_flow(instructions: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """The instructions that may follow each instruction."""
    following = []
    for i, (predicate, _, operands) in enumerate(instructions):
        name = instructions[i].name
        targets = []
        if name in JUMPS:
            targets = [labels[label] for label in re.findall(r"\.L_\w+", operands)]
        conditional = bool(predicate) or re.match(r"!?U?P\d", operands)
        if name not in (*ENDS, "BRA") or conditional:
            targets.append(i + 1)
        following.append([target for target in targets if target < len(instructions)])
    return following


def loops(following: list[list[int]]) -> dict[int, set[int]]:
    """The natural loops of a control flow: their instructions by their head, the one way in."""
    before: list[list[int]] = [[] for _ in following]
    for i, targets in enumerate(following):
        for target in targets:
            before[target].append(i)
    order = postorder(following)
    rank = {node: place for place, node in enumerate(order)}
    dominator = immediate_dominators(order, rank, before)
    bodies: dict[int, set[int]] = {}
    for tail in order:
        for head in following[tail]:
            # Only what comes later in postorder can dominate.
            if rank[head] >= rank[tail] and dominates(head, tail, dominator):
                body = bodies.setdefault(head, {head})
                pending = [tail]
                while pending:
                    node = pending.pop()
                    if node not in body:
                        body.add(node)
                        pending += [node for node in before[node] if node in rank]
    return bodies


def postorder(following: list[list[int]]) -> list[int]:
    """The instructions that can be reached from the first, each after those that it leads to."""
    if not following:
        return []
    order: list[int] = []
    seen = {0}
    path = [(0, iter(following[0]))]
    while path:
        node, targets = path[-1]
        for target in targets:
            if target not in seen:
                seen.add(target)
                path.append((target, iter(following[target])))
                break
        else:
            order.append(node)
            path.pop()
    return order


def immediate_dominators(
    order: list[int], rank: dict[int, int], before: list[list[int]]
) -> dict[int, int]:
    """For each instruction the last that every path to it passes; of the first, itself.

    Source: Cooper, Harvey and Kennedy 2001, A Simple, Fast Dominance Algorithm.
    """
    dominator = {0: 0}
    changed = True
    while changed:
        changed = False
        for node in reversed(order):
            if node == 0:
                continue
            known = [other for other in before[node] if other in dominator]
            common = known[0]
            for other in known[1:]:
                while common != other:
                    if rank[common] < rank[other]:
                        common = dominator[common]
                    else:
                        other = dominator[other]
            if dominator.get(node) != common:
                dominator[node] = common
                changed = True
    return dominator


def dominates(node: int, other: int, dominator: dict[int, int]) -> bool:
    """Whether every path to `other` passes `node`."""
    while other not in (node, 0):
        other = dominator[other]
    return other == node


def find_hot_loops(listing: str) -> list[HotLoop]:
    """The innermost loops of a listing that multiply matrices, in the order of addresses.

    What lies behind a loop's last jump to its head is left out: retries, which ptxas moved there.
    """
    instructions, labels = parse(listing)
    following = control_flow(instructions, labels)
    hot = {
        head: body
        for head, body in loops(following).items()
        if any(instructions[i].name in MATRIX_PRODUCTS for i in body)
    }
    found = []
    for head, body in sorted(hot.items()):
        if any(other < body for other in hot.values()):
            continue
        last = max(i for i in body if head in following[i])
        found.append(HotLoop(tuple(instructions[i] for i in sorted(body) if i <= last)))
    return found


def disassemble(cubin: bytes) -> str:
    """The SASS of a cubin, with labels."""
    return run_tool("nvdisasm", cubin, "-c")


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack, where spilled registers go, as the cubin says."""
    out = run_tool("cuobjdump", cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    if not found:
        raise RuntimeError(f"cuobjdump does not tell what the kernel uses: {out.strip()!r}.")
    return int(found[1]), int(found[2])


def run_tool(name: str, cubin: bytes, option: str) -> str:
    """What one of the CUDA tools that come with Triton says about a cubin.

    Raises:
        RuntimeError: the tool is missing or refuses the cubin.
    """
    try:
        path = getattr(triton.knobs.nvidia, name).path
    except RuntimeError:
        raise RuntimeError(
            f"{name} is missing: Triton's Linux wheels bring it along; install one, or name "
            f"another in TRITON_{name.upper()}_PATH."
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([path, option, str(file)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"code {done.returncode}"]
        raise RuntimeError(f"{name} cannot read the kernel: {said[-1]}")
    return done.stdout
