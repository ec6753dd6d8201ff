"""What the notebooks say of their outputs is checked by the cells that make them."""

import pytest

from lessons import checked
from lessons.build import notebooks as build
from lessons.build.claims import missing


@pytest.mark.parametrize("name", build.notebook_names())
def test_every_claim_has_its_check(name):
    assert missing(build.read_source(name)) == []


def test_a_false_claim_ends_the_cell():
    checked("three", 1 + 2 == 3)
    with pytest.raises(AssertionError, match="'three'"):
        checked("three", 1 + 1 == 3)
