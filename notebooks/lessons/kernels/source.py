"""Kernels as they stand in the package: their source, and what changes between two versions."""

import difflib
import html
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.display import display
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

import flash_versions
from flash_versions import diff

ROOT = Path(flash_versions.__file__).parent
LINE = (
    "font-family:monospace;margin:0;padding:0 .6em;line-height:1.35;font-size:90%;white-space:pre;"
    "overflow-x:auto"
)


def show(function: Callable[..., Any], docstring: bool = True) -> None:
    """Display a function of the package, highlighted, under its file and line.

    Args:
        function: a Triton kernel (or a function that kernels call), or a Python function.
        docstring: False leaves it out.
    """
    plain = inspect.unwrap(getattr(function, "fn", function))
    path, (lines, first) = Path(inspect.getfile(plain)), inspect.getsourcelines(plain)
    if not docstring:
        lines = diff.functions_of(path).get(plain.__name__) or lines
    lines = [line.replace("  # fmt: skip", "") for line in lines]
    where = path.relative_to(ROOT.parent) if path.is_relative_to(ROOT.parent) else path.name
    title = f"{where}, line {first}"
    display_text(f"<code>{html.escape(title)}</code>\n{coloured(lines)}", [title, "", *lines])


def show_plain(version: str, *names: str, file: str = "forward.py") -> None:
    """Display functions of a version's lesson, the plain file in `flash_versions.lessons`.

    A fold-out under each has the engine's function of that name, with every option.

    Args:
        version: such as "fa2", or "fa3-hopper", "fa4-hopper".
        names: of the functions; docstrings are left out.
        file: "forward.py" or "backward.py".

    Raises:
        ValueError: the lesson has no such file or function.
    """
    for name in names:
        title, lines = find_plain(version, file, name)
        page = f"<code>{html.escape(title)}</code>\n{coloured(lines)}"
        try:
            where, full = find(version, file, name)
        except ValueError:
            where = ""  # the engine has it in another function
        if where:
            page += (
                f"<details><summary>with every option: <code>{html.escape(where)}</code></summary>"
                f"\n{coloured(full)}</details>"
            )
        display_text(page, [title, "", *lines])


def coloured(lines: list[str]) -> str:
    """Lines of Python as HTML with highlights."""
    formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=LINE)
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    return highlight(text, PythonLexer(), formatter)


def changes(old: str, new: str, name: str, *, file: str = "forward.py", context: int = 3) -> None:
    """Display what changes in a function from a version's lesson to the next, as a coloured diff.

    Args:
        old: a version, such as "fa1".
        new: the version that is held against it.
        name: a function of both lessons; docstrings are left out.
        file: "forward.py" or "backward.py".
        context: unchanged lines around a change.

    Raises:
        ValueError: a version has no such file or function.
    """
    (before, old_lines), (after, new_lines) = (find_plain(x, file, name) for x in (old, new))
    lines = list(difflib.unified_diff(old_lines, new_lines, before, after, lineterm="", n=context))
    lines = lines or [f"{name} has not changed"]
    display_text(f'<pre style="{LINE}">{diff.as_html(lines)}</pre>', lines)


def display_text(page: str, lines: list[str]) -> None:
    """Display HTML, or where a viewer has none, lines of text."""
    text = "\n".join(line.rstrip() for line in lines)
    display({"text/html": page, "text/plain": text}, raw=True)


def find_plain(version: str, file: str, name: str) -> tuple[str, list[str]]:
    """A function of a version's lesson: a heading for it, and its lines."""
    path = diff.path_of(version + "-backward" * (file == "backward.py"))
    functions = diff.functions_of(path)
    if name not in functions:
        raise ValueError(f"the lesson {path.name} has no {name!r}; it has {', '.join(functions)}.")
    return str(path.relative_to(ROOT)), functions[name]


def find(version: str, file: str, name: str) -> tuple[str, list[str]]:
    """Where the engine's code of a version has a function from, and its lines without the
    docstring.
    """
    folder = f"flash_versions.versions.{version.replace('-', '.')}"
    try:
        module = importlib.import_module(f"{folder}.{file.removesuffix('.py')}")
    except ModuleNotFoundError:
        raise ValueError(f"there is no {version}/{file}.") from None
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{version}/{file} neither defines nor imports {name!r}.")
    path = Path(inspect.getfile(inspect.unwrap(getattr(function, "fn", function))))
    return str(path.relative_to(ROOT)), diff.functions_of(path).get(name, [])
