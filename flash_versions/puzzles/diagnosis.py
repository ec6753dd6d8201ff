"""Which mistake is it? The learner's kernel with one repair is right, or the solution with a
mistake of people's gives the same wrong numbers.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch

from flash_versions.checker.edits import by_itself, first_right, from_solution
from flash_versions.checker.observe import Fault
from flash_versions.simulator.state import here

SECONDS = 2.0  # for each search
LARGE = 3  # lines that are changed, of which one alone may be what is wrong
RATIOS = {1.442695: " = log2(e)", 0.693147: " = ln 2", -1.0: ", the wrong sign"}


class Wrong(Fault):
    """A wrong result: its case and number, what was found, and which elements are wrong."""

    def __init__(self, case: Any, i: int, found: torch.Tensor, wrong: torch.Tensor) -> None:
        super().__init__(i)
        self.case, self.i, self.found, self.wrong = case, i, found, wrong


def diagnosed(fault: Fault, case: Any, others: list[Any]) -> str:
    """A fault with what is known of its cause.

    Args:
        case: the `check.Case` on which a file is wrong.
        others: further ones, on which a repair has to be right.
    """
    text, solution = Path(case.file).read_text(), case.puzzle.solution
    said, end = [str(fault).rstrip(".")], process_time() + SECONDS

    def check(function: Callable) -> bool:
        for one in (case, *others):
            one.check(function)
        return True

    def is_right(file: Path) -> bool:
        return tried(file, case, check, trusts=True) and tried(file, case, check)

    edits = list(from_solution(text, solution))
    small = [x for x in edits if sum(y.old.count("\n") + y.new.count("\n") for y in x) < LARGE]
    found = first_right(small, is_right, end)
    if isinstance(fault, Wrong):
        said += unread(case)
        found = found or first_right(by_itself(text), is_right, end)
    large = [x for x in edits if x not in small]
    found = found or first_right(large, is_right, process_time() + SECONDS)
    if found:
        said.append("; ".join(x.said(explains=isinstance(fault, Wrong)) for x in found))
    elif isinstance(wrong := fault, Wrong):

        def compare(function: Callable) -> bool:
            result = case.call(function, lenient=True)[0][wrong.i]
            same = case.close(wrong.i, wrong.found, result)
            return bool(same.all()) and case.wrong(wrong.i, result) is not None

        if found := first_right(
            by_itself(solution),
            lambda file: tried(file, case, compare, trusts=True),
            process_time() + SECONDS,
        ):
            mistake = found[0]._replace(old=found[0].new, new=found[0].old).said()
            said.append(f"exactly these numbers come from a mistake: {mistake.partition(': ')[2]}")
    return ". ".join(f"{x[0].upper()}{x[1:]}" if i else x for i, x in enumerate(said))


def tried(file: Path, case: Any, check: Callable[[Callable], bool], trusts: bool = False) -> bool:
    """What is found of the function in a file; False if something is wrong with it. If types are
    trusted, what no compiler takes may be right, which is fast.
    """
    here.trusts = trusts
    try:
        return check(runpy.run_path(str(file))[case.puzzle.name])
    except Exception:  # a change need not be Python
        return False
    finally:
        here.trusts = False


def unread(case: Any) -> list[str]:
    """Which elements the solution loads and the file does not, in a sentence or in none."""
    try:
        solution = runpy.run_path(str(case.puzzle.path))[case.puzzle.name]
        pairs = [case.call(x, notes_reads=True)[1] for x in (solution, case.function)]
    except Fault:
        return []
    for name in (x for x, value in case.given.items() if torch.is_tensor(value)):
        right, own = (watch.never("read", watch.inputs[name]) for watch in pairs)
        if (left := own & ~right).any():
            first, last = (left.nonzero()[i].tolist() for i in (0, -1))
            number, ends = int(left.sum()), f"{name}{first} to {name}{last}"
            return [f"{number} elements of {name} are left out, {ends}: no load or box has them"]
    return []


def pattern(found: torch.Tensor, truth: torch.Tensor) -> str:
    """What a wrong result is to the right one, if that is simple."""
    found, finite = found.double(), truth.isfinite() & (truth.abs() > truth.abs().max() / 1e3)
    if found.dim() == 2 and found.shape[0] == found.shape[1] and torch.allclose(found.T, truth):
        return ": it is transposed"
    ratio = found[finite] / truth[finite]
    if len(ratio) > 1 and (ratio - ratio[0]).abs().max() < 1e-3 * ratio[0].abs():
        name = next((x for c, x in RATIOS.items() if abs(ratio[0] - c) < 1e-3), "")
        return f": each is {ratio[0]:.4g}{name} times what it should be"
    return ""
