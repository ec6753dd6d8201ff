"""FA1's and FA2's kernels in the tiles that are chosen for GPUs on which nothing was timed: they
fit, and their loops spill nothing.

Needs no GPU. test_compile.py has head_dim 128 and Hopper's measured tiles.
"""

import pytest

from flash_versions.inspect.compiled import ARCHES
from tests.compile.compiled import compiled
from tests.compile.test_compile import LATE

HEAD_DIMS = {"sm_80": (64, 256), "sm_89": (64, 96, 256), "sm_100": (64, 192), "sm_120": (96, 256)}
OF_A_LOOP = 0.04  # of its instructions may access spilled registers where columns are padding


@pytest.mark.wide
@pytest.mark.parametrize("arch", HEAD_DIMS)
def test_tiles_fit_and_loops_spill_nothing(arch):
    """But for a few registers where a head dim is no power of two, as its columns are masked."""
    rows = compiled("kernels.tiles", arch, *map(str, HEAD_DIMS[arch]))
    assert len(rows) == 5 * len(HEAD_DIMS[arch])
    for row in rows:
        assert row["shared"] <= ARCHES[arch].shared_memory and row["programs"] >= 1, row
        padded = row["head_dim"] & (row["head_dim"] - 1) or LATE
        assert row["spills"], row
        for spills, instructions in zip(row["spills"], row["instructions"]):
            assert spills <= (OF_A_LOOP * instructions if padded else 0), row
