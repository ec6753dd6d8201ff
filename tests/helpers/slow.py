"""What `make test` leaves to `make test-all`.

`make test` takes 5 to 15 minutes on two cores and shows every version, every
feature, forward, backward, what the compiler makes of them, and the models. So these tests are left
out: each took seconds of processor time, and tests that stay show most of what it shows. A name
is that of a file or of a function in it. Two rules come before the names: of the
architectures, `make test` compiles for sm_90 only, and there FA3's kernels only, the explicit ones
and what they leave to others; and what bfloat16 shows it does not repeat for float16.
"""

import re

import pytest

SLOW = [
    "emulator/backward/test_hopper_backward_emulated.py::test_every_switch",
    "emulator/backward/test_hopper_backward_emulated.py::test_head_dims",
    "emulator/backward/test_hopper_backward_emulated.py::test_nothing_is_found_where_no_bug_is",
    "emulator/backward/test_hopper_backward_emulated.py::test_planted_bugs_are_found",
    "emulator/backward/test_parts_emulated.py::test_every_case_with_a_group",
    "emulator/backward/test_parts_emulated.py::test_nothing_is_found_where_no_bug_is",
    "emulator/backward/test_parts_emulated.py::test_planted_bugs_are_found",
    "emulator/backward/test_parts_emulated.py::test_turns",
    "emulator/forward/test_blackwell_emulated.py::test_every_switch",
    "emulator/forward/test_blackwell_emulated.py::test_nothing_is_found_where_no_bug_is",
    "emulator/forward/test_blackwell_emulated.py::test_planted_bugs_are_found",
    "emulator/forward/test_decode_emulated.py::test_nothing_is_found_where_no_bug_is",
    "emulator/forward/test_decode_emulated.py::test_planted_bugs_are_found",
    "emulator/forward/test_fa4_emulated.py::test_every_switch",
    "emulator/forward/test_fa4_emulated.py::test_fp8_thresholds",
    "emulator/forward/test_fa4_emulated.py::test_nothing_is_found_where_no_bug_is",
    "emulator/forward/test_fa4_emulated.py::test_planted_bugs_are_found",
    "emulator/forward/test_fp8_emulated.py::test_every_switch",
    "emulator/forward/test_fp8_emulated.py::test_planted_bugs_are_found",
    "emulator/forward/test_fp8_emulated.py::test_scales_of_every_kind",
    "emulator/forward/test_hopper_emulated.py::test_every_switch",
    "emulator/forward/test_hopper_emulated.py::test_planted_bugs_are_found",
    "emulator/forward/test_roles.py::test_every_role_follows_the_table",
    "emulator/gemm/test_gemm_emulated.py::test_every_switch",
    "emulator/gemm/test_rmsnorm_gemm_emulated.py::test_every_switch_emulated",
]
END_OF_NAME = re.compile(r"[\[@]")  # what follows are parameters, and a group of pytest-xdist
REPEATED = re.compile(r"\bsm_(?!90)\d+|(?<!b)float16")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left to `make test-all`; see tests/helpers/slow.py")


def pytest_collection_modifyitems(items):
    for item in items:
        path, _, name = item.nodeid.removeprefix("tests/").partition("::")
        function = f"{path}::{END_OF_NAME.split(name)[0]}"
        if path in SLOW or function in SLOW or REPEATED.search(name):
            item.add_marker(pytest.mark.slow)
