"""Terms and their definitions, from docs/learn/glossary.md; the first use of each in a text is a
link.

An entry of that page is a heading, the term, and a paragraph, its definition. What follows up to
the next heading is only on that page. In a notebook the first use of a term becomes a link that
shows the definition when the pointer is over it; a term that its author has linked stays as it is.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

GLOSSARY = Path(__file__).parents[3] / "docs" / "learn" / "glossary.md"
ENTRY = re.compile(r"^## (?P<term>.+)\n\n(?P<definition>(?:.+\n)+)", re.MULTILINE)
# What is not prose: fences, formulas, headings, tables, code, links, HTML.
NOT_PROSE = re.compile(
    r"^```.*?^```|^ {4}.*?$|\$\$.*?\$\$|\$[^$\n]+\$|^\|.*?$|^#.*?$|`[^`]*`|!?\[[^\]]*\]\([^)]*\)"
    r"|<!--.*?-->|<[^>]+>",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"glossary\.md#([\w-]+)")


class Entry(NamedTuple):
    """A term, where it is on the page, and what it means, in plain text."""

    term: str
    anchor: str
    definition: str


class Use(NamedTuple):
    """Where a text uses a term."""

    start: int
    end: int
    entry: Entry


@cache
def entries() -> dict[str, Entry]:
    """All entries of the glossary by anchor, in the order of the page."""
    found = {}
    for match in ENTRY.finditer(GLOSSARY.read_text()):
        term, definition = match["term"], " ".join(match["definition"].split())
        anchor = term.lower().replace(" ", "-")
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)|`", r"\1", definition)
        found[anchor] = Entry(term, anchor, plain)
    return found


@cache
def pattern() -> tuple[re.Pattern[str], dict[str, Entry]]:
    """What finds any term, the longest first, and the entry of each spelling in lower case."""
    by_spelling = {entry.term.lower(): entry for entry in entries().values()}
    spelled = (
        # An abbreviation is written as it is; a word may begin a sentence.
        re.escape(term)
        if not term.islower()
        else f"[{term[0]}{term[0].upper()}]{re.escape(term[1:])}".replace(r"\ ", r"\s")
        for term in sorted((e.term for e in entries().values()), key=len, reverse=True)
    )
    return re.compile(rf"(?<![\w-])({'|'.join(spelled)})(?:s|es)?(?![\w-])"), by_spelling


def first_uses(text: str, seen: set[str]) -> Iterator[Use]:
    """Where plain text uses a term for the first time; their anchors are added to `seen`."""
    expression, by_spelling = pattern()
    for found in expression.finditer(text):
        entry = by_spelling[" ".join(found[1].lower().split())]
        if entry.anchor not in seen:
            seen.add(entry.anchor)
            yield Use(found.start(), found.end(), entry)


def link_first_uses(text: str, seen: set[str], page: str) -> str:
    """Markdown in which the first use of each term is a link with its definition as title.

    Args:
        text: Markdown. Only its prose is searched.
        seen: anchors of terms that need no link; those that are linked here are added.
        page: where the glossary is, as seen from the text.
    """
    seen.update(LINK.findall(text))
    blank = NOT_PROSE.sub(lambda found: " " * len(found[0]), text)
    for start, end, entry in reversed(list(first_uses(blank, seen))):
        title = entry.definition.replace('"', "'")
        text = f'{text[:start]}[{text[start:end]}]({page}#{entry.anchor} "{title}"){text[end:]}'
    return text
