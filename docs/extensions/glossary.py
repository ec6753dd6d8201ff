"""Terms of docs/learn/glossary.md on the pages of the site: the first use of each shows its
definition when the pointer is over it, and leads to the glossary.

A well-kept extension for this loads its script from the network, which this site does not; a link
with a title needs no script. The list of terms is that of the notebooks, lessons/build/glossary.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))

from lessons.build.glossary import entries, first_uses  # noqa: E402

PAGE = "learn/glossary"
CLASS = "term"
# Pages on which a term has its ordinary meaning: {page: anchors}.
OTHER_MEANING = {
    "use/api/checking": {"thread"},
    "use/api/integrations": {"thread"},
    "learn/grpo": {"phase"},
    "understand/log": {"phase"},
}
# A term within one of these is not marked.
PLAIN = (
    nodes.reference,
    nodes.literal,
    nodes.math,
    nodes.raw,
    nodes.title,
    nodes.caption,
    nodes.table,
    addnodes.desc_signature,
    addnodes.desc_name,
)


def mark(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn the first use of each term into a link with its definition as title."""
    if docname == PAGE or app.builder.format != "html":
        return
    page = app.builder.get_relative_uri(docname, PAGE)
    seen = set(OTHER_MEANING.get(docname, ()))
    for link in doctree.findall(nodes.reference):
        uri, _, anchor = link.get("refuri", "").partition("#")
        if uri == page and anchor in entries():
            link["reftitle"] = entries()[anchor].definition
            link["classes"].append(CLASS)
            seen.add(anchor)
    for text in list(prose(doctree)):
        linked = list(pieces(text.astext(), page, seen))
        if len(linked) > 1:
            text.parent.replace(text, linked)


def prose(doctree: nodes.document) -> Iterator[nodes.Text]:
    """The text of paragraphs."""
    for paragraph in doctree.findall(nodes.paragraph):
        for text in paragraph.findall(nodes.Text):
            if not any(isinstance(parent, PLAIN) for parent in parents(text)):
                yield text


def parents(node: nodes.Node) -> Iterator[nodes.Element]:
    """What a node is within, from the inside out."""
    while (node := node.parent) is not None:
        yield node


def pieces(text: str, page: str, seen: set[str]) -> Iterator[nodes.Node]:
    """A text with links in it."""
    end = 0
    for use in first_uses(text, seen):
        yield nodes.Text(text[end : use.start])
        uri, definition = f"{page}#{use.entry.anchor}", use.entry.definition
        link = nodes.reference("", text[use.start : use.end], refuri=uri, internal=True)
        link["reftitle"] = definition
        link["classes"].append(CLASS)
        yield link
        end = use.end
    yield nodes.Text(text[end:])


def setup(app: Sphinx) -> dict[str, bool]:
    """Mark terms after all links of a page are resolved."""
    app.connect("doctree-resolved", mark, priority=900)
    app.add_css_file("glossary.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
