"""Schedules of FA3's backward for Hopper other than the usual ones: what the compiler makes of
them, and on the device.

    TRITON_INTERPRET=0 python tests/test_hopper_backward_schedules.py

prints a JSON row for each kernel that is compiled, as test_hopper_backward.py does.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from test_hopper_backward import SHARED_MEMORY, check, on_hopper, qkv, row, without_moves

from flash_versions.fa3 import backward_hopper
from flash_versions.fa3.backward_config import default_config
from flash_versions.inspect import compiling
from flash_versions.request import make_request

OVERLAP = {"overlap": True, "backwards": True}
HELD = {"dq_parts": 1, "held": 2, "release_once": True}
TURNED = {"held": 1, "turned": True, "registers": (192, 104)}
# name -> (causal, changes of the schedule of head_dim 64)
SCHEDULES = {
    "overlap": (False, OVERLAP),
    "held": (False, HELD),
    "held, causal": (True, HELD),
    "turned": (False, TURNED),
    "turned, overlap, causal": (True, TURNED | OVERLAP),
}
compiles = pytest.mark.xdist_group("hopper_backward_schedules")  # one worker: each compiled once


def compile_schedule(causal: bool, changes: dict) -> dict[str, dict]:
    """{kernel: row} of a backward at head_dim 64."""
    q = torch.empty(1, 512, 4, 64, dtype=torch.bfloat16)
    lse = torch.empty(1, 4, 512)
    with compiling("sm_90") as found:
        request = make_request(q, q, q, causal=causal)
        config = replace(default_config(request), **changes)
        backward_hopper.backward(request, q, lse, None, q, lse, config)
    return {
        x.kernel: row(x)
        | {
            "launched_early": x.code.metadata.launch_pdl,
            "waits_for_kernel": x.opcodes["ACQBULK"],
            "lets_next_begin": x.opcodes["PREEXIT"],
        }
        for x in found
    }


@cache
def compiled() -> dict[str, dict[str, dict]]:
    """{schedule: {kernel: row}}."""
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@compiles
@pytest.mark.parametrize("name", SCHEDULES)
def test_they_keep_to_registers(name):
    """But for a handful of loads; and no product waits for the one before it."""
    rows = compiled()[name]
    assert list(rows) == ["prepare_kernel", "backward_kernel", "finish_kernel"]
    assert rows["prepare_kernel"]["stack"] == rows["finish_kernel"]["stack"] == 0
    kernel = rows["backward_kernel"]
    assert not kernel["serialised"] and kernel["shared"] <= SHARED_MEMORY
    assert all(loop["local_memory"] <= 8 for loop in kernel["loops"])


@compiles
@pytest.mark.parametrize("name", [x for x in SCHEDULES if x != "overlap"])
def test_left_operands_in_registers(name):
    """Those of dV, dK and dP and, if both are held, of S. dQ is one product: dS is read once, as
    the left operand, or as the right one of K^T dS^T.
    """
    turned = "turned" in name
    for loop in compiled()[name]["backward_kernel"]["loops"]:
        if loop["exponentials"]:
            assert ("HGMMA smem" in loop["events"]) == turned
            assert loop["products"] == 4 * 64 // 16
        else:
            product = "HGMMA regs" if turned else "HGMMA smem"
            events = ["mbarrier wait", product, "wait 0", "mbarrier arrive"]
            assert without_moves(loop) == events
            assert loop["products"] == 128 // 16


@compiles
@pytest.mark.parametrize("name", SCHEDULES)
def test_kernels_that_overlap(name):
    """The producer and the warpgroup of dQ wait for the kernel before, as does the last kernel. The
    first one waits for all that came before it, as any other does.
    """
    first, main, last = compiled()[name].values()
    overlap = "overlap" in name
    assert [x["launched_early"] for x in (first, main, last)] == [False, overlap, overlap]
    assert [bool(x["lets_next_begin"]) for x in (first, main, last)] == [overlap, overlap, False]
    assert not first["waits_for_kernel"] and last["waits_for_kernel"] == overlap
    assert (main["waits_for_kernel"] >= 2) == overlap


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("D", [48, 64])
    @pytest.mark.parametrize("name", SCHEDULES)
    def test_they_are_right(self, name, D):
        causal, changes = SCHEDULES[name]
        for M, N in ((700, 900), (900, 700), (64, 128)):
            inputs = qkv(M, N, 12, D, kv_heads=4, batch=3)
            config = replace(default_config(make_request(*inputs)), **changes)
            check(*inputs, config, causal=causal)
            check(*inputs, config, causal=causal, window=(200, 0 if causal else 100))

    def test_kernels_overlap_at_head_dim_128(self):
        inputs = qkv(700, 900, 12, 128, kv_heads=4, batch=3)
        config = replace(default_config(make_request(*inputs)), **OVERLAP)
        check(*inputs, config, causal=True)


if __name__ == "__main__":
    print(json.dumps({name: compile_schedule(*given) for name, given in SCHEDULES.items()}))
