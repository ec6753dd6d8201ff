"""Holds a learner's file against a puzzle.

What is asked of a file in `kernels`, below its line CHECK:

    spec        what is wanted, in PyTorch; the truth is what it gives in fp64
    cases()     inputs by what is special about them, each a tuple of spec's arguments
    RESULTS     the names of what is returned
    TILE        elements that one load may have

A lesson's file is called as `mine check` calls a version's. Of both kinds, the solution is run,
too: no kernel may load more than it, nor have two products in flight less often.
"""

import ast
import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from flash_versions.checker.case import Case, Function, Results
from flash_versions.checker.observe import Fault, refusal, sentence_of
from flash_versions.dispatch.request import Request, make_request
from flash_versions.lessons import file_of
from flash_versions.mine.check import Call
from flash_versions.puzzles.puzzle import FOLDER, OF_LESSONS, Puzzle
from flash_versions.simulator.checking import Watch
from flash_versions.simulator.gluon.machine import ORDERS, using
from flash_versions.versions.from_file import make_version, run_file
from flash_versions.versions.oracle.budget import Accuracy, finite_max, max_error

# Of the largest number of a result, in steps of the inputs' type, beside the error of `spec`.
STEPS = 4
FP32_STEPS = 64  # sums in another order
GIVEN = ("tl.softmax", "tl.cumsum", "tl.sort")  # what they give is to be written
# Calls of lessons: queries, keys, heads, key heads, causal, type.
FP32, BF16 = torch.float32, torch.bfloat16
FORWARD = (
    (40, 40, 2, 2, False, BF16), (70, 130, 6, 2, True, FP32), (90, 33, 2, 1, True, FP32)
)  # fmt: skip
BACKWARD = ((40, 40, 1, 1, False, FP32), (70, 50, 2, 1, True, FP32), (40, 90, 1, 1, True, FP32))
HOPPER = ((70, 500, 1, 1, False, BF16), (200, 200, 2, 1, True, BF16))
CALLS = {"fa2": FORWARD, "fa2_backward": BACKWARD, "fa3_hopper": HOPPER}
HEAD_DIM = 64


def check(puzzle: Puzzle, file: Path) -> str | None:
    """What is wrong with a file, in sentences; None if it is right.

    Raises:
        NotImplementedError: it has not been written yet.
    """
    text = file.read_text("utf-8")
    if text.strip() == puzzle.stub.strip():
        raise NotImplementedError
    try:
        refuse_given(ast.parse(text))
        cases = cases_of(puzzle)
        functions = {name: case.load(str(file)) for name, case in cases.items()}
        for name, case in cases.items():
            others = [x for x in cases.values() if x is not case]
            if said := case.explained(functions[name], str(file), puzzle.solution, others):
                raise Fault(f"{name}: " + ".\n  ".join(x.rstrip(".") for x in said))
        # Of each type of the inputs one case: lengths are known at run time only.
        for name in {case.kinds(): name for name, case in cases.items()}.values():
            inputs = tuple(cases[name].inputs.values())
            if refused := refusal(functions[name], inputs, str(file)):
                raise Fault(refused)
    except Fault as fault:
        return f"{str(fault).rstrip('.')}."
    except SyntaxError as error:
        return f"line {error.lineno} of {file}: {error.msg}."
    except Exception as error:  # while the file is imported
        return sentence_of(error, str(file))
    return None


def refuse_given(tree: ast.Module) -> None:
    """Refuse functions that the puzzles are about."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (what := ast.unparse(node)) in GIVEN:
            raise Fault(f"line {node.lineno} has {what}: it is for you to write")


class Costs(NamedTuple):
    """What the kernels of a call did: elements of each input that were loaded, and how often a
    partition issued a product while another one of its products was in flight.
    """

    loads: dict[str, int]
    overlaps: int


class Compared(Case):
    """A case of which the first function that is checked is the solution.

    Attributes:
        in_gluon: kernels are run with early and late copies and products.
        costs: what the solution's kernels did.
    """

    in_gluon = False
    costs: Costs | None = None

    def kinds(self) -> tuple[Any, ...]:
        """The types of the inputs."""
        return tuple(getattr(x, "dtype", type(x)) for x in self.inputs.values())

    def check(self, function: Function, file: str) -> tuple[Results, Watch]:
        """See `Case`."""
        orders: list[Any] = [*ORDERS.values()] if self.in_gluon else [None]
        for order in orders if self.costs else orders[:1]:  # what the solution costs shows in each
            events: list[tuple[str, str]] = []

            def note(partition: Any, what: str, *_: Any, seen: list = events) -> None:
                seen.append((partition.name, what))

            with using(**({"order": order, "watcher": note} if order else {})):
                results, watch = super().check(function, file)
            costs = Costs({x: watch.loads(x) for x in watch.inputs}, overlaps(events))
            self.costs = self.costs or costs
            for name, most in self.costs.loads.items():
                if (loads := costs.loads[name]) > most:
                    raise Fault(
                        f"the results are right, but {loads} elements of {name} are loaded; {most} "
                        "are enough"
                    )
            if costs.overlaps < self.costs.overlaps:
                raise Fault(
                    f"the results are right, but two products are in flight {costs.overlaps} times "
                    f"where they can be {self.costs.overlaps} times"
                )
            if not self.in_gluon:
                refuse_stored_again(results, watch)
            elif self.costs.overlaps:
                refuse_without_turns(events)
        return results, watch


def overlaps(events: list[tuple[str, str]]) -> int:
    """How often a partition has two products in flight."""
    flying, found = dict[str, int](), 0
    for who, what in events:
        flying[who] = flying.get(who, 0) + {"product": 1, "done": -1}.get(what, 0)
        found += what == "product" and flying[who] > 1
    return found


def refuse_stored_again(results: Results, watch: Watch) -> None:
    """Refuse more stores than elements."""
    for name, found in results.items():
        seen = watch.of(found)
        if seen is not None and seen.stores > found.numel():
            times = seen.stores / found.numel()
            raise Fault(f"{name} is stored {times:.3g} times; store each element once")


def refuse_without_turns(events: list[tuple[str, str]]) -> None:
    """Refuse consumers of FA3 that do not issue in turns, two products each, or that give the turn
    away only when a product is done. The first and the last product of each are in no turn.
    """
    for program in dict.fromkeys(who.partition(",")[0] for who, _ in events):
        own = [(who[-1], what) for who, what in events if who.startswith(f"{program},")]
        issued = [who for who, what in own if what == "product"]
        for consumer in "01":
            issued.remove(consumer)
            del issued[len(issued) - 1 - issued[::-1].index(consumer)]
            did = [what for who, what in own if who == consumer and what != "wait"]
            second = [i for i, what in enumerate(did) if what == "product"][2:-1:2]
            after = [next(x for x in did[i + 1 :] if x in ("arrive", "done")) for i in second]
            if "done" in after:
                raise Fault(
                    f"consumer {consumer} does not give its turn away before it waits for a "
                    "product; after it has issued its products, it should arrive at the barrier of "
                    "the other consumer, and then wait for them"
                )
        if issued != [x for turn in range(len(issued) // 2) for x in 2 * f"{turn % 2}"]:
            order = " ".join(issued)
            raise Fault(
                f"the result is right, but the products come from consumers {order}, not in turns"
            )


def cases_of(puzzle: Puzzle) -> dict[str, Compared]:
    """The cases of a puzzle, the same in each call, for which the solution's costs are known."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (lesson_cases if puzzle.name in OF_LESSONS else own_cases)(puzzle)


def own_cases(puzzle: Puzzle) -> dict[str, Compared]:
    """The cases of a puzzle in `kernels`."""
    module = importlib.import_module(f"flash_versions.puzzles.kernels.{puzzle.name}")
    file = str(FOLDER / f"{puzzle.name}.py")
    cases = {name: PuzzleCase(puzzle, module, inputs) for name, inputs in module.cases().items()}
    for case in cases.values():
        case.check(case.named(getattr(module, puzzle.name)), file)
    return dict(cases)


class PuzzleCase(Compared):
    """A call of one function.

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

    def load(self, file: str) -> Function:
        """See `Case`."""
        function = runpy.run_path(file).get(self.puzzle.name)
        if not callable(function):
            raise Fault(f"the file has no function {self.puzzle.name}")
        return self.named(function)

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


def lesson_cases(puzzle: Puzzle) -> dict[str, Compared]:
    """The cases of a lesson with lines taken out."""
    asked, cases = OF_LESSONS[puzzle.name], dict[str, Compared]()
    lesson, splits = asked["lesson"], asked.get("splits")
    for M, N, heads, kv_heads, causal, dtype in CALLS[lesson]:
        sizes = (M, heads), (N, kv_heads), (N, kv_heads)
        q, k, v = (torch.randn(1, n, many, HEAD_DIM).to(dtype) for n, many in sizes)
        q[:, :, :, 0] *= 100 * (-1.0) ** torch.arange(M)[:, None]  # maxima far apart, of both signs
        case = LessonCase(puzzle, make_request(q, k, v, causal=causal, num_splits=splits))
        case.check(case.load(str(file_of(lesson))), str(file_of(lesson)))
        name = f"{M} queries, {N} keys, {heads} heads on {kv_heads}{', causal' * causal}"
        cases[name] = case
    return cases


class LessonCase(Compared, Call):
    """A call of the version in a file, of which the puzzle may be the backward only."""

    def __init__(self, puzzle: Puzzle, request: Request) -> None:
        self.lesson = OF_LESSONS[puzzle.name]["lesson"]
        self.of_backward = self.lesson.endswith("_backward")
        super().__init__(request, with_backward=self.of_backward, of_lse=self.of_backward)
        self.in_gluon = puzzle.group == "hopper"

    def load(self, file: str) -> Function:
        """See `Case`."""
        try:
            whole = own = run_file(Path(file))
            if self.of_backward:
                forward = self.lesson.removesuffix("_backward")
                whole = importlib.import_module(f"flash_versions.lessons.{forward}")
            backward = own.backward if self.of_backward else None
            return self.run_by(make_version(file, whole, file, backward))
        except ValueError as error:
            raise Fault(str(error)) from None
