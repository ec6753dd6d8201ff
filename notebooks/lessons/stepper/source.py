"""The plain kernel that a reader steps through, and which of its lines a running kernel is at."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from unittest.mock import patch

from flash_versions.diff import plain, views
from flash_versions.diff.files import text_of

SPLIT = {"partials": "Partials"}  # what a kernel is given besides, if its keys are split
PLACES = {"forward_tile": "forward_kernel"}  # functions that the plain text has inlined
COMBINE = "flash_versions.versions.fa2.combine"


class Statement(NamedTuple):
    """A statement of a function.

    Attributes:
        function: that has it.
        name: what it assigns first, or what it calls and on what.
        text: as `ast.unparse` writes it.
        number: of those statements of the function that have this name, from 0.
        line: its first line, from 1.
        same: number of the statements of the function that have this name.
        twin: of those that have this text, from 0.
    """

    function: str
    name: str
    text: str
    number: int
    line: int
    same: int
    twin: int


def text(name: str, causal: bool, head_dim: int) -> str:
    """The plain kernels of a recording: "fa1", "fa2", "fa2-split", "fa3-hopper" or "fa4-hopper"."""
    if name != "fa2-split":
        return views.kernel_source(name, True, causal, head_dim).rstrip()
    fixed = {x: value for x, value in plain.FIXED.items() if x not in ("partials", "num_splits")}
    plain.plain_kernels.cache_clear()
    try:
        with (
            patch.dict(plain.FIXED, {**fixed, "SPLIT": True}, clear=True),
            patch.dict(plain.GIVEN, SPLIT),
            patch.dict(plain.LAUNCHED, clear=True),
        ):
            found = plain.plain_source("fa2", causal, head_dim)
    finally:
        plain.plain_kernels.cache_clear()
    return f"{found}\n\n{text_of(COMBINE, 'combine_kernel')}"


def name_of(node: ast.stmt) -> str:
    """What a statement assigns first, or what it calls and on what."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        first = target.elts[0] if isinstance(target, ast.Tuple) else target
        return without_number(ast.unparse(first))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        given = ast.unparse(node.value.args[0]) if node.value.args else ""
        call = ast.unparse(node.value.func)
        return f"{call}({without_number(given.rpartition('.')[2])}"
    return type(node).__name__


def without_number(name: str) -> str:
    """A variable as it was called before it was inlined: acc of acc_1."""
    return re.sub(r"_\d+$", "", name)


@cache
def statements(source: str) -> dict[int, Statement]:
    """The statements of all functions of a source that have no others in them, by each line."""
    found: dict[int, Statement] = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        seen: dict[str, int] = {}
        twins: dict[str, int] = {}
        nodes = [x for x in ast.walk(function) if isinstance(x, ast.stmt)]
        nodes = sorted((x for x in nodes if not hasattr(x, "body")), key=lambda x: x.lineno)
        count = Counter(map(name_of, nodes))
        for node in nodes:
            name = name_of(node)
            number = seen[name] = seen.get(name, -1) + 1
            text = ast.unparse(node)
            twin = twins[text] = twins.get(text, -1) + 1
            made = Statement(function.name, name, text, number, node.lineno, count[name], twin)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[line] = made
    return found


@cache
def of_file(path: str) -> dict[int, Statement]:
    """The statements of a file."""
    return statements(Path(path).read_text())


def at(frame: FrameType) -> Statement | None:
    """The statement that a frame is in; None in the head of a loop or of a branch."""
    return of_file(frame.f_code.co_filename).get(frame.f_lineno)


def line_of(statement: Statement, shown: str) -> int:
    """The line of the shown text that a statement of the full kernel has become, from 1.

    Raises:
        ValueError: the shown text has no such statement.
    """
    function = PLACES.get(statement.function, statement.function)
    every = {x.line: x for x in statements(shown).values() if x.function == function}
    same = [x.line for x in every.values() if x.text == statement.text]
    alike = [x.line for x in every.values() if x.name == statement.name]
    if len(same) == 1:
        return same[0]
    if len(same) > 1 and "(" in statement.text:  # calls of the same function, in this order
        return same[min(statement.twin, len(same) - 1)]
    if not alike:
        raise ValueError(f"the plain kernel has no {statement.text!r} in {function}.")
    if len(alike) == statement.same:
        return alike[statement.number]
    # Options of the full kernel assign a variable between its first and its last assignment.
    return alike[0] if statement.number == 0 else alike[-1]
