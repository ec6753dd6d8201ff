"""`python -m flash_versions.diff fa1 fa2`: what changes from one lesson to the next.

A lesson is one plain file (`flash_versions.lessons`), so this is the difference of two files: of
their code, without docstrings, and without what is beside the lesson, such as FA2's split keys.

  python -m flash_versions.diff fa1 fa2                        the forward
  python -m flash_versions.diff fa1-backward fa2-backward      the gradients
  python -m flash_versions.diff fa3-hopper fa4-hopper          the kernels for Hopper, in Gluon
"""

import argparse
import ast
import difflib
import html
import sys
from collections.abc import Iterable
from pathlib import Path

from flash_versions.files import write
from flash_versions.lessons import BACKWARDS, FORWARDS, file_of

FILES = {x.replace("_", "-"): x for x in (*FORWARDS, *(f"{x}_backward" for x in BACKWARDS))}
BESIDE = ("# ----", "if __name__")  # with what a line begins that ends the lesson
COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
STYLES = {"+": "background:#2da44e33", "-": "background:#cf222e2e", "@": "color:#57606a"}


def path_of(name: str) -> Path:
    """The file of a lesson, such as "fa3-hopper".

    Raises:
        ValueError: there is no such lesson.
    """
    if name not in FILES:
        raise ValueError(f"there is no lesson {name!r}; there are {', '.join(FILES)}.")
    return file_of(FILES[name])


def without_docstrings(path: Path) -> list[str | None]:
    """The lines of a file without notes for formatters, None in the place of docstrings."""
    text = path.read_text("utf-8")
    lines: list[str | None] = [x.removesuffix("  # fmt: skip") for x in text.splitlines()]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            first, end = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            lines[first:end] = [None] * (end - first)
    return lines


def code_of(name: str) -> list[str]:
    """The lines of a lesson's code, up to what is beside it.

    Raises:
        ValueError: there is no such lesson.
    """
    lines = [x for x in without_docstrings(path_of(name)) if x is not None]
    end = next(i for i, line in enumerate(lines) if line.startswith(BESIDE))
    return "\n".join(lines[:end]).strip().splitlines()


def functions_of(path: Path) -> dict[str, list[str]]:
    """The lines of a file's functions and classes by name, decorators included, without
    docstrings.
    """
    lines = without_docstrings(path)
    found = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(x.lineno for x in [node, *node.decorator_list]) - 1
            found[node.name] = [x for x in lines[first : node.end_lineno] if x is not None]
    return found


def difference(old: str, new: str, context: int = 3) -> list[str]:
    """The changes from one lesson to another, as a unified diff.

    Args:
        old: a name in FILES.
        new: another one.
        context: unchanged lines around a change.

    Raises:
        ValueError: there is no such lesson, or the context is below 0.
    """
    if context < 0:
        raise ValueError(f"--context must be at least 0, got {context}.")
    before, after = code_of(old), code_of(new)
    return list(difflib.unified_diff(before, after, old, new, lineterm="", n=context))


def changed(lines: Iterable[str]) -> int:
    """How many lines of a unified diff are removed or added, blank ones aside."""
    marked = (line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))
    return sum(bool(line[1:].strip()) for line in marked)


def as_html(lines: Iterable[str]) -> str:
    """A diff as coloured lines of HTML."""
    rows = (f'<span style="{STYLES.get(x[:1], "")}">{html.escape(x)}</span>' for x in lines)
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Print a diff, or write it as a page; returns the exit code."""
    made = argparse.ArgumentParser(
        prog="python -m flash_versions.diff",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("old", help=f"one of {', '.join(FILES)}")
    made.add_argument("new", help="another one")
    made.add_argument("--context", type=int, default=3, help="unchanged lines around a change (3)")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of printing")
    options = made.parse_args(arguments)
    try:
        lines = difference(options.old, options.new, options.context)
        if options.html:
            write(options.html, f"<!doctype html><meta charset=utf-8><pre>{as_html(lines)}</pre>")
            return 0
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {options.html}: {error.strerror}\n")
        return 2
    for line in lines:
        colour = COLOURS.get(line[:1], "") if sys.stdout.isatty() else ""
        sys.stdout.write(f"{colour}{line}{colour and chr(27) + '[0m'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
