"""Holds a learner's file against a puzzle.

What is asked of a puzzle's file, below its line CHECK:

    spec        what is wanted, in PyTorch; the truth is what it gives in fp64
    cases()     inputs by what is special about them, each a tuple of spec's arguments
    RESULTS     the names of what is returned
    reads(...)  elements that may be loaded, by name of an input; of others it may be any number
    TILE        elements that one load may have
    LOOPS       what a loop may not contain: "a division", "tl.exp"
    review(...) of a kernel in Gluon: looks at the events, (partition, what), of its partitions
"""

import ast
import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flash_versions.checker.case import Case, Function, Results
from flash_versions.checker.observe import Fault, refusal, sentence_of
from flash_versions.puzzles.puzzle import Puzzle
from flash_versions.simulator.checking import Watch
from flash_versions.simulator.gluon.machine import ORDERS, using
from flash_versions.versions.oracle.budget import Accuracy, finite_max, max_error

# Of the largest number of a result, in steps of the inputs' type, beside the error of `spec`.
STEPS = 4
FP32_STEPS = 64  # sums in another order
GIVEN = ("tl.softmax", "tl.cumsum", "tl.sort")  # what they give is to be written


def check(puzzle: Puzzle, file: Path) -> str | None:
    """What is wrong with a file, in sentences; None if it is right.

    Raises:
        NotImplementedError: it has not been written yet.
    """
    text = file.read_text()
    if text.strip() == puzzle.stub.strip():
        raise NotImplementedError
    module = importlib.import_module(f"flash_versions.puzzles.{puzzle.group}.{puzzle.name}")
    try:
        review(ast.parse(text), getattr(module, "LOOPS", ()))
        function = runpy.run_path(str(file)).get(puzzle.name)
        if not callable(function):
            raise Fault(f"the file has no function {puzzle.name}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            cases = {name: PuzzleCase(puzzle, module, x) for name, x in module.cases().items()}
        for name, case in cases.items():
            others = [x for x in cases.values() if x is not case]
            if said := case.explained(case.named(function), str(file), puzzle.solution, others):
                raise Fault(f"{name}: " + ".\n  ".join(x.rstrip(".") for x in said))
        # Of each type of the inputs one case: lengths are known at run time only.
        for case in {case.kinds(): case for case in cases.values()}.values():
            if refused := refusal(function, tuple(case.inputs.values()), str(file)):
                raise Fault(refused)
    except Fault as fault:
        return f"{str(fault).rstrip('.')}."
    except SyntaxError as error:
        return f"line {error.lineno} of {file}: {error.msg}."
    except Exception as error:  # while the file is imported
        return sentence_of(error, str(file))
    return None


def review(tree: ast.Module, loops: tuple[str, ...]) -> None:
    """Refuse functions that the puzzle is about, and what a loop must not contain."""
    inside = [
        x
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For | ast.While)
        for x in ast.walk(loop)
    ]
    for nodes, refused, why in (
        (ast.walk(tree), GIVEN, "it is for you to write"),
        (inside, loops, "in a loop; it can be done without"),
    ):
        for node in nodes:
            if (what := kind_of(node)) in refused:
                raise Fault(f"line {getattr(node, 'lineno', 0)} has {what}: {why}")


def kind_of(node: ast.AST) -> str:
    """What a node of a syntax tree is: "a division", a name such as "tl.exp", or nothing."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        return "a division"
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


class PuzzleCase(Case):
    """One case of a puzzle.

    Attributes:
        plain: the results as PyTorch computes them in the inputs' types.
    """

    def __init__(self, puzzle: Puzzle, module: ModuleType, inputs: tuple) -> None:
        self.puzzle, self.module, self.in_gluon = puzzle, module, puzzle.group == "hopper"
        names = module.spec.__code__.co_varnames[: module.spec.__code__.co_argcount]
        self.inputs = dict(zip(names, inputs, strict=True))
        exact = (x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)
        self.truth, self.plain = self.named(module.spec)(*exact), self.named(module.spec)(*inputs)
        self.largest = getattr(module, "TILE", None)

    def kinds(self) -> tuple[Any, ...]:
        """The types of the inputs."""
        return tuple(getattr(x, "dtype", type(x)) for x in self.inputs.values())

    def load(self, file: str) -> Function:
        """See `Case`."""
        return self.named(runpy.run_path(file)[self.puzzle.name])

    def named(self, function: Callable[..., Any]) -> Function:
        """A function whose results have the puzzle's names."""

        def run(*inputs: Any) -> Results:
            found, names = function(*inputs), self.module.RESULTS
            if found is None:
                given = ", ".join(names)
                raise Fault(f"{self.puzzle.name} returned None; it should return {given}")
            found = found if isinstance(found, tuple) else (found,)
            if len(found) != len(names):
                raise Fault(f"it returns {len(found)} results instead of {', '.join(names)}")
            return dict(zip(names, found))

        return run

    def assess(self, results: Results) -> dict[str, Accuracy]:
        """See `Case`. A kernel in Gluon rounds to the type of the inputs on the way."""
        found = {}
        for name, x in results.items():
            plain, truth = self.plain[name], self.truth[name]
            if not torch.is_tensor(x) or x.shape != truth.shape:
                kind = f"of {list(x.shape)}" if torch.is_tensor(x) else repr(x)[:80]
                raise Fault(f"{name} should be a tensor of shape {list(truth.shape)}, not {kind}")
            dtype = self.kinds()[0] if self.in_gluon else plain.dtype
            steps = FP32_STEPS if dtype == torch.float32 else STEPS
            rounding = steps * torch.finfo(dtype).eps * max(finite_max(truth), 1.0)
            found[name] = Accuracy(max_error(x, truth), max_error(plain, truth), rounding)
        return found

    def check(self, function: Function, file: str) -> tuple[Results, Watch]:
        """See `Case`. A kernel in Gluon is run with early and late copies and products."""
        for order in ORDERS.values() if self.in_gluon else (None,):
            events: list[tuple[str, str]] = []

            def note(partition: Any, what: str, *_: Any, seen: list = events) -> None:
                seen.append((partition.name, what))

            with using(**({"order": order, "watcher": note} if order else {})):
                results, watch = super().check(function, file)
            self.check_costs(results, watch)
            if hasattr(self.module, "review"):
                try:
                    self.module.review(events, *self.inputs.values())
                except AssertionError as error:
                    raise Fault(str(error)) from None
        return results, watch

    def check_costs(self, results: Results, watch: Watch) -> None:
        """Refuse more loads and stores than are needed."""
        reads: Any = getattr(self.module, "reads", lambda *inputs: {})
        for name, most in reads(*self.inputs.values()).items():
            if (loads := watch.loads(name)) > most:
                raise Fault(
                    f"the results are right, but {loads} elements of {name} are loaded; {most} are "
                    "enough"
                )
        for name, found in {} if self.in_gluon else results.items():
            seen = watch.of(found)
            if seen is not None and seen.stores > found.numel():
                times = seen.stores / found.numel()
                raise Fault(f"{name} is stored {times:.3g} times; store each element once")
