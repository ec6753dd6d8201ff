"""The README's table "Use it with": every row names a test file that exists and has tests."""

import re

from tests.helpers import ROOT


def test_every_row_is_tested():
    section = (ROOT / "README.md").read_text().split("### Use it with\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 10
    for row in rows:
        files = re.findall(r"\((tests/[\w/]+\.py)\)", row)
        assert files, row
        assert all("\ndef test_" in (ROOT / file).read_text() for file in files), row
