"""Changes of a puzzle's solution, by which other files, wrong and right ones, are written down."""

import ast
from textwrap import dedent, indent
from typing import NamedTuple

from flash_versions.puzzles.puzzle import WRITTEN

# A change is a pair (old text, new text), a pair (number of the region that a learner writes, new
# lines), or a text of definitions: each takes the place of the one with its name; others, and
# imports, come in front of the first function.
Change = tuple[str, str] | tuple[int, str] | str


class File(NamedTuple):
    """The solution with changes. `about` says how a right file differs; of a wrong one it is an
    expression that a good sentence matches, in either case, . with line ends, too.
    """

    about: str
    changes: tuple[Change, ...]


def file(about: str, *changes: Change) -> File:
    return File(about, changes)


def changed(solution: str, changes: tuple[Change, ...]) -> str:
    """The solution with changes, in turn; regions are numbered as they are in the solution."""
    for change in changes:
        if isinstance(change, str):
            solution = with_definitions(solution, change)
        elif isinstance(change[0], int):
            region = list(WRITTEN.finditer(solution))[change[0]]
            body = indent(dedent(change[1]).strip("\n"), region[1])
            new = f"{region[1]}# write: {region[2]}\n{body}\n{region[1]}# end\n"
            solution = solution[: region.start()] + new + solution[region.end() :]
        else:
            if change[0] not in solution:
                raise ValueError(f"the solution has no {change[0]!r}")
            solution = solution.replace(*change)
    return solution


def with_definitions(solution: str, new: str) -> str:
    """The solution with functions, classes, constants and imports of another text."""
    lines, others = solution.splitlines(keepends=True), []
    places = {x.name: x for x in ast.parse(solution).body if isinstance(x, ast.FunctionDef)}
    replaced = {}
    for node in ast.parse(new).body:
        text = "\n".join(new.splitlines()[first_line(node) - 1 : node.end_lineno]) + "\n"
        old = places.get(getattr(node, "name", ""))
        if old is None:
            others.append(text)
        else:
            replaced[first_line(old)] = (old.end_lineno, text)
    for begin, (end, text) in sorted(replaced.items(), reverse=True):
        lines[begin - 1 : end] = [text]
    front = min(first_line(x) for x in places.values())
    lines[front - 1 : front - 1] = [f"{x}\n\n" for x in others]
    return "".join(lines)


def first_line(node: ast.stmt) -> int:
    """The line on which a definition begins, decorators included."""
    return min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
