"""What the compiler makes of the matrix products, without a GPU."""

import pytest

from tests.compile import apart
from tests.compile.test_compile import SHARED_MEMORY, TENSOR_CORE

pytestmark = pytest.mark.slow

ARCHES = [
    pytest.param(arch, marks=[pytest.mark.wide] if arch != "sm_90" else [])
    for arch in ("sm_90", "sm_80", "sm_89", "sm_100", "sm_120")
]
with_hopper = pytest.mark.xdist_group("compile gemm sm_90")


def compiled(arch: str) -> dict[str, dict]:
    """What the compiler made of each kernel, by name."""
    return {row["name"]: row for row in apart.compiled("kernels.gemm", arch)}


def for_hopper() -> dict[str, dict]:
    """The kernels that are written for it."""
    return {name: row for name, row in compiled("sm_90").items() if "portable" not in name}


@pytest.mark.other_tritons
@with_hopper
@pytest.mark.parametrize("arch", ARCHES)
def test_the_portable_kernel_fits_and_uses_the_tensor_cores(arch):
    rows = {name: row for name, row in compiled(arch).items() if "portable" in name}
    assert len(rows) == 3
    for name, row in rows.items():
        assert row["shared"] <= SHARED_MEMORY[arch], row
        assert row["spills"] <= 8 and not row["serialised"], row  # bytes, before Hopper
        if "float32" in name:  # exact products, so no tensor core
            assert not row["wgmma"] and not row["mma_sync"] and not row["tcgen05"], row
        else:
            assert row[TENSOR_CORE[arch]] > 0 and row["cp_async"] + row["tma_loads"] > 0, row


@pytest.mark.other_tritons
@with_hopper
def test_nothing_spills_and_no_product_waits_for_the_one_before():
    for row in for_hopper().values():
        assert row["shared"] <= SHARED_MEMORY["sm_90"], row
        assert not row["spills"] and not row["serialised"] and not row["injected"], row
        assert not row["unused_barriers"], row


@pytest.mark.other_tritons
@with_hopper
def test_the_main_loop_keeps_a_product_in_flight():
    """Two consumers, each with a loop of 64 columns of K: 8 products of 64 x 128 x 16 or, where a
    tile has 256 columns, 4 of 64 x 256 x 16. Those of one step may be in flight at its end.
    """
    for name, row in for_hopper().items():
        assert row["products_under_way"] == [0, 1], row
        assert len(row["loops"]) == 2, row
        for loop in row["loops"]:
            assert loop["products"] == (4 if "many" in name else 8), row
            assert loop["local_memory"] == 0 and loop["instructions"] < 80, row


@pytest.mark.other_tritons
@with_hopper
def test_the_epilogue_is_stmatrix_a_fence_and_stores_by_tma():
    """128 x 128 numbers of 16 bits are, for each of 128 threads, 16 times 4 registers; there are
    two consumers, and SwiGLU stores half. TMA reads a sub-tile while the next is written.
    """
    for name, row in for_hopper().items():
        assert row["stmatrix"] == (16 if name == "swiglu" else 32), row
        assert row["fences"] > row["tma_stores"] >= 4, row
        assert row["global_stores"] == 0, row
        assert row["stores_under_way"] == ["0", "1"], row
        assert row["ldmatrix"] == (32 if "residual" in name else 0), row
