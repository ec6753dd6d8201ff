"""What the compiler makes of FA4's kernel for Blackwell. See apart.py."""

from dataclasses import replace

import pytest
import torch
import triton

from flash_versions.dispatch.request import make_request
from flash_versions.inspect import sass
from flash_versions.inspect.compiled import Compiled, compiling
from flash_versions.versions.fa4 import EXPLICIT, VERSION
from flash_versions.versions.fa4.blackwell import forward as forward_blackwell
from flash_versions.versions.fa4.blackwell.config import default_config
from tests.compile import apart
from tests.compile.test_compile import SHARED_MEMORY

MASKS: dict[str, dict] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (500, 20)},
}
# Each has a head_dim, a mask, a dtype and eighths of the exponentials.
CALLS = [
    *[(dim, mask, "bfloat16", 2) for dim in (64, 128) for mask in MASKS],
    *[(128, "full", "bfloat16", eighths) for eighths in (0, 1, 4)],
    (128, "full", "float16", 2),
]
COLUMNS = 512
SPILLED = 64  # bytes, outside of the softmax
LATE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
# One worker, so that each is compiled once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("blackwell_compile")]


def compiled() -> dict[tuple, dict]:
    """What became of CALLS."""
    return dict(zip(CALLS, apart.compiled("test_blackwell_compile")["explicit"], strict=True))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_it_compiles_and_fits(call):
    row = compiled()[call]
    assert row["shared"] <= SHARED_MEMORY["sm_100"]
    assert row["columns"] <= COLUMNS
    # K = 16 at a time: Q K^T and P V for two tiles, the first Q K^T apart from the loop.
    assert row["tcgen05"] == 2 * (2 * call[0] // 16 + 128 // 16)
    assert row["tma_loads"] and row["tma_stores"] == 2 * call[0] // 64
    assert not row["cp_async"] and not row["unused_barriers"]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_little_is_spilled_and_not_in_the_softmax(call):
    """Up to Triton 3.7 the loop writes no register to local memory, and reads at most one number
    from there (causal, head_dim 128); 3.9 writes up to two and reads up to three. With half of the
    exponentials by polynomial it is more: up to three written, four read.
    """
    row = compiled()[call]
    half = call[3] == 4
    assert row["spill_stores"] <= (72 if half else SPILLED)
    assert len(row["softmax"]) == 2, "one for each tile"
    reads, writes = (4, 3) if half else (3, 2) if LATE else (1, 0)
    for loop in row["softmax"]:
        assert loop.get("LDL", 0) <= reads
        assert loop.get("STL", 0) <= writes


def test_registers_of_the_roles():
    for row in compiled().values():
        assert row["roles"] == [
            ["correct", 4, 96],
            ["softmax", 4, 192],
            ["softmax", 4, 192],
            ["multiply", 1, 32],
            ["load", 1, 32],
            ["store", 1, 32],
        ]
        assert {96, 192, 32} <= set(row["setmaxnreg"])


@pytest.mark.parametrize("eighths", [0, 1, 2, 4])
def test_exponentials_become_multiply_adds(eighths):
    """A thread has a row of 128 scores, and an exponential for alpha. Each exponential that a
    polynomial of degree 3 replaces is three multiply-adds more.
    """
    rows = compiled()
    none, some = rows[128, "full", "bfloat16", 0], rows[128, "full", "bfloat16", eighths]
    for loop, without in zip(some["softmax"], none["softmax"], strict=True):
        assert loop["MUFU"] == 128 * (8 - eighths) // 8 + 1
        assert multiply_adds(loop) - multiply_adds(without) == 3 * 128 * eighths // 8
        for name in ("SHFL", "PRMT", "STS", "LDS"):
            assert loop.get(name, 0) == without.get(name, 0), name


def multiply_adds(loop: dict[str, int]) -> int:
    """Multiply-adds of a thread; FFMA2 is two."""
    return loop.get("FFMA", 0) + 2 * loop.get("FFMA2", 0)


def test_who_serves_a_call_on_blackwell():
    """By its name the explicit kernel; otherwise the portable one, as nothing is verified here."""
    served = apart.compiled("test_blackwell_compile")["served"]
    assert served == {
        "fa4": "flash_versions.versions.fa4.forward",
        "fa4-blackwell": "flash_versions.versions.fa4.blackwell.forward",
        "fa4, verified": "flash_versions.versions.fa4.blackwell.forward",
    }


def softmax_loops(kernel: Compiled) -> list[dict[str, int]]:
    """The opcodes of the innermost loops with many exponentials."""
    instructions, labels = sass.parse(kernel.sass)
    bodies = sass.loops(sass.control_flow(instructions, labels))
    opcodes = {
        head: sass.HotLoop(tuple(instructions[i] for i in sorted(body))).opcodes
        for head, body in bodies.items()
    }
    many = {head for head, found in opcodes.items() if found["MUFU"] > 32}
    inner = [head for head in sorted(many) if not (many - {head}) & bodies[head]]
    return [dict(opcodes[head]) for head in inner]


def row_of(kernel: Compiled) -> dict:
    """What the tests look at."""
    return kernel.counts | {
        "shared": kernel.shared,
        "columns": kernel.code.metadata.tmem_size,
        "spill_stores": kernel.assembly.spill_stores,
        "unused_barriers": kernel.unused_barriers,
        "roles": kernel.roles,
        "setmaxnreg": [int(line.split()[-1][:-1]) for line in kernel.ptx.splitlines()
                       if "setmaxnreg" in line],
        "softmax": softmax_loops(kernel),
    }  # fmt: skip


def rows() -> dict:
    """What became of CALLS, and which module serves a call by its version's name."""
    explicit, served = [], {}
    for head_dim, mask, dtype, eighths in CALLS:
        q = torch.empty(1, 4096, 16, head_dim, dtype=getattr(torch, dtype))
        request = make_request(q, q, q, num_splits=1, **MASKS[mask])
        with compiling("sm_100") as found:
            config = replace(default_config(request), eighths=eighths)
            forward_blackwell.forward(request, config)
        explicit.append(row_of(found[0]))
    with compiling("sm_100") as found:
        for name, version in {"fa4": VERSION, "fa4-blackwell": EXPLICIT}.items():
            version.forward(request)
            served[name] = found.pop().module
        verified = pytest.MonkeyPatch()
        verified.setattr("flash_versions.versions.fa4.is_verified", lambda kernel, device: True)
        VERSION.forward(request)
        verified.undo()
        served["fa4, verified"] = found.pop().module
    return {"explicit": explicit, "served": served}
