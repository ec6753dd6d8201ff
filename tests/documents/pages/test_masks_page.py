"""The picture of docs/use/masks.md shows what the masks do."""

import re

import torch

from flash_versions import masks
from tests.flash_versions.versions.test_masks import seen
from tests.helpers import ROOT

PARENTS = [-1, 0, 1, 0, 3, 0, 5, 6]


def test_who_sees_whom():
    page = (ROOT / "docs/use/masks.md").read_text()
    drawing = re.search(r"```text\n(.*?)\n```", page, re.DOTALL)[1]
    *_, drawn = drawing.rpartition("\n\n")
    rows = [re.split(r"  +", line) for line in drawn.splitlines()]
    options = [
        masks.documents([3, 3, 2]),
        masks.shared_prompt(2, [3, 3]),
        masks.tree(PARENTS),
        masks.prefix(3, 8),
    ]
    for column, option in enumerate(options):
        picture = [[cell == "#" for cell in row[column].split()] for row in rows]
        assert torch.equal(seen(8, option), torch.tensor(picture))
