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
from flash_versions.diff.files import (
    EXPLICIT,
    FOLDER,
    ROOT,
    definitions,
    kernels_of,
    parse,
    path_of,
    version_names,
)
from flash_versions.diff.plain import switched

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
    where = path.relative_to(ROOT.parent) if path.is_relative_to(ROOT.parent) else path.name
    title = f"{where}, line {first}"
    display_text(f"<code>{html.escape(title)}</code>\n{coloured(lines)}", [title, "", *lines])


def show_plain(version: str, *names: str, file: str = "forward.py") -> None:
    """Display functions of a version's kernels as a causal call without options runs them.

    A fold-out under each has the function with every option.

    Args:
        version: such as "fa2", whose portable kernels are meant, or "fa3-hopper", "fa4-hopper".
        names: of the functions; docstrings are left out.
        file: "forward.py" or "backward.py".

    Raises:
        ValueError: the version has no such file or function.
    """
    for name in names:
        _, lines = find_plain(version, file, name)
        title = f"{version}/{file}, as a causal call without options runs it"
        where, full = find(version, file, name)
        display_text(
            f"<code>{html.escape(title)}</code>\n{coloured(lines)}"
            f"<details><summary>with every option: <code>{html.escape(where)}</code></summary>\n"
            f"{coloured(full)}</details>",
            [title, "", *lines],
        )


def coloured(lines: list[str]) -> str:
    """Lines of Python as HTML with highlights."""
    formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=LINE)
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    return highlight(text, PythonLexer(), formatter)


def lines_without_docstring(path: Path, name: str) -> list[str]:
    """The lines of a function without its docstring; none if the file does not define it."""
    return definitions(path).get(name, [])


def changes(
    old: str,
    new: str,
    name: str,
    *,
    renamed: str | None = None,
    file: str = "forward.py",
    plain: bool = True,
    context: int = 3,
) -> None:
    """Display what changes in one function from a version to the next, as a coloured diff.

    Args:
        old: a version, such as "fa1".
        new: the version that is held against it.
        name: a function that both define or import; docstrings are left out.
        renamed: what it is called in the new version, if not the same.
        file: where both have it, such as "backward.py".
        plain: as a causal call without options sees it, see `flash_versions.diff.plain_source`;
            False shows the function as it is written.
        context: unchanged lines around a change.

    Raises:
        ValueError: a version has no such file or function.
    """
    look_up = find_plain if plain else find
    (before, old_lines), (after, new_lines) = (
        look_up(old, file, name),
        look_up(new, file, renamed or name),
    )
    lines = list(difflib.unified_diff(old_lines, new_lines, before, after, lineterm="", n=context))
    if not lines:
        lines = [f"{name} has not changed" + ("" if plain else f": both versions use {after}")]
    rows = "\n".join(
        f'<span style="{COLOURS.get(line[:1], "")}">{html.escape(line)}</span>' for line in lines
    )
    display_text(f'<pre style="{LINE}">{rows}</pre>', lines)


def display_text(page: str, lines: list[str]) -> None:
    """Display HTML, or where a viewer has none, lines of text."""
    text = "\n".join(line.rstrip() for line in lines)
    display({"text/html": page, "text/plain": text}, raw=True)


def find_plain(version: str, file: str, name: str) -> tuple[str, list[str]]:
    """A function of a version's plain kernels: a heading for it, and its lines."""
    backward = file == "backward.py"
    if version in EXPLICIT:
        functions = switched(*kernels_of(version, backward))
    else:
        functions = plain_functions(version, backward=backward)
    if name not in functions:
        raise ValueError(
            f"the plain kernels of {version} have no {name!r}; they have {', '.join(functions)}. "
            f"With plain=False, changes shows functions as they are written."
        )
    return f"{version}/{file}, plain", functions[name].splitlines()


def find(version: str, file: str, name: str) -> tuple[str, list[str]]:
    """Where a version has a function from, and its lines without the docstring. What it imports is
    looked up there.
    """
    if version in EXPLICIT:
        path = path_of(EXPLICIT[version][file == "backward.py"])
    else:
        path = FOLDER / version / file
    if version not in [*version_names(), *EXPLICIT] or not path or not path.exists():
        raise ValueError(f"there is no {version}/{file}.")
    pages = [path]
    for node in parse(path)[0].body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            pages.append(path_of(node.module or "") or path)
    for page in pages:
        if lines := lines_without_docstring(page, name):
            return str(page.relative_to(ROOT)), lines
    raise ValueError(f"{version}/{file} neither defines nor imports {name!r}.")
