"""Which names Triton carries through a loop: why the emulator refuses some (`emulator/carried.py`).

`rows` has the number of them. See apart.py.
"""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.compile import apart


@triton.jit
def same_value(out, steps):
    stage = steps * 2
    before = stage
    for i in range(steps):
        tl.store(out + i, before)
        before = stage
        stage += 1


@triton.jit
def own_value(out, steps):
    stage = steps * 2
    before = stage + 0
    for i in range(steps):
        tl.store(out + i, before)
        before = stage
        stage += 1


def test_a_name_that_begins_with_another_ones_value_is_not_carried():
    """If this fails with a later Triton, the check is no longer needed."""
    assert apart.compiled("test_carried") == {"same value": 1, "own value": 2}


def carried(kernel) -> int:
    """How many names a kernel's loop carries from step to step."""
    source = ASTSource(kernel, signature={"out": "*i32", "steps": "i32"})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["source"]
    return re.search(r"scf.for .*iter_args\(([^)]*)\)", code)[1].count("=")


def rows() -> dict[str, int]:
    """The names of each kernel."""
    return {"same value": carried(same_value), "own value": carried(own_value)}
