"""docs/extend/design.md names rooms and files that exist, and every room."""

import re

from tests.helpers import ROOT

DESIGN = (ROOT / "docs/extend/design.md").read_text()


def test_where_is_x():
    rows = re.findall(r"^\| (the .+|a benchmark's shapes) \| (.+) \|$", DESIGN, re.M)
    assert len(rows) == 8
    for question, answer in rows:
        files = re.findall(r"\]\(\.\./\.\./([^)]+)\)", answer)
        assert files and all((ROOT / file).is_file() for file in files), question


def test_the_tree_shows_every_room():
    tree = DESIGN.split("```")[1]
    named = set(re.findall(r"\b(\w+)/", tree))
    for package in ("flash_versions", "transformer"):
        rooms = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        assert rooms <= named, rooms - named
        assert package in named, package
    for name in re.findall(r"\b\w+\.py\b", tree):
        assert any(ROOT.glob(f"*/**/{name}")), name
