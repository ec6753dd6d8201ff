"""P V of as many columns as V has, in the emulator: inline PTX, V's descriptor, its address."""

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator.machine import here, run_grid
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import panel_widths, value_columns, value_widths
from flash_versions.versions.oracle.budget import assess_request
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, outcomes, plant
from tests.helpers.kernels.budget import assert_ok

LOADED = gluon_emulator.load("flash_versions.versions.fa4.hopper.host")
FORWARD = {"fa3": LOADED["fa3.hopper.host"], "fa4": LOADED["fa4.hopper.host"]}
HopperConfig = LOADED["fa3.hopper.config"].HopperConfig
RolesConfig = LOADED["fa4.hopper.config"].RolesConfig
# The schedules that a product with V is in.
SCHEDULES = {
    "overlap": ("fa3", HopperConfig(stages=2)),
    "64 keys": ("fa3", HopperConfig(block_kv=64, stages=3)),
    "in order": ("fa3", HopperConfig(3, q_stages=1, overlap=False)),
    "corrected late": ("fa4", RolesConfig(threshold=0.25)),
}


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors."""
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


def assess(schedule, head_dim, dtype, **options):
    """The accuracy of an emulated forward with more blocks than slots."""
    version, config = SCHEDULES[schedule]
    q = torch.randn(1, 200, 2, head_dim, dtype=dtype)
    k, v = torch.randn(2, 1, 700, 1, head_dim, dtype=dtype)
    request = make_request(q, k, v, num_splits=1, **options)
    o, lse, _ = FORWARD[version].forward(request, config)
    return assess_request({"o": o, "lse": lse}, request)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("head_dim", "dtype"), [
    (80, torch.float16), (96, torch.bfloat16), (112, torch.float16), (104, torch.bfloat16),
])  # fmt: skip
def test_every_schedule(head_dim, dtype, schedule):
    assert_ok(assess(schedule, head_dim, dtype, causal=head_dim == 96))


def test_a_product_has_the_columns_that_there_are():
    """In multiples of 16, where a tile of a power of two has more than 64."""
    for head_dim in range(1, 257):
        columns, widths = value_columns(head_dim), value_widths(head_dim)
        if columns:
            assert widths == (128,) and columns % 16 == 0 and head_dim <= columns < head_dim + 16
        else:
            assert widths == panel_widths(head_dim)
    assert {n for n in range(1, 257) if value_columns(n)} == set(range(65, 113))


IN_FLIGHT = "a product is read while it is in flight"
BUGS = {
    "V's slot is another": Bug("multiply_pv", [("address * stage.slot +", "address * 0 +")], WRONG),
    "a tile begins elsewhere": Bug(
        "found_address", [("return begin + ", "return 1024 + begin + ")], "row 120 of a tile of 128"
    ),
    "each instruction reads the same keys": Bug(
        "product_ptx", [("{16 * ROW_BYTES >> 4}", "0")], WRONG
    ),
    "an instruction begins eight keys too early": Bug(
        "product_ptx", [("16 * ROW_BYTES", "8 * ROW_BYTES")], WRONG
    ),
    "the columns beyond 64 are sought elsewhere": Bug(
        "product_ptx", [("{keys * ROW_BYTES >> 4 << 16}", "{keys * ROW_BYTES << 16}")], "elsewhere"
    ),
    "keys are sought in another order": Bug(
        "product_ptx", [("8 * ROW_BYTES", "16 * ROW_BYTES")], "swizzled else"
    ),
    "the tile is not said to be swizzled": Bug(
        "product_ptx", [(" | 1 << 30", "")], "swizzled else"
    ),
    "P of other keys": Bug("product_ptx", [("${first + i}", "${first + (i ^ 1)}")], "mixed"),
    "no fence": Bug("product_ptx", [('"wgmma.fence.sync.aligned;",', "")], "without wgmma.fence"),
    "no commit": Bug(
        "product_ptx", [("wgmma.commit_group.sync.aligned; ", "")], "not committed"
    ),
    "sums begin anew": Bug(
        "product_ptx", [("setp.eq.u32 add, 0, 0", "setp.eq.u32 add, 0, 1")], "does not add"
    ),
    "results in other registers": Bug(
        "product_constraints", [("[str(i) for", "[str(sums - 1 - i) for")], "are not the sums"
    ),
    "O is not waited for": Bug("wait_pv", [("_wait(0,", "_wait(1,")], IN_FLIGHT),
    "parts are joined in another order": Bug(
        "joined", [("gl.join(first, second)", "gl.join(second, first)")], WRONG
    ),
}  # fmt: skip
LATE = Bug(
    "attend", [("            acc = corrected(acc, alpha)\n        buffers.v.wait(before)",
                "            pass\n        buffers.v.wait(before)")], WRONG
)  # fmt: skip


def is_right(schedule):
    return all(x.ok for x in assess(schedule, 96, torch.bfloat16).values())


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_found(bug, monkeypatch):
    plant(bug, LOADED.values(), monkeypatch)
    assert_found(bug, lambda: is_right("overlap"), monkeypatch)


def test_a_correction_that_is_forgotten_is_found(monkeypatch):
    plant(LATE, LOADED.values(), monkeypatch)
    assert_found(LATE, lambda: is_right("corrected late"), monkeypatch)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_found_where_no_bug_is(schedule, monkeypatch):
    assert list(outcomes(lambda: is_right(schedule), monkeypatch)) == ["", "", ""]


def addresses(marks):
    """(address that is found, where the tiles are) of the second of three, with marks in others."""
    found = []

    def kernel():
        first, sought, last = (
            gluon_emulator.allocate_shared_memory(torch.bfloat16, [2, 64, 128], None)
            for _ in range(3)
        )
        for tiles, mark in zip((first, last), marks):
            tiles.data.view(-1).view(torch.int32).fill_(mark)
        begin = here.partition.program.placed[1][0]
        found.extend((int(LOADED["tiles.triton_compat"].address_of(sought)), begin))

    run_grid(kernel, 1, ())
    return found


@pytest.mark.parametrize("marks", [(0, 0), (1, 2), (2, 1)])
def test_the_address_of_tiles(marks):
    """Also where other words are what is sought."""
    found, expected = addresses(marks)
    assert found == expected


def test_one_mark_would_not_do(monkeypatch):
    bug = Bug("found_address", [("static_range(1, 3)", "static_range(1, 2)")], "")
    plant(bug, LOADED.values(), monkeypatch)
    found, expected = addresses((2, 1))
    assert found != expected
