"""The list of what `make test` leaves out names tests that exist."""

import ast

import pytest

from tests.helpers import ROOT
from tests.helpers.slow import SLOW


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_test_exists(name):
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert not function or function in {getattr(node, "name", "") for node in tree.body}
