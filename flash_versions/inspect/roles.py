"""The roles of a warp-specialised kernel: which function runs on how many warps and registers."""

import re
from typing import NamedTuple

GROUP = 4  # warps that get their registers together


class Role(NamedTuple):
    """A partition of a program's warps.

    Attributes:
        function: what they run.
        warps: how many they are.
        registers: of a thread; the first role has those that the others leave.
    """

    function: str
    warps: int
    registers: int


def find_roles(source: str, ttgir: str, num_warps: int, registers: int) -> list[Role]:
    """Read a kernel's roles; none of a kernel whose warps all do the same.

    Args:
        source: the kernel's text, which names the functions.
        ttgir: Triton's intermediate representation, which has their warps and registers.
        num_warps: warps of a program.
        registers: of a thread when the program starts.
    """
    requested = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", ttgir)
    if requested is None:
        return []
    wanted = [int(number) for number in requested[1].split(",")]
    warps = [int(n) for n in re.findall(r"^ *partition\d+\(.*num_warps\((\d+)\)", ttgir, re.M)]
    lists = re.findall(r"warp_specialize\(\s*\[(.*?)\n\s*\],", source, re.DOTALL)
    named = [re.findall(r"\((\w+), \(", functions) for functions in lists]
    names = next(found for found in named if len(found) == len(warps) + 1)
    taken = sum(n * many for n, many in zip(warps, wanted)) + -sum(warps) % GROUP * wanted[-1]
    first = num_warps - sum(warps) - -sum(warps) % GROUP
    left = (num_warps * registers - taken) // first // 8 * 8
    return [Role(*role) for role in zip(names, [first, *warps], [left, *wanted])]
