"""Every kernel of attention compiles, fits its architecture, and holds what the lessons say.

Needs no GPU. `make test` compiles a plain call and one with options of each version for sm_90.
"""

import re
from functools import partial

import pytest
import triton

from flash_versions import VERSIONS
from flash_versions.inspect.compiled import ARCHES
from tests.compile.compiled import compiled
from tests.compile.kernels.attention import CALLS

TENSOR_CORE = {
    "sm_80": "mma_sync",
    "sm_89": "mma_sync",
    "sm_90": "wgmma",
    "sm_100": "tcgen05",
    "sm_120": "mma_sync",
}
OTHERS = [arch for arch in TENSOR_CORE if arch != "sm_90"]
FAST = ("portable", "hopper")
LATE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
compile_group = partial(compiled, "kernels.attention")


def of(*groups: str, arch: str = "sm_90"):
    """Groups as parameters; one worker for a group, so that it is compiled once."""
    return pytest.mark.parametrize(
        "group",
        [
            pytest.param(
                group,
                marks=[pytest.mark.xdist_group(f"compile {arch} {group}")]
                + [pytest.mark.slow] * (group not in FAST),
            )
            for group in groups
        ],
    )


def kernels(group: str, arch: str = "sm_90"):
    """(name of the call, kernel) of a group."""
    return [(name, row) for name, rows in compile_group(arch, group).items() for row in rows]


def hopper_kernels(group: str) -> dict[str, dict]:
    """The explicit kernels for Hopper in a group that multiply, by the name of the call."""
    return {
        name: row
        for name, row in kernels(group)
        if ".hopper" in row["module"] and row["counts"]["wgmma"]
    }


def names(loop: dict) -> list[str]:
    """The events of a loop, without how often."""
    return [name for name, _ in loop["events"]]


@of("portable", "hopper", "options", "fp8", "gradients")
def test_it_fits_and_uses_the_tensor_cores(group):
    rows = compile_group("sm_90", group)
    assert list(rows) == list(CALLS[group])
    for name, row in kernels(group):
        assert row["shared"] <= ARCHES["sm_90"].shared_memory, row
        if re.fullmatch("(forward|decode|backward.*|dkdv|dq)_kernel", row["kernel"]):
            products = row["counts"]["wgmma"], row["counts"]["mma_sync"]
            if "fp32" in name:  # exact, so without tensor cores
                assert products == (0, 0)
            elif row["kernel"] == "forward_kernel":
                assert products[0] and not products[1], name
            else:  # tiles too small for wgmma are for mma.sync
                assert sum(products), (name, row["kernel"])


def allowed_spills(name: str, row: dict) -> int:
    """Bytes of stack. FA2's backward keeps two accumulators: tiles that spill a few registers
    outside the products were measured to be the fastest.
    """
    if "fp32" in name or row["kernel"] in ("dkdv_kernel", "dq_kernel", "backward_kernel"):
        return 400
    few = any(word in name for word in ("packed", "cut", "intervals", "scores"))
    return 80 if few or LATE else 0


@of("portable", "hopper", "options", "fp8")
def test_nothing_spills(group):
    for name, row in kernels(group):
        assert row["stack"] <= allowed_spills(name, row), (name, row["kernel"])


@of("portable", "hopper", "options", "fp8")
def test_loads_are_pipelined(group):
    """No warp waits at once for the copies that bring tiles: copies of threads in FA1 and FA2, of
    TMA in the kernels for Hopper.
    """
    for name, row in kernels(group):
        counts = row["counts"]
        if row["module"].startswith(("flash_versions.versions.fa1", "flash_versions.versions.fa2")):
            assert not counts["tma_loads"], name
        if row["kernel"] in ("forward_kernel", "decode_kernel", "dkdv_kernel"):
            assert counts["cp_async"] or counts["tma_loads"] or "fp32" in name, name


@of("hopper", "options", "fp8", "gradients")
def test_the_kernels_for_hopper_are_asynchronous(group):
    """Their loads and stores are TMA's, and no product waits for the one before it. No loop of a
    forward touches a spilled register with the Tritons that were measured.
    """
    found = hopper_kernels(group)
    assert list(found) == [x for x in CALLS[group] if not x.startswith(("fa1", "fa2"))]
    for name, row in found.items():
        counts, backward = row["counts"], row["kernel"].startswith("backward")
        assert not row["serialised"] and not row["unused_barriers"], name
        assert counts["wgmma"] and counts["tma_loads"] and not counts["cp_async"], name
        assert counts["tma_stores"] or row["kernel"] == "decode_kernel", name
        assert row["hot_loops"], name
        for loop in row["hot_loops"]:
            assert loop["local_memory"] <= (8 if backward or LATE else 0), name


def batches(loop: dict) -> int:
    """How many times in a round of a loop products are issued and then waited for."""
    steps = [x.split()[0] for x in names(loop) if x.startswith(("HGMMA", "QGMMA", "wait"))]
    return sum(x == "wait" != before for before, x in zip([steps[-1], *steps], steps))


@of("hopper", "options")
def test_products_overlap_with_the_softmax(group):
    """P V is issued before S is waited for, but in decoding."""
    for name, row in hopper_kernels(group).items():
        if row["kernel"] == "forward_kernel":
            for loop in row["hot_loops"]:
                assert "HGMMA regs" in names(loop), name
                assert batches(loop) == 1, name


@of("options")
def test_a_head_dim_between_powers_of_two_is_not_padded(group):
    """A product of S takes 16 dims at a time, one for O 16 keys, for each panel of it."""
    expected = {"fa3, 160": 160 // 16 + 2 * 128 // 16, "fa3, 192 by 128": 192 // 16 + 128 // 16}
    found = hopper_kernels(group)
    for name, products in expected.items():
        assert [x["opcodes"]["HGMMA"] for x in found[name]["hot_loops"]] == [products] * 2, name


@of("hopper")
def test_fa4_votes_on_the_correction_and_shares_out_exponentials(group):
    """A quarter of the exponentials are multiply-adds, and no data moves for it: the shuffles are
    those of the maxima of two rows. A warp votes once for a block whether to correct.
    """
    found = hopper_kernels(group)
    for name, exponentials, vote in (("fa3", 64, 0), ("fa4", 64 * 6 // 8, 1)):
        for loop in found[name]["hot_loops"]:
            opcodes = loop["opcodes"]
            assert opcodes["MUFU"] == exponentials + 2, name
            assert opcodes.get("VOTE", 0) == vote and opcodes["SHFL"] == 4, name
            assert not {"STS", "LDS", "PRMT"} & set(opcodes), name


@of("fp8")
def test_bytes_halve_the_products_and_add_nothing(group):
    """A product of 64 rows takes 32 numbers at a time, not 16. Nothing moves P between threads:
    there are the 4 shuffles of the maxima of two rows, and none goes through shared memory. Scales
    of blocks cost a logarithm, an exponential and a reciprocal for a block.
    """
    found = hopper_kernels(group)
    for name in ("fp8, heads", "fp8, blocks", "fp8, fa4"):
        for loop in found[name]["hot_loops"]:
            opcodes = loop["opcodes"]
            assert opcodes["QGMMA"] == 128 // 32 + 128 // 32 and "HGMMA" not in opcodes, name
            assert opcodes["MUFU"] == 64 + 2 + 3 * (name == "fp8, blocks"), name
            assert opcodes["SHFL"] == 4 and not {"STS", "LDS"} & set(opcodes), name
    quantise = [row for _, row in kernels(group) if row["module"].endswith("fp8.kernels")]
    assert quantise and not any(row["spill_stores"] for row in quantise)


def consumer_loops(row: dict) -> list[dict]:
    """Of a backward; the warpgroup that does nothing but dQ computes no exponential."""
    return [x for x in row["hot_loops"] if x["opcodes"].get("MUFU", 0) > 1]


@of("hopper")
def test_the_backward_for_hopper(group):
    """Three kernels, of which the later two are launched while the one before runs. A consumer has
    five products and an exponential for a score; dP is issued between the exponentials.
    """
    rows = compile_group("sm_90", group)["fa3, backward"]
    assert [x["kernel"] for x in rows] == ["prepare_kernel", "backward_kernel", "finish_kernel"]
    assert [x["early"] for x in rows] == [False, True, True]
    loops = consumer_loops(rows[1])
    assert len(loops) == 4 == len(rows[1]["hot_loops"]) - 1
    for loop in loops:  # whole blocks, and those at the diagonal, of two consumers
        assert loop["opcodes"]["HGMMA"] == (128 + 128) // 16 + 2 * 64 // 16
        assert loop["opcodes"]["MUFU"] == 64 * 64 // 128
        events = names(loop)
        last = len(events) - 1 - events[::-1].index("MUFU.EX2")
        dp = events.index("HGMMA smem", events.index("wait 0"))
        assert dp < last < events.index("wait 1")


@pytest.mark.parametrize("arch", OTHERS)
def test_other_architectures(arch):
    """It fits, on the tensor cores of the architecture, which on sm_80 have no FP8; of FA1 and FA2
    hardly a register spills.
    """
    found = compile_group(arch, "elsewhere")
    assert list(found) == [*VERSIONS, *["fp8"] * (arch != "sm_80")]
    for name, row in kernels("elsewhere", arch):
        assert row["shared"] <= ARCHES[arch].shared_memory, name
        if row["kernel"] == "forward_kernel":
            assert row["counts"][TENSOR_CORE[arch]], name
        if name in ("fa1", "fa2"):
            assert row["stack"] <= 32, (name, row["kernel"])
        if name == "fp8":
            assert row["spill_stores"] == 0
