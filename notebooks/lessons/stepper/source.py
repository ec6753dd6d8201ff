"""The lesson that a reader steps through, and which of its lines a running kernel is at."""

import ast
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from flash_versions import diff


class Statement(NamedTuple):
    """A statement of a function.

    Attributes:
        function: that has it.
        name: what it assigns first, or what it calls and on what.
        number: of those statements of the function that have this name, from 0.
        line: its first line in the file, from 1.
    """

    function: str
    name: str
    number: int
    line: int


class Shown(NamedTuple):
    """What the page shows of a file.

    Attributes:
        text: functions, without docstrings.
        lines: by a line of the file, that of the text, from 1.
    """

    text: str
    lines: dict[int, int]


@cache
def shown(path: Path, but: tuple[str, ...] = ()) -> Shown:
    """The functions of a lesson that are compiled for the GPU, and its classes; `but` these."""
    lines = diff.without_docstrings(path)
    text: list[str] = []
    numbers: dict[int, int] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name in but:
            continue
        if not node.decorator_list:
            continue  # the host's
        text += ["", ""] if text else []
        first = min(x.lineno for x in node.decorator_list)
        for number in range(first, (node.end_lineno or 0) + 1):
            line = lines[number - 1]
            if line is not None:
                text.append(line)
                numbers[number] = len(text)
    return Shown("\n".join(text), numbers)


def name_of(node: ast.stmt) -> str:
    """What a statement assigns first, or what it calls and on what."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return ast.unparse(target.elts[0] if isinstance(target, ast.Tuple) else target)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        given = ast.unparse(node.value.args[0]) if node.value.args else ""
        return f"{ast.unparse(node.value.func)}({given}"
    return type(node).__name__


@cache
def of_file(path: str) -> dict[int, Statement]:
    """The statements of all functions of a file that have no others in them, by each line."""
    found: dict[int, Statement] = {}
    for function in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        seen: dict[str, int] = {}
        nodes = [x for x in ast.walk(function) if isinstance(x, ast.stmt)]
        for node in sorted(nodes, key=lambda x: x.lineno):
            if hasattr(node, "body"):
                continue
            name = name_of(node)
            number = seen[name] = seen.get(name, -1) + 1
            made = Statement(function.name, name, number, node.lineno)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[line] = made
    return found


def at(frame: FrameType) -> Statement | None:
    """The statement that a frame is in; None in the head of a loop or of a branch."""
    return of_file(frame.f_code.co_filename).get(frame.f_lineno)
