"""Q stays in its registers for all blocks of a tile.

For a kernel that waits for each product before the next step (`overlap=False`), ptxas of Triton 3.6
gives P the registers of Q, although the next block's S is a product with Q: the results are wrong,
and only on a GPU. With overlap, a product with Q and one with P are in flight together. So `held`
is refused without overlap, and here the SASS of what is launched is read.
"""

import pytest

from flash_versions.versions.tiles.triton_compat import OPERANDS_STAY
from tests.compile import apart


@pytest.mark.parametrize("version", ["fa3", "fa4"])
def test_no_loop_writes_the_registers_of_q(version):
    rows = apart.compiled("kernels.held", version)
    for row in rows:
        for (in_loop, changed), (in_walk, changed_in_walk) in zip(row["loops"], row["walks"]):
            assert not changed and not changed_in_walk, row
            assert in_walk == 2 * in_loop, row  # a tile's first block comes before its loop
    held = [row for row in rows if any(products for products, _ in row["loops"])]
    assert len(held) > len(rows) / 2 or not OPERANDS_STAY
