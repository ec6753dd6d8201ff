"""The glossary: one page, from which notebooks and the site take what a term means."""

import re

import pytest

from lessons.build import notebooks as build
from lessons.build.glossary import GLOSSARY, LINK, entries, link_first_uses
from tests.helpers import ROOT

LONGEST = 250  # characters of a definition, which has to fit under a pointer


def linked(text, seen=None):
    """Text with links, without their titles."""
    return re.sub(r' "[^"]*"\)', ")", link_first_uses(text, seen or set(), "g.md"))


def test_entries_are_short_and_in_order():
    terms = [entry.term for entry in entries().values()]
    assert len(terms) >= 40
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) == GLOSSARY.read_text().count("\n## ")
    assert [e.term for e in entries().values() if not 20 < len(e.definition) <= LONGEST] == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("A warp, two warps.", "A [warp](g.md#warp), two warps."),
        ("Warps run.", "[Warps](g.md#warp) run."),
        ("**Tensor cores** idle.", "**[Tensor cores](g.md#tensor-core)** idle."),
        ("a causal\nmask", "a [causal\nmask](g.md#causal-mask)"),
        ("a warpgroup", "a [warpgroup](g.md#warpgroup)"),
        ("warped, SMALL, warp-wide", "warped, SMALL, warp-wide"),
        ("`warp`, $warp$, [a warp](x.md)", "`warp`, $warp$, [a warp](x.md)"),
        ("# A warp\n\n```\nwarp\n```\n\n| warp |\n", "# A warp\n\n```\nwarp\n```\n\n| warp |\n"),
        ("[It](glossary.md#warp) is a warp.", "[It](glossary.md#warp) is a warp."),
    ],
)
def test_first_uses_are_linked(text, expected):
    assert linked(text) == expected


def test_the_title_is_the_definition():
    found = link_first_uses("A warp.", set(), "g.md")
    assert found == f'A [warp](g.md#warp "{entries()["warp"].definition}").'


def test_a_second_cell_has_no_second_link():
    seen = set()
    assert "](" in link_first_uses("A warp.", seen, "g.md")
    assert link_first_uses("A warp.", seen, "g.md") == "A warp."


def test_links_to_the_glossary_lead_somewhere():
    pages = [*(ROOT / "docs").rglob("*.md"), *build.SOURCES.glob("*.py")]
    wrong = {
        (page.name, anchor)
        for page in pages
        for anchor in LINK.findall(page.read_text())
        if anchor not in entries()
    }
    assert wrong == set()


def test_only_text_is_built_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "_src")
    build.SOURCES.mkdir()
    source, made = build.SOURCES / "one.py", tmp_path / "one.ipynb"
    cell = '# %%\nimport random\n\nprint("drawn:", random.random())\n'
    source.write_text(f"# %% [markdown]\n# before\n\n{cell}")
    assert build.main(["one"]) == 0
    first = made.read_text()
    source.write_text(source.read_text().replace("before", "after"))
    assert build.main(["one", "--text"]) == 0
    assert made.read_text() != first  # the text, and the cell's name that is made from it
    outputs = [line for line in first.splitlines() if "drawn: " in line]
    assert outputs and all(line in made.read_text() for line in outputs)
    source.write_text(source.read_text().replace("random()", "randrange(3)"))
    assert build.main(["one", "--text"]) == 1
    assert "has changed" in capsys.readouterr().err
