"""Docstrings are written to be read in the source; this makes them valid reStructuredText.

Single backticks are code (`default_role` in conf.py); here `|`, `*` and trailing `_` become
literal, what is indented after an empty line becomes a literal block, and several results, each
with its name, become a list. Napoleon reads the other sections.
"""

import ast
import re
import textwrap
from itertools import takewhile

from sphinx.application import Sphinx

SPECIAL = re.compile(r"(`[^`]*`)|([|*\\])|(?<=\w)_(?!\w)")
NAMED = re.compile(r"\w+: ")
SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields):$")


def escape(line: str) -> str:
    """A line with everything literal but what stands between backticks."""
    return SPECIAL.sub(lambda found: found[1] or "\\" + found[0], line)


def indent(line: str) -> int:
    """Spaces before a line's first character."""
    return len(line) - len(line.lstrip())


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText, its sections as they were."""
    made: list[str] = []
    block: int | None = None  # the indentation of the literal block that is being read
    paragraph = 0  # the indentation of the text before it
    for number, line in enumerate(lines):
        if not line.strip():
            made.append(line)
            continue
        if block is not None and indent(line) < block:
            block = None
            if made[-1]:
                made.append("")
        follows_text = number > 0 and not lines[number - 1].strip()
        if block is None and follows_text and indent(line) >= paragraph + 4:
            block = indent(line)
            made += [f"{' ' * paragraph}.. code-block:: {language(lines[number:], block)}", ""]
        if block is not None:
            made.append(line)
            continue
        bullet = re.match(r"\s*\* ", line)
        if bullet and made and made[-1].strip() and not re.match(r"\s*[*-] ", made[-1]):
            made.append("")
        made.append(line[: bullet.end()] + escape(line[bullet.end() :]) if bullet else escape(line))
        paragraph = indent(line) + (4 if SECTION.match(line.strip()) else 0)
    return made


def language(lines: list[str], left: int) -> str:
    """How to highlight the block that the lines begin with: only what is Python as Python."""
    block = takewhile(lambda line: not line.strip() or indent(line) >= left, lines)
    try:
        ast.parse(textwrap.dedent("\n".join(block)))
    except SyntaxError:
        return "text"
    return "python"


def returns_as_field(lines: list[str]) -> list[str]:
    """The lines with the section "Returns:" as a field, in which every named result is a bullet."""
    start = next((n for n, line in enumerate(lines) if line.strip() == "Returns:"), None)
    if start is None:
        return lines
    left = indent(lines[start])
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or indent(lines[end]) > left):
        end += 1
    body = textwrap.dedent("\n".join(lines[start + 1 : end])).strip().splitlines()
    if sum(NAMED.match(line) is not None for line in body) > 1:
        body = [
            f"* {line}" if NAMED.match(line) else f"  {line.strip()}" if line.strip() else line
            for line in body
        ]
    field = textwrap.indent("\n".join(["", *body]), " " * (left + 4)).splitlines()
    return [*lines[:start], f"{' ' * left}:returns:", *field[1:], "", *lines[end:]]


def process(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]):
    """Called by autodoc with the lines of a docstring, before napoleon reads its sections."""
    lines[:] = returns_as_field(as_rst(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to autodoc."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
