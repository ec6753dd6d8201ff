"""What the notebooks say of their outputs is checked by the cells that make them."""

import nbformat
import pytest

from lessons import checked
from lessons.build import notebooks as build
from lessons.build.claims import missing


def notebook(text, code):
    """One of two cells."""
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(code)]
    return made


@pytest.mark.parametrize("name", build.notebook_names())
def test_every_claim_has_its_check(name):
    assert missing(build.read_source(name)) == []


@pytest.mark.parametrize(
    "text, code, words",
    [
        ("The table shows 3. <!-- checked: three -->", "checked('three', 1 + 2 == 3)", []),
        ("It is 3. <!-- checked: three -->", "%matplotlib inline\nchecked('three', True)", []),
        ("In the picture, red is new. <!-- key -->", "draw()", []),
        ("Three is odd.", "1 + 2", []),
        ('A [warp](x.md#warp "One of the rows. The table.") runs.', "1 + 2", []),
        ("## The table\n\n    the table\n\n| the table |", "1 + 2", []),
        ("The table shows 3.", "1 + 2", ["no check of: The table shows 3."]),
        ("It is 3. <!-- checked: three -->", "1 + 2", ["the text claims 'three'"]),
        ("It is 3.", "checked('three', 1 + 2 == 3)", ["a cell checks 'three'"]),
        (
            "It is 3. <!-- checked: three --> The last row is 4.",
            "checked('three', 1 + 2 == 3)",
            ["no check of: The last row is 4."],
        ),
    ],
)
def test_missing_checks_are_found(text, code, words):
    found = missing(notebook(text, code))
    assert len(found) == len(words)
    assert all(sentence.startswith(start) for sentence, start in zip(found, words))


def test_a_false_claim_ends_the_cell():
    checked("three", 1 + 2 == 3)
    with pytest.raises(AssertionError, match="'three'"):
        checked("three", 1 + 1 == 3)
