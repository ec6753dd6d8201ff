"""Kernels as they stand in the package: their source, and what changes between two versions."""

import ast
import difflib
import html
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from flash_versions.diff import plain_functions
from flash_versions.diff.files import BLOT, FOLDER, ROOT, definitions, path_of, parse, version_names

LINE = (
    "font-family:monospace;margin:0;padding:0 .6em;line-height:1.35;font-size:90%;white-space:pre;"
    "overflow-x:auto"
)
COLOURS = {"+": "background:#2da44e33", "-": "background:#cf222e2e", "@": "color:#57606a"}


def show(function: Callable[..., Any], docstring: bool = True) -> None:
    """Display a function of the package, highlighted, under its file and line.

    Args:
        function: a Triton kernel (or a function that kernels call), or a Python function.
        docstring: False leaves it out.
    """
    plain = inspect.unwrap(getattr(function, "fn", function))
    path, (lines, first) = Path(inspect.getfile(plain)), inspect.getsourcelines(plain)
    if not docstring:
        lines = lines_without_docstring(path, plain.__name__) or lines
    where = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE.parent) else path.name
    formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=LINE)
    code = highlight("".join(f"{line.rstrip()}\n" for line in lines), PythonLexer(), formatter)
    title = f"{where}, line {first}"
    display_text(f"<code>{html.escape(title)}</code>\n{code}", [title, "", *lines])


def lines_without_docstring(path: Path, name: str) -> list[str]:
    """The lines of a function without its docstring; none if the file does not define it."""
    return [line for line in definitions(path).get(name, []) if line != BLOT]


def changes(
    old: str,
    new: str,
    name: str,
    *,
    renamed: str | None = None,
    file: str = "forward.py",
    context: int = 3,
) -> None:
    """Display what changes in one function from a version to the next, as a coloured diff.

    Args:
        old: a version, such as "fa1".
        new: the version that is held against it.
        name: a function that both define or import; docstrings are left out.
        renamed: what it is called in the new version, if not the same.
        file: where both have it, such as "backward.py".
        context: unchanged lines around a change.

    Raises:
        ValueError: a version has no such file or function.
    """
    (before, old_lines), (after, new_lines) = (
        find(old, file, name),
        find(new, file, renamed or name),
    )
    lines = list(difflib.unified_diff(old_lines, new_lines, before, after, lineterm="", n=context))
    if not lines:
        lines = [f"{name} has not changed: both versions use {after}"]
    rows = "\n".join(
        f'<span style="{COLOURS.get(line[:1], "")}">{html.escape(line)}</span>' for line in lines
    )
    display_text(f'<pre style="{LINE}">{rows}</pre>', lines)


def display_text(page: str, lines: list[str]) -> None:
    """Display HTML, or where a viewer has none, lines of text."""
    text = "\n".join(line.rstrip() for line in lines)
    display({"text/html": page, "text/plain": text}, raw=True)


def find(version: str, file: str, name: str) -> tuple[str, list[str]]:
    """Where a version has a function from, and its lines without the docstring. What it imports is
    looked up there.
    """
    path = PACKAGE / version / file
    if not path.exists():
        raise ValueError(f"there is no {version}/{file}.")
    pages = [path]
    for node in parse(path)[0].body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            pages.append(PACKAGE.parent / f"{(node.module or '').replace('.', '/')}.py")
    for page in pages:
        if lines := lines_without_docstring(page, name):
            return str(page.relative_to(PACKAGE)), lines
    raise ValueError(f"{version}/{file} neither defines nor imports {name!r}.")
