"""Every kernel compiles for every architecture, fits it, and holds what the lesson says.

Needs no GPU. It runs tests/compile_kernels.py in a process without the interpreter, one for each
architecture.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import triton

from flash_versions import VERSIONS

HERE = Path(__file__).parent
KIB = 1024
SHARED_MEMORY = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
MULTIPLY = {"forward_kernel", "backward_kernel", "dkdv_kernel", "dq_kernel"}
TENSOR_CORE = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}


@cache
def compiled(capability: int) -> list[dict]:
    """What the compiler made of every version and shape for one architecture."""
    command = [sys.executable, str(HERE / "compile_kernels.py"), str(capability)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@pytest.mark.parametrize("capability", SHARED_MEMORY, ids=lambda c: f"sm_{c}")
def test_compiles_fits_and_uses_the_tensor_cores(capability):
    rows = compiled(capability)
    assert {row["version"] for row in rows} == {*VERSIONS, ""}
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[capability], row
        if row["kernel"] not in MULTIPLY:
            continue
        if row["shape"].endswith("fp32"):  # exact products, so no tensor core
            assert not row["wgmma"] and not row["mma.sync"] and not row["tcgen05"], row
        elif row["shape"].startswith("prefill") and row["kernel"] == "forward_kernel":
            assert row[TENSOR_CORE[capability]] > 0, row
        elif row["shape"].startswith("prefill"):  # tiles too small for wgmma are for mma.sync
            assert row[TENSOR_CORE[capability]] + row["mma.sync"] > 0, row


def test_nothing_spills_on_hopper():
    """Of the forward not a byte with the Triton that was measured (3.6) and the next, and a few
    registers later or with packed sequences. FA2's backward keeps two accumulators: there, tiles
    that spill a few registers outside the products were measured to be the fastest.
    """
    for row in compiled(90):
        if "fp32" in row["shape"]:
            continue
        allowed = 0 if triton_version() < (3, 8) else 64
        if row["shape"] in ("packed", "scores"):
            allowed = 64
        if row["kernel"] in ("dkdv_kernel", "dq_kernel", "backward_kernel"):
            allowed = 400
        assert row["stack"] <= allowed, row


def test_loads_are_pipelined():
    """Tiles come by asynchronous copies while the previous block is computed."""
    for row in compiled(90):
        if row["kernel"] in ("forward_kernel", "dkdv_kernel") and "fp32" not in row["shape"]:
            assert row["cp.async"], row


def test_split_launches_the_reduction():
    kernels = {row["kernel"] for row in compiled(90) if row["shape"] == "decode-128"}
    assert kernels == {"forward_kernel", "combine_kernel"}


def test_fa2_needs_three_kernels_for_the_gradients_and_fa1_one():
    def kernels(version):
        rows = [r for r in compiled(90) if r["version"] == version and r["shape"] == "prefill-64"]
        return {row["kernel"] for row in rows} - {"forward_kernel"}

    assert kernels("fa1") == {"backward_kernel"}
    assert kernels("fa2") == {"delta_kernel", "dkdv_kernel", "dq_kernel"}
