"""What the compiler makes of FA4's kernels: the portable one, and the explicit one for Hopper.

`rows` has a row for each kernel. See apart.py.
"""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton

from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import Forward
from flash_versions.inspect.command import LABELS, Compiled, compile_call, compiling
from flash_versions.versions.fa4 import VERSION, forward
from flash_versions.versions.fa4.hopper import config, trace
from flash_versions.versions.fa4.hopper import host as forward_hopper
from tests.compile import apart
from tests.compile.test_compile import SHARED_MEMORY, TENSOR_CORE
from tests.helpers import ROOT

# (head_dim, causal, variant) by architecture.
CALLS = {
    "sm_89": [(64, True, "served")],
    "sm_90": [
        (64, True, "portable"),
        (128, True, "served"),
        (128, False, "portable, 2/8 polynomial"),
        (128, False, "portable, no polynomial"),
    ],
    "sm_100": [(128, True, "served"), (128, True, "portable, no polynomial")],
    "sm_120": [(128, True, "served")],
}
FORWARDS: dict[str, Forward] = {
    "served": VERSION.forward,
    "portable": forward.forward,
    "portable, 2/8 polynomial": partial(forward.forward, threshold=8.0, eighths=2),
    "portable, no polynomial": partial(forward.forward, threshold=8.0, eighths=0),
}
# (head_dim, dtype, threshold, eighths, traced) of the explicit kernel.
HOPPER_CALLS = [
    (32, "bf16", 8.0, 0, False),
    (64, "bf16", 8.0, 2, False),
    (128, "bf16", 0.0, 0, False),
    (128, "bf16", 8.0, 2, False),
    (256, "bf16", 8.0, 2, False),
    (64, "fp8", 1.0, 0, False),
    (128, "fp8", 0.0, 0, False),
    (128, "fp8", 1.0, 0, False),
    (256, "fp8", 1.0, 0, False),
    (128, "bf16", 8.0, 0, True),
]
SHARED_OUT = {"sm_90": "portable, 2/8 polynomial", "sm_100": "served"}
MOVES_DATA = ("SHFL", "PRMT", "STS", "LDS", "BAR", "STSM", "LDSM")
# One worker, so that each is compiled once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fa4_compile")]


def compiled(arch: str) -> dict[tuple[int, bool, str], dict]:
    """What became of the calls for one architecture."""
    rows = iter(apart.compiled("test_fa4_compile")["portable"])
    return {name: {call: next(rows) for call in calls} for name, calls in CALLS.items()}[arch]


@pytest.mark.parametrize(
    "arch", [pytest.param(x, marks=[pytest.mark.wide] * (x == "sm_89")) for x in CALLS]
)
def test_it_compiles_fits_and_spills_nothing(arch):
    for call, row in compiled(arch).items():
        assert row["shared"] <= SHARED_MEMORY[arch], call
        # Triton 3.6 spills two registers on sm_120.
        assert row["stack"] <= (8 if arch == "sm_120" else 0), (call, row["stack"])
        if arch != "sm_89":
            explicit = arch == "sm_90" and call[2] == "served"
            name = "hopper.forward" if explicit else "forward"
            assert row["module"] == f"flash_versions.versions.fa4.{name}", call
            assert row[TENSOR_CORE[arch]] and row["tma_loads"], call
            assert len(row["loops"]) == 2, call
        else:  # no TMA: FA2's serves it
            assert row["module"] == "flash_versions.versions.fa2.forward" and row["mma_sync"], call


@pytest.mark.parametrize(("arch", "causal"), [("sm_90", False), ("sm_100", True)])
def test_sharing_out_the_exponentials_moves_no_data(arch, causal):
    """Of 32 exponentials of a thread, 8 become multiply-adds; shuffles, shared memory and barriers
    stay as many.
    """
    rows = compiled(arch)
    shared = rows[128, causal, SHARED_OUT[arch]]["loops"][1]
    alone = rows[128, causal, "portable, no polynomial"]["loops"][1]
    assert alone["MUFU"] - shared["MUFU"] == 8
    for name in MOVES_DATA:
        assert shared.get(name, 0) == alone.get(name, 0), name


def test_the_polynomial_costs_eight_instructions():
    """For each of 8 elements: a maximum, three additions, three multiply-adds, and a shift with an
    addition, as one LEA or IMAD.
    """
    rows = compiled("sm_90")
    shared = rows[128, False, "portable, 2/8 polynomial"]["loops"][1]
    alone = rows[128, False, "portable, no polynomial"]["loops"][1]

    def more(*names):
        return sum(shared.get(name, 0) - alone.get(name, 0) for name in names)

    assert (more("FMNMX"), more("FADD"), more("FFMA")) == (8, 24, 24)
    assert 0 <= more("LEA", "IMAD", "SHF", "IADD3", "VIADD", "SHL") <= 12


def test_the_rescale_is_behind_a_branch():
    """In the loop over whole blocks, and not in that over blocks that are cut."""
    cut, whole = compiled("sm_90")[128, False, "portable, 2/8 polynomial"]["loops"]
    assert whole["BRA"] == cut["BRA"] + 1


def test_the_instructions_in_the_docs():
    """Which there are, with every Triton; how many, with the one that the page names."""
    page = (ROOT / "docs/understand/inspecting.md").read_text()
    tested = re.search(r"instructions of FA4, compiled by Triton ([\d.]+)", page)[1]
    table = dict(re.findall(r"^\| ([\w. ]+) \| (\d.*) \|$", page, re.MULTILINE))
    labels = {label: name for name, label in LABELS.items() if name != "barriers"}
    assert set(labels) - {"cp.async"} <= set(table)
    for label, counts in table.items():
        documented = [int(number.replace(",", "")) for number in counts.split(" | ")]
        rows = [compiled(arch)[128, True, "served"] for arch in ("sm_90", "sm_100", "sm_120")]
        found = [row["stack"] if label == "spills" else row[labels[label]] for row in rows]
        if triton.__version__ == tested:
            assert documented == found, label
        elif label != "spills":
            assert [bool(n) for n in documented] == [bool(n) for n in found], label


def hopper_kernels() -> dict[tuple, dict]:
    """What became of HOPPER_CALLS."""
    return dict(zip(HOPPER_CALLS, apart.compiled("test_fa4_compile")["hopper"], strict=True))


def test_the_explicit_kernel_is_asynchronous_and_spills_nothing():
    """Later Tritons than those that were measured spill a few registers outside of the loops."""
    late = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    for call, row in hopper_kernels().items():
        assert row["module"] == "flash_versions.versions.fa4.hopper.forward"
        assert not row["serialised"] and not row["unused_barriers"], call
        assert row["stack"] <= (64 if late else 0), call
        assert row["tma_loads"] and row["tma_stores"] and not row["cp_async"], call
        three = call[0] <= 64 or (call[0] == 128 and call[1] == "fp8")
        # One for each consumer; in FP8 from 65 dims on, one with starts and one without.
        starts = call[1] == "fp8" and call[0] > 64
        assert len(row["loops"]) == (3 if three else 2) * (2 if starts else 1), call


def test_softmax_of_the_explicit_kernel():
    """A quarter of the exponentials is gone with two eighths; shuffles are those of the maxima of
    two rows, as sums stay with their threads, and nothing else moves. In FP8 two exponentials are
    put together in one register.
    """
    for (head_dim, dtype, _, eighths, _), row in hopper_kernels().items():
        block_kv = 64 if (head_dim, dtype) == (256, "bf16") else 128
        exponentials = block_kv * 64 // 128  # of a thread
        for loop in row["loops"]:
            assert loop["MUFU"] == exponentials * (8 - eighths) // 8 + 2, (head_dim, dtype)
            assert loop["SHFL"] == 4, (head_dim, dtype)
            assert loop.get("PRMT", 0) == (exponentials // 2 if dtype == "fp8" else 0)
            for name in ("STS", "LDS", "STSM", "LDSM", "LDL", "STL"):
                assert name not in loop, (head_dim, dtype, name)


def test_a_start_saves_an_addition_of_each_pair():
    """In half of the loops in FP8; the start of each of two rows is converted to fp32, by HADD2."""
    for (head_dim, dtype, *_), row in hopper_kernels().items():
        if dtype == "fp8" and head_dim > 64:
            of_loops = sorted(loop["HADD2"] + loop["HFMA2"] for loop in row["loops"])
            half = len(of_loops) // 2
            assert {more - fewer for fewer, more in zip(of_loops[:half], of_loops[half:])} == {30}


def test_the_correction_is_behind_a_vote():
    """With a threshold, a warp votes once for a block, and then multiplies all of its accumulator
    or jumps over it. Without one, it always multiplies.
    """
    for (head_dim, dtype, threshold, _, _), row in hopper_kernels().items():
        of_thread = 64 * head_dim // 128
        for loop, skipped in zip(row["loops"], row["skipped"], strict=True):
            assert loop.get("VOTE", 0) == (threshold > 0)
            assert skipped == (of_thread if threshold > 0 else 0)
        # Maxima times the scale, in FP8 also references by its inverse; starts take multiply-adds.
        more, n = sorted(loop["FMUL"] - of_thread for loop in row["loops"]), len(row["loops"])
        started = n // 2 if dtype == "fp8" and head_dim > 64 else 0
        assert more == [0] * started + [4 if dtype == "fp8" else 2] * (n - started)


def test_without_a_trace_no_clock_is_read():
    for (*_, traced), row in hopper_kernels().items():
        assert bool(row["clocks"]) == traced
        for loop in row["loops"]:  # score, softmax, correct
            assert (loop.get("CS2R", 0), loop.get("STG", 0)) == ((3, 3) if traced else (0, 0))


def skipped_products(loop) -> int:
    """How many products stand behind the jump that follows a vote."""
    opcodes = [(instruction.predicate, instruction.name) for instruction in loop.instructions]
    names = [name for _, name in opcodes]
    if "VOTE" not in names:
        return 0
    jump = names.index("BRA", names.index("VOTE"))
    assert opcodes[jump][0], "a jump with a condition"
    behind = names[jump + 1 :]
    return next(i for i, name in enumerate(behind) if name != "FMUL")


def compile_hopper(head_dim, dtype, threshold, eighths, traced) -> Compiled:
    """One form of the explicit kernel."""
    q = torch.empty(1, 4096, 16, head_dim, dtype=torch.bfloat16)
    fp8 = dtype == "fp8"
    request = make_request(q, q, q, num_splits=1, precision="fp8:head" if fp8 else None)
    with compiling("sm_90") as found:
        chosen = config.fp8_config(request) if fp8 else config.default_config(request)
        chosen = replace(chosen, threshold=threshold, eighths=eighths)
        if fp8 and head_dim <= 128:
            chosen = replace(chosen, consumers=3, held=0)
        stamps = trace.new_stamps(request, chosen) if traced else None
        if fp8:
            q8, scale = q.to(torch.float8_e4m3fn), torch.empty(1, 16, 1)
            v8 = q8.permute(0, 2, 3, 1).contiguous()
            quantized = Quantized(q8, q8, v8, scale, scale, scale, scale[..., 0])
            forward_hopper.forward_quantized(request, quantized, chosen, stamps)
        else:
            forward_hopper.forward(request, chosen, stamps)
    (kernel,) = found
    return kernel


def hopper_row(kernel: Compiled) -> dict:
    """What the tests look at."""
    return kernel.counts | {
        "module": kernel.module,
        "stack": kernel.stack,
        "serialised": kernel.serialised,
        "unused_barriers": kernel.unused_barriers,
        "loops": [dict(loop.opcodes) for loop in kernel.hot_loops],
        "skipped": [skipped_products(loop) for loop in kernel.hot_loops],
        "clocks": kernel.ptx.count("%clock"),
    }


def rows() -> dict[str, list[dict]]:
    """What became of the calls, in order, of the "portable" kernel and of that for "hopper"."""
    rows = []
    for arch, calls in CALLS.items():
        for head_dim, causal, variant in calls:
            q = torch.empty(1, 4096, 16, head_dim, dtype=torch.bfloat16)
            request = make_request(q, q, q, causal=causal, num_splits=1)
            chosen = replace(VERSION, forward=FORWARDS[variant])
            (kernel,) = compile_call(chosen, request, arch)
            loops = [dict(loop.opcodes) for loop in kernel.hot_loops]
            found = {"module": kernel.module, "shared": kernel.shared, "stack": kernel.stack}
            rows.append(found | kernel.counts | {"loops": loops})
    hopper = [hopper_row(compile_hopper(*call)) for call in HOPPER_CALLS]
    return {"portable": rows, "hopper": hopper}
