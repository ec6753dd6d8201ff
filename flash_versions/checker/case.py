"""A call of a learner's file, held against the truth: what is wrong with it, and why."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch

from flash_versions.checker.observe import Fault, called
from flash_versions.checker.repairs import repairs
from flash_versions.simulator.checking import Watch
from flash_versions.simulator.origins import origin_of
from flash_versions.versions.oracle.budget import Accuracy

SECONDS = 2.0  # for the search of a repair
# What a wrong result may be multiplied by.
FACTORS = {"log2(e)": math.log2(math.e), "ln 2": math.log(2)}
Results = dict[str, torch.Tensor]
Function = Callable[..., Results]  # of the tensors and other values that are given


class Wrong(Fault):
    """Results that are wrong: some accuracies are over their budgets."""

    def __init__(self, results: Results, watch: Watch, accuracies: dict[str, Accuracy]) -> None:
        super().__init__()
        self.results, self.watch, self.accuracies = results, watch, accuracies


class Case:
    """A call. Those of puzzles and of `mine` say how a file is called, and what is right.

    Attributes:
        inputs: of the function, by name.
        truth: the right results in fp64, by name.
        factors: that a wrong result may have, by what they are.
        computes: whether a file may compute with PyTorch.
        largest: the most elements that a load may have, or None.
    """

    inputs: dict[str, Any]
    truth: Results
    factors: Mapping[str, float] = FACTORS
    computes = False
    largest: int | None = None

    def load(self, file: str) -> Function:
        """The function in a file."""
        raise NotImplementedError

    def assess(self, results: Results) -> dict[str, Accuracy]:
        """The errors of results, and what they may be."""
        raise NotImplementedError

    def mistake(self, name: str, found: torch.Tensor, wrong: torch.Tensor) -> str | None:
        """The mistake that gives a wrong result, in words, or None."""
        return None

    def call(self, function: Function, file: str, **options: Any) -> tuple[Results, Watch]:
        """The results of a function of a file, and what its kernels did; options are `Watch`'s."""
        options["largest"] = self.largest
        return called(function, self.inputs, file, self.computes, **options)

    def check(self, function: Function, file: str) -> tuple[Results, Watch]:
        """`call`, or a Fault if anything is wrong."""
        results, watch = self.call(function, file)
        if wrong := {name: x for name, x in self.assess(results).items() if not x.ok}:
            raise Wrong(results, watch, wrong)
        return results, watch

    def explained(
        self, function: Function, file: str, solution: str = "", others: Sequence["Case"] = ()
    ) -> list[str]:
        """What is wrong with the function of a file, in sentences; [] if nothing is.

        Args:
            solution: the text of a right file, lines of which may repair it; if there is none, no
                repair is sought.
            others: further cases, on which a repair has to be right.
        """
        try:
            self.check(function, file)
        except Wrong as wrong:
            said = self.described(wrong, function, file)
            return said + self.repaired(file, solution, others, explains=True)
        except Fault as fault:
            return [str(fault), *self.repaired(file, solution, others, explains=False)]
        return []

    def described(self, fault: Wrong, function: Function, file: str) -> list[str]:
        """Wrong results, what gives them, and where a NaN or an infinity comes from."""
        said, causes = [], list[str]()
        for name, accuracy in fault.accuracies.items():
            found, right = fault.results[name], self.truth[name]
            exact = found.double()
            error = torch.where(exact == right, 0.0, (exact - right).abs()).nan_to_num(
                math.inf, math.inf
            )
            wrong = error > accuracy.budget
            worst = [int(x) for x in torch.unravel_index(error.argmax(), error.shape)]
            if count := int((fault.watch.never_written(found) & wrong).sum()):
                return [
                    f"{count} elements of {name} were never stored, such as {name}{worst}: the "
                    "grid is too small, or the mask of the store leaves them out"
                ]
            value, truth = found[*worst].item(), right[*worst].item()
            said.append(
                f"{name}{worst} is {value:.5g}, and {truth:.5g} is right; {int(wrong.sum())} of "
                f"{wrong.numel()} elements are wrong, in {name}[{part_of(wrong)}]"
                f"{self.pattern(exact, right, accuracy.budget)}; {accuracy}"
            )
            if causes:
                continue
            if mistake := self.mistake(name, found, wrong):
                causes.append(mistake)
            elif not math.isfinite(value) and math.isfinite(truth):

                def again(name: str = name, worst: list[int] = worst) -> float:
                    return self.call(function, file)[0][name][*worst].item()

                causes += filter(None, [origin_of(again, file, value)])
        return said + causes

    def pattern(self, found: torch.Tensor, right: torch.Tensor, budget: float) -> str:
        """What a wrong result is to the right one, if that is simple."""
        if found.dim() == 2 and found.shape == found.T.shape and torch.allclose(found.T, right):
            return "; it is transposed"
        some = right.isfinite() & (right != 0)
        factor = (found[some] / right[some]).median().item() if some.sum() > 1 else 0.0
        if not factor or abs(factor - 1) < 1e-3 or not math.isfinite(factor + budget):
            return ""
        if ((found / factor - right)[some].abs() > max(1, 1 / abs(factor)) * budget).any():
            return ""
        name = next((f" = {x}" for x, c in self.factors.items() if abs(factor / c - 1) < 0.01), "")
        return f"; each is {factor:.4g}{name} times what it should be"

    def repaired(
        self, file: str, solution: str, others: Sequence["Case"], explains: bool
    ) -> list[str]:
        """A change of a file after which it is right, in a sentence or in none."""
        end = process_time() + SECONDS
        found = repairs(Path(file).read_text("utf-8"), solution, explains) if solution else ()
        with TemporaryDirectory() as folder:
            for number, (text, said) in enumerate(found):
                changed = Path(folder, f"repair_{number}.py")
                changed.write_text(text, encoding="utf-8")
                try:
                    for case in (self, *others):
                        case.check(case.load(str(changed)), str(changed))
                    return [said]
                except Exception:  # some lines of a file need not be Python
                    if process_time() > end:
                        break
        return []


def part_of(chosen: torch.Tensor) -> str:
    """The smallest part of a tensor that has all chosen elements, such as "0, 16:32"."""
    found = []
    for indices in chosen.nonzero().T:
        first, last = int(indices.min()), int(indices.max())
        found.append(f"{first}:{last + 1}" if last > first else f"{first}")
    return ", ".join(found)
