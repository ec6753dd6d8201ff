"""What the compiler makes of FA4's kernel for Blackwell. See compiled.py."""

from dataclasses import replace

import pytest
import torch
import triton

from flash_versions.dispatch.request import make_request
from flash_versions.inspect import sass
from flash_versions.inspect.compiled import ARCHES, Compiled, compiling
from flash_versions.versions.fa4 import EXPLICIT, VERSION
from flash_versions.versions.fa4.blackwell import forward
from flash_versions.versions.fa4.blackwell.host import default_config
from tests.compile.compiled import compiled, unused_barriers

# Each has a head_dim, options and eighths of the exponentials.
CALLS: list[tuple[int, dict, int]] = [(64, {"window": (500, 20)}, 2), (128, {"causal": True}, 2)]
COLUMNS = 512
SPILLED = 64  # bytes, outside of the softmax
LATE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
# One worker, so that each is compiled once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("blackwell_compile")]


def kernels() -> list[tuple[tuple, dict]]:
    """What became of CALLS."""
    return list(zip(CALLS, compiled("test_blackwell_compile")["explicit"], strict=True))


def test_it_compiles_and_fits():
    """K = 16 at a time: Q K^T and P V for two tiles, the first Q K^T apart from the loop. The roles
    have their registers.
    """
    for (head_dim, *_), row in kernels():
        counts = row["counts"]
        assert row["shared"] <= ARCHES["sm_100"].shared_memory and row["columns"] <= COLUMNS
        assert counts["tcgen05"] == 2 * (2 * head_dim // 16 + 128 // 16)
        assert counts["tma_loads"] and counts["tma_stores"] == 2 * head_dim // 64
        assert not counts["cp_async"] and not row["unused_barriers"]
        assert [(role["function"], role["warps"], role["registers"]) for role in row["roles"]] == [
            ("correct", 4, 96),
            ("softmax", 4, 192),
            ("softmax", 4, 192),
            ("multiply", 1, 32),
            ("load", 1, 32),
            ("store", 1, 32),
        ]


def test_little_is_spilled_and_not_in_the_softmax():
    """Up to Triton 3.7 the loop writes no register to local memory, and reads at most one number
    from there (causal, head_dim 128); 3.9 writes up to two and reads up to three.
    """
    for _, row in kernels():
        assert row["spill_stores"] <= SPILLED
        assert len(row["softmax"]) == 2, "one for each tile"
        for loop in row["softmax"]:
            assert loop.get("LDL", 0) <= (3 if LATE else 1)
            assert loop.get("STL", 0) <= (2 if LATE else 0)


def test_who_serves_a_call_on_blackwell():
    """By its name the explicit kernel; otherwise the portable one, as nothing is verified here."""
    assert compiled("test_blackwell_compile")["served"] == {
        "fa4": "flash_versions.versions.fa4.forward",
        "fa4-blackwell": "flash_versions.versions.fa4.blackwell.forward",
        "fa4, verified": "flash_versions.versions.fa4.blackwell.forward",
    }


def softmax_loops(kernel: Compiled) -> list[dict[str, int]]:
    """The opcodes of the innermost loops with many exponentials."""
    loops = sass.innermost_loops(kernel.sass, lambda loop: loop.opcodes["MUFU"] > 32)
    return [dict(loop.opcodes) for loop in loops]


def rows() -> dict:
    """What became of CALLS, and which module serves a call by its version's name."""
    explicit, served = [], {}
    for head_dim, options, eighths in CALLS:
        q = torch.empty(1, 4096, 16, head_dim, dtype=torch.bfloat16)
        request = make_request(q, q, q, num_splits=1, **options)
        with compiling("sm_100") as found:
            forward.forward(request, replace(default_config(request), eighths=eighths))
        (kernel,) = found
        more = {
            "columns": kernel.code.metadata.tmem_size,
            "unused_barriers": unused_barriers(kernel.ttgir),
            "softmax": softmax_loops(kernel),
        }
        explicit.append(kernel.summary() | more)
    with compiling("sm_100") as found:
        for name, version in {"fa4": VERSION, "fa4-blackwell": EXPLICIT}.items():
            version.forward(request)
            served[name] = found.pop().module
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flash_versions.versions.fa4.is_verified", lambda kernel, device: True)
            VERSION.forward(request)
        served["fa4, verified"] = found.pop().module
    return {"explicit": explicit, "served": served}
