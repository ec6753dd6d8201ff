"""The pictures of docs/use/masks.md show what the masks do."""

import re

import torch

from flash_versions import masks
from flash_versions.dispatch.request import make_request
from flash_versions.versions.tiles.intervals import Intervals
from tests.flash_versions.versions.test_masks import seen
from tests.helpers import ROOT

PICTURES = re.findall(r"```text\n(.*?)```", (ROOT / "docs/use/masks.md").read_text(), re.DOTALL)
PARENTS = [-1, 0, 1, 0, 3, 0, 5, 6]


def test_who_sees_whom():
    *_, drawn = PICTURES[0].strip("\n").rpartition("\n\n")
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


def test_which_blocks_are_listed():
    q, k, v = torch.zeros(3, 1, 512, 1, 16)
    request = make_request(q, k, v, **masks.documents([256, 256]))
    lists = Intervals.of(request, 64, 64).lists[0].tolist()
    rows = [line for line in PICTURES[1].splitlines() if line[:8].strip().isdigit()]
    assert len(rows) == len(lists) == 8
    for tile, (row, line) in enumerate(zip(rows, lists)):
        number, *cells = row.split()[:9]
        listed = re.search(r"/ ([\d ]+?)(?:   # ([\d ]+))?$", row)
        masked, others = ([int(x) for x in (found or "").split()] for found in listed.groups())
        assert int(number) == tile
        assert masked == [j for j, cell in enumerate(cells) if cell == "/"] == line[2 : 2 + line[0]]
        assert others == [j for j, cell in enumerate(cells) if cell == "#"]
        assert others == line[::-1][: line[1]]
