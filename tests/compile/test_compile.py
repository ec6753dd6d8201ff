"""Every kernel compiles for every architecture, fits it, and holds what the lesson says.

Needs no GPU. kernels/attention.py compiles each part of an architecture in a process of its own.
"""

from functools import partial

import pytest
import triton

from flash_versions import VERSIONS
from tests.compile import apart
from tests.compile.kernels.attention import PARTS

KIB = 1024
other_tritons = pytest.mark.other_tritons
SHARED_MEMORY = {
    "sm_80": 163 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
}
FEW_SPILLS = (
    "packed", "padded", "scores", "window-256", "64-by-256", "192-by-128", "intervals-256",
)  # fmt: skip
MULTIPLY = {"forward_kernel", "decode_kernel", "backward_kernel", "dkdv_kernel", "dq_kernel"}
TENSOR_CORE = {
    "sm_80": "mma_sync",
    "sm_89": "mma_sync",
    "sm_90": "wgmma",
    "sm_100": "tcgen05",
    "sm_120": "mma_sync",
}


compiled = partial(apart.compiled, "kernels.attention")


def triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def of_part(arch: str, part: str):
    """A test's parameters; one worker for a part, so that each is compiled once."""
    group = pytest.mark.xdist_group(f"compile {arch} {part}")
    marks = [group] + [pytest.mark.wide] * (part == "wide") + [other_tritons] * (arch == "sm_90")
    marks += [pytest.mark.slow] * (part in ("fa1 fa2", "fa4 fp8"))  # `make test` compiles FA3
    return pytest.param(arch, part, marks=marks, id=f"{arch}-{part}")


by_part = pytest.mark.parametrize(
    ("arch", "part"), [of_part(arch, part) for arch in PARTS for part in PARTS[arch]]
)
by_part_of_hopper = pytest.mark.parametrize(
    ("arch", "part"), [of_part("sm_90", part) for part in PARTS["sm_90"]]
)
by_kernel_of_hopper = pytest.mark.parametrize(
    ("arch", "part"), [of_part("sm_90", part) for part in ("fa3", "fa4 fp8", "wide")]
)
with_fp8 = pytest.mark.xdist_group("compile sm_90 fa4 fp8")
with_fa3 = pytest.mark.xdist_group("compile sm_90 fa3")
with_fa2 = pytest.mark.xdist_group("compile sm_90 fa1 fa2")


@by_part
def test_compiles_fits_and_uses_the_tensor_cores(arch, part):
    rows = compiled(arch, part)
    versions = {*VERSIONS} if part in ("all", "wide") else {*VERSIONS} & {*part.split()}
    if part == "wide" and arch != "sm_90":  # test_tiles.py
        versions -= {"fa1", "fa2"}
    versions |= {""} if part in ("all", "fa1 fa2") else set()  # what appends to a cache
    assert {row["version"] for row in rows} >= versions
    for row in rows:
        assert row["arch"] == arch
        assert row["shared"] <= SHARED_MEMORY[arch], row
        if row["kernel"] not in MULTIPLY:
            continue
        if row["shape"].endswith("fp32"):  # exact products, so no tensor core
            assert not row["wgmma"] and not row["mma_sync"] and not row["tcgen05"], row
        elif row["shape"].startswith("prefill") and row["kernel"] == "forward_kernel":
            assert row[TENSOR_CORE[arch]] > 0, row
        elif row["shape"].startswith("prefill"):  # tiles too small for wgmma are for mma.sync
            assert row[TENSOR_CORE[arch]] + row["mma_sync"] > 0, row


@by_part_of_hopper
def test_nothing_spills_on_hopper(arch, part):
    """Of the forward not a byte with the Triton that was measured (3.6) and the next, and a few
    registers later, with packed sequences, or a window or intervals at head_dim 256. FA2's
    backward keeps two accumulators: there, tiles that spill a few registers outside the products
    were measured to be the fastest.
    """
    for row in compiled(arch, part):
        if "fp32" in row["shape"]:
            continue
        allowed = 0 if triton_version() < (3, 8) else 64
        if row["shape"] in FEW_SPILLS:
            allowed = 64
        if row["module"].endswith("fa2.forward") and row["shape"].startswith("intervals"):
            allowed = 80  # two loads in the blocks that are cut, with Triton 3.6
        if row["module"].endswith("fa2.forward") and row["shape"] == "groups-128":
            allowed = 64  # packed heads, with Triton 3.6
        if row["shape"] == "long-64" and triton_version() >= (3, 8):
            allowed = 128
        if row["kernel"] in ("dkdv_kernel", "dq_kernel", "backward_kernel"):
            allowed = 400
        assert row["stack"] <= allowed, row


@pytest.mark.parametrize(
    ("arch", "part"), [of_part(arch, "all") for arch in PARTS if arch != "sm_90"]
)
def test_hardly_anything_spills_elsewhere(arch, part):
    """Where nothing was timed, and of FA1 and FA2: no register at head_dim 128 within a loop."""
    rows = [row for row in compiled(arch, part) if row["version"] in ("fa1", "fa2")]
    assert {row["shape"] for row in rows} == {"prefill-128"}
    assert all(row["stack"] <= 32 for row in rows), rows


@pytest.mark.parametrize(
    ("arch", "part"),
    [of_part("sm_90", "fa4 fp8")]
    + [of_part(arch, part) for arch in PARTS if arch != "sm_90" for part in ("all", "wide")],
)
def test_the_portable_fp8_kernel(arch, part):
    """Without spills, on tensor cores that have FP8. On Hopper the loops shuffle for the maximum
    and the sum of two rows per thread, twice each, and not to bring P into the order of V's keys.
    """
    rows = [row for row in compiled(arch, part) if row["module"].endswith("fa3.fp8.forward")]
    assert len(rows) == {"sm_80": 0, "sm_90": 4}.get(arch, 1)
    for row in rows:
        assert row["spills"] == 0, row
        few_rows = row["shape"] == "fp8-decode"  # too few for wgmma, so mma.sync
        assert row["mma_sync" if few_rows else TENSOR_CORE[arch]] > 0, row
        if arch == "sm_90" and not few_rows:
            assert row["shuffles"] and max(row["shuffles"]) <= 8, row


@by_part_of_hopper
def test_loads_are_pipelined(arch, part):
    """Tiles come by asynchronous copies, of threads or of TMA, while the previous block is
    computed.
    """
    for row in compiled(arch, part):
        if (
            row["kernel"] in ("forward_kernel", "decode_kernel", "dkdv_kernel")
            and "fp32" not in row["shape"]
        ):
            assert row["cp_async"] or row["tma_loads"], row
        if row["module"].startswith(("flash_versions.versions.fa1", "flash_versions.versions.fa2")):
            assert not row["tma_loads"], row


@pytest.mark.parametrize(
    ("arch", "part"), [of_part(arch, "all") for arch in ("sm_80", "sm_89", "sm_120")]
)
def test_where_products_read_registers_the_gradients_are_fa2s(arch, part):
    rows = [row for row in compiled(arch, part) if row["kernel"] in ("dkdv_kernel", "dq_kernel")]
    assert {row["version"] for row in rows} == {"fa2", "fa3"}
    assert {row["module"] for row in rows} == {"flash_versions.versions.fa2.backward"}


def hopper_kernels(part: str) -> dict[tuple, dict]:
    """Every form of the explicit kernels in a part, by (version, shape, variant)."""
    return {
        (row["version"], row["shape"], row["variant"]): row
        for row in compiled("sm_90", part)
        if row["module"].endswith(".hopper.forward")
    }


def batches(loop) -> int:
    """How many times in a round of a loop products are issued and then waited for."""
    names = [name for name, _ in loop["events"]]
    steps = [name.split()[0] for name in names if name.startswith(("HGMMA", "QGMMA", "wait"))]
    return sum(x == "wait" != before for before, x in zip([steps[-1], *steps], steps))


@pytest.mark.parametrize(
    ("version", "part"),
    [
        pytest.param("fa3", "fa3", marks=[with_fa3, other_tritons], id="fa3"),
        pytest.param("fa4", "fa4 fp8", marks=[with_fp8, other_tritons, pytest.mark.slow], id="fa4"),
    ],
)
def test_the_hopper_kernel_serves_what_it_should(version, part):
    found = {key: row for key, row in hopper_kernels(part).items() if key[0] == version}
    modules = {row["module"] for row in found.values()}
    assert modules == {f"flash_versions.versions.{version}.hopper.forward"}
    shapes = {shape for _, shape, variant in found if variant is None}
    assert shapes >= {"prefill-64", "prefill-128", "prefill-256", "window-256", "padded"}
    assert not shapes & {"prefill-128-fp32", "decode-128", "scores", "pages"}


@by_kernel_of_hopper
def test_the_hopper_kernel_is_asynchronous(arch, part):
    """Its loads and its store are TMA's, its products WGMMA's, in flight together; no loop touches
    a spilled register with the Tritons that were measured.
    """
    for key, row in hopper_kernels(part).items():
        _, shape, variant = key
        product = "QGMMA" if shape.startswith("fp8") else "HGMMA"
        assert not row["serialised"] and not row["unused_barriers"], key
        assert row["tma_loads"] and row["tma_stores"] and not row["cp_async"], key
        assert row["loops"], key
        for loop in row["loops"]:
            assert loop["local_memory"] == 0 or triton_version() >= (3, 8), key
            assert f"{product} regs" in [name for name, _ in loop["events"]], key
            # With overlap, P V is issued before S is waited for.
            in_order = variant in ("no overlap", "neither") or shape == "order-112"
            assert batches(loop) == (2 if in_order else 1), key
        assert shape != "order-112" or len(row["loops"]) == 3, key


# Products of a loop: of S, each with 16 dims, and for O, each with 16 keys, for both panels of it.
PRODUCTS = {
    "prefill-80": 80 // 16 + 128 // 16,
    "panels-96": 96 // 16 + 128 // 16,
    "panels-160": 160 // 16 + 2 * 128 // 16,
    "panels-192": 192 // 16 + 2 * 64 // 16,
    "192-by-128": 192 // 16 + 128 // 16,
}


@by_kernel_of_hopper
def test_a_head_dim_between_powers_of_two_is_not_padded(arch, part):
    found = {k: row for k, row in hopper_kernels(part).items() if k[1] in PRODUCTS}
    assert len(found) == {"fa3": 4, "fa4 fp8": 1, "wide": 3}[part]
    for key, row in found.items():
        assert [loop["opcodes"]["HGMMA"] for loop in row["loops"]] == [PRODUCTS[key[1]]] * 2, key


@pytest.mark.parametrize(("arch", "part"), [of_part("sm_90", "fa4 fp8"), of_part("sm_90", "wide")])
def test_bytes_halve_the_products_and_add_nothing(arch, part):
    """A product of 64 rows takes 32 numbers at a time, not 16. Nothing moves P between threads:
    there are the 4 shuffles of the maxima of two rows, and none goes through shared memory. Scales
    of blocks cost a logarithm, an exponential and a reciprocal for a block.
    """
    kernels = {k: row for k, row in hopper_kernels(part).items() if k[2] in ("head", "block")}
    assert len(kernels) == (2 if part == "wide" else 4)
    for (_, shape, scales), row in kernels.items():
        head_dim = int(shape.rsplit("-", 1)[1])
        for loop in row["loops"]:
            opcodes = loop["opcodes"]
            assert (opcodes["QGMMA"], opcodes["HGMMA"]) == (head_dim // 32 + 128 // 32, 0), shape
            assert opcodes["MUFU"] == 128 * 64 // 128 + 2 + 3 * (scales == "block"), shape
            assert opcodes["SHFL"] == 4, shape
            # An exponential of a pair is two, and one instruction that puts them together.
            assert opcodes["PRMT"] == 128 * 64 // 128 // 2, shape
            assert opcodes["STS"] == opcodes["LDS"] == 0, shape


@pytest.mark.parametrize(("arch", "part"), [of_part("sm_90", "wide")])
def test_what_quantises_spills_nothing(arch, part):
    """Scales of blocks in one launch; those of heads need the largest number first."""
    rows = [row for row in compiled(arch, part) if row["module"].endswith("fp8.kernels")]
    launches = [row["shape"] for row in rows]
    assert launches == ["fp8:block", "fp8:head", "fp8:head", "fp8:block:hadamard"]
    assert all(row["spills"] == 0 for row in rows)


def between_the_waits(row):
    """Whether the exponentials are there, loop by loop."""
    for loop in row["loops"]:
        found = [name for name, _ in loop["events"]]
        yield "MUFU.EX2" in found[found.index("wait 1") : found.index("wait 0")]


@other_tritons
@with_fa3
def test_the_late_wait_keeps_the_exponentials_between_the_waits():
    """And without it, ptxas moves the second wait in front of them: the faster order."""
    kernels = hopper_kernels("fa3")
    assert all(between_the_waits(kernels["fa3", "prefill-128", "late wait"]))
    assert not any(between_the_waits(kernels["fa3", "full-128", None]))


@pytest.mark.parametrize(("arch", "part"), [of_part("sm_90", "wide")])
def test_the_late_wait_of_other_head_dims(arch, part):
    for shape in ("prefill-64", "prefill-256"):
        assert all(between_the_waits(hopper_kernels(part)["fa3", shape, "late wait"])), shape


@other_tritons
@with_fa2
def test_split_launches_the_reduction():
    rows = [row for row in compiled("sm_90", "fa1 fa2") if row["shape"] == "decode-128"]
    kernels = {row["kernel"] for row in rows if row["version"] == "fa2"}
    assert kernels == {"decode_kernel", "combine_kernel"}


@other_tritons
@with_fa2
def test_fa2_needs_three_kernels_for_the_gradients_and_fa1_one():
    def kernels(version):
        rows = [row for row in compiled("sm_90", "fa1 fa2") if row["shape"] == "prefill-128"]
        return {row["kernel"] for row in rows if row["version"] == version} - {"forward_kernel"}

    assert kernels("fa1") == {"backward_kernel"}
    assert kernels("fa2") == {"delta_kernel", "dkdv_kernel", "dq_kernel"}
