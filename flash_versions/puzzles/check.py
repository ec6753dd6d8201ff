"""Holds a learner's file against a puzzle: `python -m flash_versions.puzzles.check NAME FILE`.

It ends with 0 if the file is right. What it asks of a puzzle's file, below its line CHECK:

    spec        what is wanted, in PyTorch; the truth is what it gives in fp64
    cases()     inputs by what is special about them, each a tuple of spec's arguments
    RESULTS     the names of what is returned
    reads(...)  elements that may be loaded, by name of an input; of others it may be any number
    TILE        elements that one load may have
    LOOPS       what a loop may not contain: "a division", "tl.exp"
    review(...) of a kernel in Gluon: looks at the events, (partition, what), of its partitions
"""

import ast
import contextlib
import importlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flash_versions.checker.compiler import refusal
from flash_versions.checker.observe import Fault, called, sentence_of
from flash_versions.puzzles.diagnosis import Wrong, diagnosed, pattern
from flash_versions.puzzles.puzzle import Puzzle, find_puzzle
from flash_versions.simulator.checking import Watch
from flash_versions.simulator.gluon.machine import ORDERS, using
from flash_versions.simulator.origins import origin_of

# Of the largest number of a result, in steps of the inputs' type, beside the error of `spec`.
STEPS = 4
FP32_STEPS = 64  # sums in another order
GIVEN = ("softmax", "cumsum", "sort")  # of triton.language: what they give is to be written


def check(puzzle: Puzzle, file: Path) -> str | None:
    """What is wrong with a file, in a sentence; None if it is right.

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
        torch.manual_seed(0)
        cases = {
            which: Case(puzzle, module, function, inputs, str(file))
            for which, inputs in module.cases().items()
        }
        for which, case in cases.items():
            try:
                case.check(function)
            except Fault as fault:
                others = [x for x in cases.values() if x is not case]
                if isinstance(fault, Wrong):
                    fault.args = (case.explained(fault),)
                raise Fault(f"{which}: {diagnosed(fault, case, others)}") from None
        # Of each type of the inputs one case: lengths are known at run time only.
        for case in {str(list(map(kind_of, x.inputs))): x for x in cases.values()}.values():
            if said := refusal(function, case.inputs, str(file)):
                raise Fault(said)
    except Fault as fault:
        return f"{str(fault).rstrip('.')}."
    except SyntaxError as error:
        return f"line {error.lineno} of {file}: {error.msg}."
    except Exception as error:  # while the file is imported
        return sentence_of(error, str(file))
    return None


def review(tree: ast.Module, loops: tuple[str, ...]) -> None:
    """Refuse functions that the puzzle is about, and what a loop must not contain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in GIVEN and ast.unparse(node.value) == "tl":
                raise Fault(f"line {node.lineno} calls tl.{node.attr}; it is for you to write")
        if isinstance(node, ast.For | ast.While):
            for inner in ast.walk(node):
                for what in loops:
                    if is_a(inner, what):
                        line = getattr(inner, "lineno", 0)
                        raise Fault(f"line {line} has {what} in the loop; it can be done without")


def is_a(node: ast.AST, what: str) -> bool:
    """Whether a node of a syntax tree is "a division", or what is named, such as "tl.exp"."""
    if what == "a division":
        return isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
    return isinstance(node, ast.Attribute) and ast.unparse(node) == what


class Case:
    """A file on one case of a puzzle.

    Attributes:
        given: the inputs by name.
        truth: what is wanted, in fp64; plain: as PyTorch computes it.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        module: ModuleType,
        function: Callable[..., Any],
        inputs: tuple,
        file: str,
    ) -> None:
        self.puzzle, self.module, self.function = puzzle, module, function
        self.inputs, self.file, self.names = inputs, file, module.RESULTS
        names = module.spec.__code__.co_varnames[: module.spec.__code__.co_argcount]
        self.given = dict(zip(names, inputs, strict=True))
        exact = tuple(x.double() if is_float(x) else x for x in inputs)
        self.truth, self.plain = listed(module.spec(*exact)), listed(module.spec(*inputs))
        self.in_gluon = puzzle.group == "hopper"

    def check(self, function: Callable[..., Any]) -> None:
        """Run it; a kernel in Gluon with early and late copies and products.

        Raises:
            Fault: what is wrong.
        """
        for order in ORDERS.values() if self.in_gluon else (None,):
            events: list[tuple[str, str]] = []

            def note(partition: Any, what: str, *_: Any, seen: list = events) -> None:
                seen.append((partition.name, what))

            with using(**({"order": order, "watcher": note} if order else {})):
                self.compare(*self.call(function))
            if hasattr(self.module, "review") and self.in_gluon:
                try:
                    self.module.review(events, *self.inputs)
                except AssertionError as error:
                    raise Fault(str(error)) from None

    def call(self, function: Callable[..., Any], **options: Any) -> tuple[tuple, Watch]:
        """The results of a function, and what its kernels did; options are those of `Watch`."""
        options["largest"] = getattr(self.module, "TILE", None)
        result, watch = called(function, self.given, self.file, **options)
        results, wanted = listed(result), self.names
        if len(results) != len(wanted):
            raise Fault(
                f"it returns {len(results)} results instead of {len(wanted)}: {', '.join(wanted)}"
            )
        if not watch.seen:
            raise Fault("no kernel stores anything, because none is launched")
        for name, found, truth in zip(wanted, results, self.truth):
            if not torch.is_tensor(found) or found.shape != truth.shape:
                kind = f"of {list(found.shape)}" if torch.is_tensor(found) else repr(found)[:80]
                raise Fault(f"{name} should be a tensor of shape {list(truth.shape)}, not {kind}")
        return results, watch

    def compare(self, results: tuple, watch: Watch) -> None:
        """Refuse wrong results, and more loads and stores than are needed."""
        wrong = [self.wrong(i, found) for i, found in enumerate(results)]
        for name, found, is_wrong in zip(self.names, results, wrong):
            missing = watch.never("written", found)
            if is_wrong is not None and missing.any():
                raise Fault(f"{name}{missing.nonzero()[0].tolist()} is never stored")
        for i, (found, is_wrong) in enumerate(zip(results, wrong)):
            if is_wrong is not None:
                raise Wrong(self, i, found, is_wrong)
        if not any(x.stores for x in watch.seen.values()):
            raise Fault("no kernel stores anything")
        for name, most in getattr(self.module, "reads", lambda *x: {})(*self.inputs).items():
            loads = watch.loads(name)
            if loads > most:
                raise Fault(
                    f"the results are right, but {loads} elements of {name} are loaded; {most} are "
                    "enough"
                )
        for name, found in zip(self.names, results):
            seen = None if self.in_gluon else watch.of(found)
            if seen is not None and seen.stores > found.numel():
                times = seen.stores / found.numel()
                raise Fault(f"{name} is stored {times:.3g} times; store each element once")

    def explained(self, fault: Wrong) -> str:
        """A wrong result in a sentence, with what its number comes from if that is none."""
        i, wrong, at = fault.i, fault.wrong, tuple(fault.wrong.nonzero()[0].tolist())
        value, right = fault.found[at].item(), self.truth[i][at].item()
        said = (
            f"{self.names[i]}{list(at)} is {value:.5g}; it should be {right:.5g} "
            f"({int(wrong.sum())} of {wrong.numel()} are wrong"
            f"{pattern(fault.found, self.truth[i])})"
        )
        if value == value and (abs(value) < float("inf") or abs(right) == float("inf")):
            return said
        origin = origin_of(
            lambda: listed(self.call(self.function)[0])[i][at].item(), self.file, value
        )
        return f"{said}; {origin}" if origin else said

    def wrong(self, i: int, found: torch.Tensor) -> torch.Tensor | None:
        """Which elements of a result are wrong; None if none is."""
        wrong = ~self.close(i, found, self.truth[i])
        return wrong if bool(wrong.any()) else None

    def close(self, i: int, found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Which elements of a result are no further from these than twice what PyTorch is from the
        truth, plus some steps of a type: its own, or that of the inputs where the kernel rounds on
        the way.
        """
        plain, finite = self.plain[i], self.truth[i].isfinite()
        largest = self.truth[i][finite].abs().max().item() if finite.any() else 0.0
        kind = self.inputs[0].dtype if self.in_gluon else plain.dtype
        steps = FP32_STEPS if kind == torch.float32 else STEPS
        allowed = steps * torch.finfo(kind).eps * max(largest, 1.0)
        if finite.any():
            allowed += 2 * (plain.double() - self.truth[i])[finite].abs().max().item()
        error = (found.double() - truth.double()).abs()
        return (error <= allowed) | (found.double() == truth)


def is_float(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def kind_of(x: Any) -> Any:
    """The type of an input."""
    return x.dtype if torch.is_tensor(x) else type(x)


def listed(results: Any) -> tuple[torch.Tensor, ...]:
    """What `spec` returns, one or several."""
    return results if isinstance(results, tuple) else (results,)


def main(name: str, file: str) -> int:
    """Check, say what was found, and return the exit code: 0 right, 1 wrong, 3 not begun."""
    torch.set_num_threads(1)
    try:
        fault = check(find_puzzle(name), Path(file))
    except NotImplementedError:
        sys.stdout.write(f"{name}: not written yet.\n")
        return 3
    sys.stdout.write(f"{name}: {f'not yet. {fault}' if fault else 'right.'}\n")
    return int(fault is not None)


def send(pipe: Any, name: str, file: str) -> None:
    """Send the exit code of `main` and what it prints, and end."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(name, file)
    pipe.send((code, said.getvalue().strip()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
