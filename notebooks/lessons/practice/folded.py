"""What a reader sees after a click only: answers, hints one after the other, solutions."""

import ast
import html
from pathlib import Path

from IPython.display import display

from lessons.kernels.source import coloured

SOLUTIONS = Path(__file__).parents[2] / "solutions"
ORDINALS = ("first", "second", "third", "fourth")


def display_folded(steps: list[tuple[str, str]], plain: str) -> None:
    """Display steps of which each is folded in the one before it.

    Args:
        steps: (what a click shows, in words; HTML), the first one first.
        plain: what a front end without HTML shows instead.
    """
    page = ""
    for summary, content in reversed(steps):
        page = f"<details><summary>{html.escape(summary)}</summary>{content}{page}</details>"
    display({"text/html": page, "text/plain": plain}, raw=True)


def display_answer(answer: str) -> None:
    """Display the truth of a prediction, folded."""
    display_folded([("the answer", html.escape(answer))], "Write your guess to see the answer.")


def display_help(hints: tuple[str, ...], solution: str, where: str) -> None:
    """Display hints one by one, and behind the last one a solution.

    Args:
        hints: each says more than the one before it.
        solution: its text.
        where: to find it, for a front end without HTML.
    """
    steps = [
        (f"{ORDINALS[number]} of {len(hints)} hints", f"<p>{html.escape(hint)}</p>")
        for number, hint in enumerate(hints)
    ]
    steps.append(("a solution", coloured(solution.splitlines())))
    display_folded(steps, where)


def where_solved(name: str) -> str:
    """The file with an exercise's solution, in the folder of its notebook."""
    [path] = SOLUTIONS.glob(f"*/{name}.py")
    return path.relative_to(SOLUTIONS).as_posix()


def solution(name: str) -> str:
    """The text of an exercise's solution: its function, and what that uses of its file."""
    text = (SOLUTIONS / where_solved(name)).read_text()
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {ast.unparse(target): node for target in node.targets}
    needed = [name]
    for one in needed:  # grows
        names = (x.id for x in ast.walk(defined[one]) if isinstance(x, ast.Name))
        needed += [x for x in dict.fromkeys(names) if x in defined and x not in needed]
    parts = [lines_of(node, text) for one, node in defined.items() if one in needed]
    return "\n\n\n".join(parts)


def lines_of(node: ast.stmt, text: str) -> str:
    """A definition with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(x.lineno for x in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
