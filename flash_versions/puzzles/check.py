"""Holds a learner's file against a puzzle: `python -m flash_versions.puzzles.check NAME FILE`.

It runs in Triton's interpreter, in a process of its own, which ends with 0 if the file is right.
What it asks of a puzzle's file, below its line CHECK:

    spec        what is wanted, in PyTorch; the truth is what it gives in fp64
    cases()     inputs by what is special about them, each a tuple of spec's arguments
    RESULTS     the names of what is returned
    reads(...)  elements that may be loaded, by name of an input; of others it may be any number
    TILE        elements that one load may have
    LOOPS       what a loop may not contain: "a division", "tl.exp"
    review(...) of a kernel in Gluon: looks at the events, (partition, what), of machine.note
"""

import ast
import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from flash_versions.dispatch.emulator import emulator, machine
from flash_versions.dispatch.emulator.emulator import run_file
from flash_versions.mine.check import describe
from flash_versions.mine.guard import guarding
from flash_versions.puzzles.puzzle import Puzzle, find_puzzle
from flash_versions.puzzles.watch import Accesses, KernelsOnly, run_watched

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
        gluon = "triton.experimental" in text
        function = (run_file(file) if gluon else runpy.run_path(str(file))).get(puzzle.name)
        assert callable(function), f"the file has no function {puzzle.name}."
        torch.manual_seed(0)
        for which, inputs in module.cases().items():
            try:
                (try_emulated if gluon else try_case)(module, function, inputs)
            except AssertionError as error:
                raise AssertionError(f"{which}: {at_line(error, file)}{error}") from None
    except AssertionError as error:
        return str(error)
    except NotImplementedError:
        return "no kernel stores anything."
    except machine.Deadlock as error:
        return str(error)
    except SyntaxError as error:
        return f"line {error.lineno} of {file}: {error.msg}"
    except Exception as error:
        return describe(error, file)
    return None


def at_line(error: BaseException, file: Path) -> str:
    """The line of a file that an error came through last, in front of what is said of it."""
    lines = [x.lineno for x in extract_tb(error.__traceback__) if x.filename == str(file)]
    return f"line {lines[-1]}: " if lines else ""


def review(tree: ast.Module, loops: tuple[str, ...]) -> None:
    """Refuse functions that the puzzle is about, and what a loop must not contain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr not in GIVEN or ast.unparse(node.value) != "tl", (
                f"line {node.lineno} calls tl.{node.attr}; it is for you to write."
            )
        if isinstance(node, ast.For | ast.While):
            for inner in ast.walk(node):
                for what in loops:
                    line = getattr(inner, "lineno", 0)
                    assert not is_a(inner, what), (
                        f"line {line} has {what} in the loop; it can be done without."
                    )


def is_a(node: ast.AST, what: str) -> bool:
    """Whether a node of a syntax tree is "a division", or what is named, such as "tl.exp"."""
    if what == "a division":
        return isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
    return isinstance(node, ast.Attribute) and ast.unparse(node) == what


def try_case(module: ModuleType, function: Callable[..., Any], inputs: tuple) -> None:
    """Run one case; AssertionError with what is wrong."""
    names = module.spec.__code__.co_varnames[: module.spec.__code__.co_argcount]
    given = dict(zip(names, inputs, strict=True))
    result, accesses = run_watched(function, given, getattr(module, "TILE", None))
    results = result if isinstance(result, tuple) else (result,)
    wanted = module.RESULTS
    assert len(results) == len(wanted), (
        f"it returns {len(results)} results instead of {len(wanted)}: {', '.join(wanted)}."
    )
    exact = tuple(x.double() if is_float(x) else x for x in inputs)
    for name, found, truth, plain in zip(
        wanted, results, listed(module.spec(*exact)), listed(module.spec(*inputs))
    ):
        compare(name, found, truth, plain, plain.dtype, accesses)
    if hasattr(module, "reads"):
        count_reads(accesses, module.reads(*inputs))
    for seen in accesses.results:
        assert seen.stores <= seen.tensor.numel(), (
            f"{seen.name} is stored {seen.stores / seen.tensor.numel():.3g} times; store each "
            "element once."
        )


def try_emulated(module: ModuleType, function: Callable[..., Any], inputs: tuple) -> None:
    """Run one case of a Gluon kernel in the emulator, with early and late copies and products."""
    for order in machine.ORDERS.values():
        events: list[tuple[str, str]] = []

        def note(partition: Any, what: str, *_: Any, seen: list = events) -> None:
            seen.append((partition.name, what))

        with (
            patch.object(machine, "order", order),
            patch.object(machine, "watcher", note),
            patch.object(emulator.gl, "store", store_once({})),
            guarding(),
            KernelsOnly(function.__code__.co_filename),
        ):
            result = function(*(x.clone() for x in inputs))
        exact = tuple(x.double() for x in inputs)
        results = result if isinstance(result, tuple) else (result,)
        plain, truth = listed(module.spec(*inputs)), listed(module.spec(*exact))
        for name, found, right, usual in zip(module.RESULTS, results, truth, plain, strict=True):
            compare(name, found, right, usual, inputs[0].dtype)
        if hasattr(module, "review"):
            module.review(events, *inputs)


def store_once(owners: dict[tuple[int, int], str]) -> Callable[..., None]:
    """The emulator's store, for one emulation; two partitions must not store the same element,
    whatever they store.
    """

    def store(pointer: Any, value: Any, mask: Any = True) -> None:
        emulator.store(pointer, value, mask)
        offset, where = torch.broadcast_tensors(pointer.offset, emulator.tensor_of(mask))
        here = machine.here.partition.name
        for i in offset[where].tolist():
            other = owners.setdefault((pointer.data.data_ptr(), i), here)
            assert other == here, (
                f"{other} and {here} store to element {i} of a tensor: on a GPU one overwrites the "
                "other's result."
            )

    return store


def is_float(x: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def listed(results: Any) -> tuple[torch.Tensor, ...]:
    """What `spec` returns, one or several."""
    return results if isinstance(results, tuple) else (results,)


def compare(
    name: str,
    found: Any,
    truth: torch.Tensor,
    plain: torch.Tensor,
    kind: torch.dtype,
    accesses: Accesses | None = None,
) -> None:
    """Refuse a result that is further from the truth than twice what PyTorch is, plus some steps of
    a type: its own, or that of the inputs where the kernel rounds on the way.
    """
    assert torch.is_tensor(found) and found.shape == truth.shape, (
        f"{name} should be a tensor of shape {list(truth.shape)}, not "
        f"{f'of {list(found.shape)}' if torch.is_tensor(found) else repr(found)[:80]}."
    )
    finite = truth.isfinite()
    largest = truth[finite].abs().max().item() if finite.any() else 0.0
    steps = FP32_STEPS if kind == torch.float32 else STEPS
    allowed = steps * torch.finfo(kind).eps * max(largest, 1.0)
    allowed += 2 * (plain.double() - truth)[finite].abs().max().item() if finite.any() else 0.0
    error = (found.double() - truth).abs()
    wrong = ~((error <= allowed) | (found.double() == truth))
    if not wrong.any():
        return
    at = tuple(wrong.nonzero()[0].tolist())
    results = accesses.results if accesses else []
    stored = next((x for x in results if x.tensor.data_ptr() == found.data_ptr()), None)
    if stored is not None and found.is_contiguous():
        flat = sum(i * step for i, step in zip(at, found.stride()))
        assert stored.program[flat] >= 0, f"{name}{list(at)} is never stored."
    value = found[at].item()
    raise AssertionError(
        f"{name}{list(at)} is {value:.5g}; it should be {truth[at].item():.5g} "
        f"({int(wrong.sum())} of {wrong.numel()} are wrong)."
        + (
            " NaN comes from memory outside of a tensor, or from inf - inf."
            if value != value
            else ""
        )
    )


def count_reads(accesses: Accesses, most: dict[str, int]) -> None:
    """Refuse more loads than the task needs."""
    for seen in accesses.inputs:
        bound = most.get(seen.name)
        assert bound is None or seen.loads <= bound, (
            f"the results are right, but {seen.loads} elements of {seen.name} are loaded; "
            f"{bound} are enough."
        )


def main() -> int:
    """Check, say what was found, and return the exit code: 0 right, 1 wrong, 3 not begun."""
    puzzle, file = find_puzzle(sys.argv[1]), Path(sys.argv[2])
    try:
        fault = check(puzzle, file)
    except NotImplementedError:
        sys.stdout.write(f"{puzzle.name}: not written yet.\n")
        return 3
    sys.stdout.write(f"{puzzle.name}: {f'not yet. {fault}' if fault else 'right.'}\n")
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(main())
