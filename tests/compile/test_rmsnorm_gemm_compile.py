"""What the compiler makes of the norm's products: the portable kernel, and the one for Hopper.

`rows` has a row for each kernel. See apart.py.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton

from flash_versions.dispatch.device import Properties, devices
from flash_versions.inspect.command import compiling
from tests.compile import apart
from tests.compile.test_compile import SHARED_MEMORY, TENSOR_CORE
from transformer.model.kernels.gemm.rmsnorm import portable_norm_gemm
from transformer.model.kernels.gemm.rmsnorm_hopper import NormGemmConfig, norm_gemm

USUAL = NormGemmConfig()
HOPPER = {
    "as it is": (USUAL, ""),
    "A from registers, long chains": (replace(USUAL, through_registers=True, chain=4), ""),
    "A from registers": (replace(USUAL, through_registers=True), "bias"),
    "swiglu": (USUAL, "swiglu"),
}
PORTABLE = {
    ("sm_80", "portable"): (torch.bfloat16, ""),
    ("sm_89", "portable, swiglu"): (torch.float16, "swiglu"),
    ("sm_89", "portable, fp32"): (torch.float32, "bias"),
    ("sm_90", "portable"): (torch.bfloat16, ""),
}


def operands(dtype: torch.dtype, what: str) -> tuple[tuple, dict]:
    """Uninitialised arguments of a kernel."""
    a, b, c = (torch.empty(1024, 1024, dtype=dtype) for _ in range(3))
    up = torch.empty_like(b) if what == "swiglu" else None
    return (a, b, c, 1e-6), {"up": up, "bias": c[0] if what == "bias" else None}


def describe(call: str, kernel) -> dict:
    """What the tests look at."""
    return {
        "call": call,
        "arch": kernel.arch,
        "shared": kernel.shared,
        "spills": kernel.assembly.spill_stores + kernel.assembly.spill_loads,
        "serialised": kernel.serialised,
        "events": [str(event) for loop in kernel.hot_loops for event in loop.events],
        "loads": [loop.opcodes["LDSM"] for loop in kernel.hot_loops],
        "products": [loop.opcodes["HGMMA"] for loop in kernel.hot_loops],
        "shuffles": [loop.opcodes["SHFL"] for loop in kernel.hot_loops],
        "stmatrix": kernel.ptx.count("stmatrix"),
        "unused_barriers": kernel.unused_barriers,
        **kernel.counts,
    }


def rows() -> list[dict]:
    """The rows of all calls."""
    rows = []
    for (arch, call), (dtype, what) in PORTABLE.items():
        arguments, fused = operands(dtype, what)
        with compiling(arch) as found:
            portable_norm_gemm(*arguments, **fused)
        rows += [describe(call, kernel) for kernel in found]
    for call, (config, what) in HOPPER.items():
        arguments, fused = operands(torch.bfloat16, what)
        counted = mock.patch.object(devices, "assumed", Properties(num_sms=132))
        with compiling("sm_90") as found, counted:
            norm_gemm(*arguments, **fused, config=config)
        rows += [describe(call, kernel) for kernel in found]
    return rows


def compiled(arch: str, call: str) -> dict:
    """The row of a call."""
    found = apart.compiled("test_rmsnorm_gemm_compile")
    return next(row for row in found if (row["arch"], row["call"]) == (arch, call))


# One worker, so that all is compiled once.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compile rmsnorm_gemm"),
    pytest.mark.other_tritons,
]
by_hopper_call = pytest.mark.parametrize("call", HOPPER)


@pytest.mark.parametrize(("arch", "call"), PORTABLE)
def test_the_portable_kernel_fits_and_uses_the_tensor_cores(arch, call):
    row = compiled(arch, call)
    assert row["shared"] <= SHARED_MEMORY[arch]
    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    assert row["spills"] <= (64 if newer and arch == "sm_80" else 0)
    if "fp32" not in call:
        assert row[TENSOR_CORE[arch]] > 0 and row["cp_async"] > 0


@by_hopper_call
def test_hopper_products_are_in_flight_and_nothing_spills(call):
    row = compiled("sm_90", call)
    assert row["serialised"] == [] and row["spills"] == 0 and not row["unused_barriers"]
    assert row["shared"] <= SHARED_MEMORY["sm_90"]
    assert row["tma_loads"] and row["tma_stores"] and row["stmatrix"]


@by_hopper_call
def test_a_is_loaded_once_and_squared_without_shuffles(call):
    """In both consumers' loops: ldmatrix as often as there are products; where these read A."""
    row = compiled("sm_90", call)
    chain = HOPPER[call][0].chain
    assert row["products"] == [4 * chain] * 2
    assert row["loads"] == [4 * chain] * 2 and row["shuffles"] == [0, 0]
    sources = {event.split(" ")[1] for event in row["events"] if event.startswith("HGMMA")}
    assert sources == {"regs" if HOPPER[call][0].through_registers else "smem"}


@by_hopper_call
def test_a_chain_ends_with_one_wait_for_all_of_it(call):
    """Within a chain the next product is issued before the last one is done."""
    row = compiled("sm_90", call)
    assert row["events"].count("wait 0") == 2
    chain = HOPPER[call][0].chain
    half = row["events"][: len(row["events"]) // 2]
    issued = [i for i, event in enumerate(half) if event.startswith("HGMMA")]
    assert len(issued) == chain and half.index("wait 0") > issued[-1]
