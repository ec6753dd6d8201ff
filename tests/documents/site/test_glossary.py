"""The glossary: one page, from which notebooks and the site take what a term means."""

import re

import pytest

from lessons.build import notebooks as build
from lessons.build.glossary import LINK, entries, link_first_uses
from tests.helpers import ROOT


def linked(text, seen=None):
    """Text with links, without their titles."""
    return re.sub(r' "[^"]*"\)', ")", link_first_uses(text, seen or set(), "g.md"))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("A warp, two warps.", "A [warp](g.md#warp), two warps."),
        ("**Tensor cores** idle.", "**[Tensor cores](g.md#tensor-core)** idle."),
        ("a causal\nmask", "a [causal\nmask](g.md#causal-mask)"),
        ("warped, SMALL, warp-wide", "warped, SMALL, warp-wide"),
        ("`warp`, $warp$, [a warp](x.md)", "`warp`, $warp$, [a warp](x.md)"),
        ("# A warp\n\n```\nwarp\n```\n\n| warp |\n", "# A warp\n\n```\nwarp\n```\n\n| warp |\n"),
        ("[It](glossary.md#warp) is a warp.", "[It](glossary.md#warp) is a warp."),
    ],
)
def test_first_uses_are_linked(text, expected):
    assert linked(text) == expected


def test_links_to_the_glossary_lead_somewhere():
    pages = [*(ROOT / "docs").rglob("*.md"), *build.SOURCES.glob("*.py")]
    wrong = {
        (page.name, anchor)
        for page in pages
        for anchor in LINK.findall(page.read_text())
        if anchor not in entries()
    }
    assert wrong == set()
