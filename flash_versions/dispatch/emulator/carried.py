"""Names that Triton's compiler does not carry through a loop, while Python does.

Triton visits the body of a loop once before it compiles it, and carries a name from step to step if
its value has changed. If `before = stage` comes before a loop and in its body, where `stage`
changes later, that visit gives `before` the value that it has. So it keeps that value in all steps:
the kernel is wrong, or waits for ever. The emulator, which runs Python, would not notice.
"""

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple


class Assignment(NamedTuple):
    """name = value; value is None unless it is a name, too."""

    line: int
    name: str
    value: str | None


@cache  # a module is a part of many kernels
def check(text: str, where: str) -> None:
    """Refuse a module whose kernels have such a name in a loop.

    Raises:
        ValueError: the sentence says where, and what to write.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and is_compiled(node):
            made = list(assignments(node))
            for loop in ast.walk(node):
                if isinstance(loop, ast.For | ast.While) and not is_unrolled(loop):
                    check_loop(made, loop, where)


def assignments(function: ast.FunctionDef) -> Iterator[Assignment]:
    """Every name that a function assigns, once for each time."""
    values = {
        target: node.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Assignment(node.lineno, node.id, values.get(node))


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles a function."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_unrolled(loop: ast.For | ast.While) -> bool:
    """Whether a loop is a `static_range`, which carries nothing."""
    return isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)


def check_loop(made: list[Assignment], loop: ast.For | ast.While, where: str) -> None:
    """`check` of a loop, by all assignments of its function."""
    begin, end = loop.lineno, loop.end_lineno or loop.lineno
    for line, name, value in made:
        if value is None or not begin < line <= end:
            continue
        changes = [x.line for x in made if x.name == value and begin < x.line <= end]
        earlier = [x for x in made if x.name == name and x.line < begin]
        if not changes or min(changes) < line or not earlier:
            continue
        last = max(earlier, key=lambda x: x.line)
        between = [x for x in made if x.name == value and last.line < x.line < begin]
        if last.value == value and not between:
            raise ValueError(
                f"{where}, line {line}: {name} = {value} also comes before the loop of line "
                f"{begin}, so Triton would keep that value of {name} in all steps; give {name} a "
                f"value of its own there, such as {value} + 0."
            )
