"""Sentences about an output, each with the check that keeps it true.

A sentence of the text that states a fact about an output ends with a comment that no page shows,
and the cell that makes the output checks the fact under the same name:

    # The model looks at the first digit. <!-- checked: looks_at_the_first_digit -->

    checked("looks_at_the_first_digit", weights.argmax() == 0)

A false fact ends the cell, so a notebook whose text has gone false cannot be built. A sentence that
only says how to read an output, such as what a colour means, ends with `<!-- key -->`. `missing`
finds sentences that point at an output and have neither.
"""

import ast
import re
from collections.abc import Iterator

from nbformat import NotebookNode

POINTS_AT_AN_OUTPUT = re.compile(
    r"\b(above|output|printed|prints|showed"
    r"|(the|this|these|first|second|third|fourth|last|left|right|upper|lower|both|next)"
    r" (tables?|pictures?|plots?|charts?|maps?|curves?|films?|timelines?|rows?|columns?|panels?"
    r"|bars?|lines?))\b",
    re.IGNORECASE,
)
MARKER = re.compile(r"<!-- (?:checked: (?P<name>[a-z0-9_]+)|key) -->")
MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)  # what only IPython reads
TITLE = re.compile(r' "[^"]*"\)')  # what a link shows: a definition of the glossary
NOT_PROSE = re.compile(r"```.*?```|\$\$.*?\$\$|^ {4}.*?$|^\|.*?$|^#.*?$", re.DOTALL | re.MULTILINE)
END_OF_SENTENCE = re.compile(r"(?<=[.!?:])[*_)\"]*(?:\s*<!-- [^>]* -->)?\s+(?=[A-Z`*_(\[])")


def checked(name: str, holds: object) -> None:
    """Check what the text says about this cell's output.

    Args:
        name: of the claim; the sentence ends with `<!-- checked: name -->`.
        holds: whether it is true.

    Raises:
        AssertionError: it is not.
    """
    assert holds, f"the text says {name!r} of this output, and that is false now"


def missing(notebook: NotebookNode) -> list[str]:
    """What is wrong with the claims of a notebook, a sentence each."""
    checks, claims = set(names_checked(notebook)), set(names_claimed(notebook))
    return [
        *(f"the text claims {name!r}; no cell checks it" for name in sorted(claims - checks)),
        *(f"a cell checks {name!r}; no sentence claims it" for name in sorted(checks - claims)),
        *(f"no check of: {sentence}" for sentence in unchecked(notebook)),
    ]


def on_one_line(text: str) -> str:
    """Markdown in which every marker is on the line of the word before it.

    Markdown takes a line that begins with a comment for HTML, with all that follows the comment.
    """
    return re.sub(rf"(?<=\S)\n *(?={MARKER.pattern})", " ", text)


def names_checked(notebook: NotebookNode) -> Iterator[str]:
    """Names in the calls of `checked`."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for node in ast.walk(ast.parse(MAGIC.sub("", cell.source))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "checked":
                    yield ast.literal_eval(node.args[0])


def names_claimed(notebook: NotebookNode) -> Iterator[str]:
    """Names in the comments of the text."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield from (found["name"] for found in MARKER.finditer(cell.source) if found["name"])


def unchecked(notebook: NotebookNode) -> Iterator[str]:
    """Sentences that point at an output and end without a marker."""
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for sentence in sentences(cell.source):
            if POINTS_AT_AN_OUTPUT.search(MARKER.sub("", sentence)) and not MARKER.search(sentence):
                yield sentence


def sentences(text: str) -> Iterator[str]:
    """Sentences of Markdown, each with the marker that follows it; no headings, tables, code."""
    for paragraph in re.split(r"\n\s*\n", NOT_PROSE.sub("", TITLE.sub(")", text))):
        start = 0
        paragraph = " ".join(paragraph.split())
        for end in END_OF_SENTENCE.finditer(paragraph):
            yield paragraph[start : end.end()].strip()
            start = end.end()
        if paragraph[start:]:
            yield paragraph[start:]
