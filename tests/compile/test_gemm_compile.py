"""What the compiler makes of the matrix products and of those of a norm, without a GPU."""

from functools import partial

import pytest

from flash_versions.inspect.compiled import ARCHES
from tests.compile.compiled import compiled
from tests.compile.test_compile import OTHERS, TENSOR_CORE

compile_group = partial(compiled, "kernels.gemm")
for_hopper = pytest.mark.parametrize(
    "group",
    [
        pytest.param("hopper", marks=pytest.mark.xdist_group("compile gemm")),
        pytest.param("options", marks=[pytest.mark.xdist_group("gemm more"), pytest.mark.slow]),
    ],
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", *OTHERS])
def test_the_portable_kernels_fit_and_use_the_tensor_cores(arch):
    for name, row in compile_group(arch, "portable").items():
        counts = row["counts"]
        assert row["shared"] <= ARCHES[arch].shared_memory, name
        assert row["spill_stores"] <= 64 and not row["serialised"], name  # bytes, before Hopper
        assert counts["cp_async"] + counts["tma_loads"] > 0, name
        if "fp32" in name:  # exact products, so no tensor core
            assert not any(counts[x] for x in ("wgmma", "mma_sync", "tcgen05")), name
        else:
            assert counts[TENSOR_CORE[arch]] > 0, name


@for_hopper
def test_nothing_spills_and_no_product_waits_for_the_one_before(group):
    for name, row in compile_group("sm_90", group).items():
        assert row["shared"] <= ARCHES["sm_90"].shared_memory, name
        assert not row["stack"] and not row["serialised"] and not row["injected"], name
        assert not row["unused_barriers"], name


@for_hopper
def test_the_main_loops_keep_a_product_in_flight(group):
    """Two consumers, each with a loop of 64 columns of K: 8 products of 64 x 128 x 16 or, where a
    tile has 256 columns, 4 of 64 x 256 x 16. Those of a norm load A once, by ldmatrix, and square
    it without shuffles.
    """
    for name, row in compile_group("sm_90", group).items():
        products = 4 if name == "many" else 8
        norm = name.startswith("norm")
        assert len(row["hot_loops"]) == 2, name
        for loop in row["hot_loops"]:
            opcodes, events = loop["opcodes"], [event for event, _ in loop["events"]]
            assert opcodes["HGMMA"] == products and not loop["local_memory"], name
            assert opcodes.get("LDSM", 0) == (products if norm else 0), name
            assert "SHFL" not in opcodes, name
            assert "wait 1" in events and events.count("wait 0") == (1 if norm else 0), name


@for_hopper
def test_the_epilogue_is_stmatrix_a_fence_and_stores_by_tma(group):
    """128 x 128 numbers of 16 bits are, for each of 128 threads, 16 times 4 registers; there are
    two consumers, and SwiGLU stores half. TMA reads a sub-tile while the next is written.
    """
    for name, row in compile_group("sm_90", group).items():
        assert row["stmatrix"] == (16 if "swiglu" in name else 32), name
        assert row["fences"] > row["counts"]["tma_stores"] >= 4, name
        assert row["global_stores"] == 0, name
        assert row["stores_under_way"] == ["0", "1"], name
