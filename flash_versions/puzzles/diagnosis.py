"""Which mistake is it? The learner's kernel with one repair gives the right numbers, or the
solution with a mistake of people's gives the same wrong ones.
"""

import runpy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flash_versions.checker.edits import by_itself, from_solution
from flash_versions.checker.observe import Fault
from flash_versions.simulator.state import here

SECONDS = 2.0  # for the search of a mistake
RATIOS = {1.442695: " = log2(e)", 0.693147: " = ln 2", -1.0: ", the wrong sign"}


def diagnosed(fault: Fault, case: Any, others: list[Any]) -> str:
    """A fault with what is known of its cause.

    Args:
        case: the `check.Case` on which a file is wrong.
        others: further ones, on which a repair has to be right.
    """
    is_number = hasattr(fault, "found")
    search = Search(case, others)
    causes = [search.unread() if is_number else None, search.repair(is_number)]
    if is_number and not causes[1]:
        causes.append(search.mistake(fault.i, fault.found))  # type: ignore[attr-defined]
    return ". ".join([str(fault).rstrip("."), *(f"{x[0].upper()}{x[1:]}" for x in causes if x)])


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


class Search:
    """The search for what is wrong with a file: see `diagnosed`."""

    def __init__(self, case: Any, others: list[Any]) -> None:
        self.case, self.others = case, others
        self.end, self.number = time.process_time() + SECONDS, 0
        self.folder = tempfile.TemporaryDirectory()

    def function(self, text: str) -> Any:
        """The function of a changed file; None if there is none, or no more time."""
        self.number += 1
        file = Path(self.folder.name, f"edit_{self.number}.py")
        try:
            if time.process_time() < self.end and file.write_text(text):
                return runpy.run_path(str(file)).get(self.case.puzzle.name)
        except Exception:  # a change need not be Python
            pass
        return None

    def unread(self) -> str | None:
        """Which elements the solution loads and the file does not."""
        try:
            pairs = [
                self.case.call(x, notes_reads=True)[1]
                for x in (self.function(self.case.puzzle.solution), self.case.function)
            ]
        except Fault:
            return None
        for name in (x for x, value in self.case.given.items() if torch.is_tensor(value)):
            right, own = (watch.never_read(watch.inputs[name]) for watch in pairs)
            if (left := own & ~right).any():
                first, last = (left.nonzero()[i].tolist() for i in (0, -1))
                return (
                    f"{int(left.sum())} elements of {name} are left out, {name}{first} to "
                    f"{name}{last}: no load or box has them"
                )
        return None

    def repair(self, is_number: bool) -> str | None:
        """What has to be written for the file to be right; of wrong numbers, also what the solution
        does not have.
        """
        text = Path(self.case.file).read_text()
        for found in from_solution(text, self.case.puzzle.solution):
            if self.is_right(found[0].text):
                return "; ".join(x.said(is_number) for x in found)
        for one in by_itself(text) if is_number else ():
            if self.is_right(one.text):
                return one.said()
        return None

    def is_right(self, text: str) -> bool:
        """Whether a changed file is right on the case, and on others."""
        function, here.trusts = self.function(text), True
        try:
            for case in (self.case, *self.others) if function else ():
                case.check(function)
            here.trusts = False
            if function:
                self.case.check(function)
        except Fault:
            return False
        finally:
            here.trusts = False
        return function is not None

    def mistake(self, i: int, found: torch.Tensor) -> str | None:
        """The mistake in the solution that gives these numbers."""
        case = self.case
        for one in by_itself(case.puzzle.solution):
            function, here.trusts = self.function(one.text), True
            try:
                results, _ = case.call(function, lenient=True) if function else (None, None)
            except Fault:
                continue
            finally:
                here.trusts = False
            if results is not None and case.wrong(i, results[i]) is not None:
                same = case.close(i, found, results[i]) | (found.isnan() & results[i].isnan())
                if same.all():
                    said = one._replace(old=one.new, new=one.old).said()
                    return f"exactly these numbers come from a mistake: {said.partition(': ')[2]}"
        return None
