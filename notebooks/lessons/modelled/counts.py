"""What a block of keys costs a warp of the softmax, counted in the machine code for sm_100.

`python -m lessons.modelled.counts EIGHTHS ...` compiles, and prints JSON; `of_softmax` calls it,
because compiling and interpreting never share a process.
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from flash_versions.bench.files import write
from flash_versions.dispatch.request import make_request
from flash_versions.inspect import sass
from flash_versions.inspect.compiled import compiling
from flash_versions.versions.fa4.blackwell import config, forward
from lessons.kernels import compiled

EXPONENTIAL = ("MUFU",)
ONE_RESULT = ("FADD", "FMUL", "FFMA")  # of a thread
TWO_RESULTS = ("FADD2", "FMUL2", "FFMA2")
MAXIMA = ("FMNMX", "FMNMX3")


class Counts(NamedTuple):
    """Instructions of a warp for one block of keys, by the unit that executes them.

    Attributes:
        exponentials: of the special function unit.
        arithmetic: results of fp32 additions, multiplications and multiply-adds.
        maxima: of two or three numbers.
        issued: instructions in all.
    """

    exponentials: int
    arithmetic: int
    maxima: int
    issued: int


@cache
def of_softmax(eighths: tuple[int, ...] = (0, 1, 2, 4)) -> dict[int, Counts]:
    """The counts at head_dim 128 without a mask, by eighths of polynomial exponentials."""
    names = ["counts", Path(__file__).read_text(), *map(str, eighths)]
    kept = compiled.cache_folder() / f"{compiled.name_of(names)}.json"
    if not kept.exists():
        done = subprocess.run(
            [sys.executable, "-P", "-m", "lessons.modelled.counts", *map(str, eighths)],
            capture_output=True,
            text=True,
            env=environment(),
        )
        if done.returncode:
            raise RuntimeError(f"counting instructions failed: {done.stderr.strip()[-500:]}")
        write(kept, done.stdout)
    return {int(key): Counts(*value) for key, value in json.loads(kept.read_text()).items()}


def environment() -> dict[str, str]:
    """That of a process which compiles and finds this package."""
    found = compiled.compiling()
    return found | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{found['PYTHONPATH']}"}


def count(eighths: int) -> Counts:
    """Compile the kernel, and count the smallest loop that has the exponentials of a block."""
    x = torch.empty(1, 4096, 16, 128, dtype=torch.bfloat16)
    request = make_request(x, x, x)
    with compiling("sm_100") as kernels:
        forward.forward(request, replace(config.default_config(request), eighths=eighths))
    instructions, labels = sass.parse(kernels[0].sass)
    loops = sass.loops(sass.control_flow(instructions, labels)).values()
    found = (Counter(instructions[i].name for i in loop) for loop in loops)
    softmax = [loop for loop in found if total(loop, EXPONENTIAL) >= 128 * (8 - eighths) // 8]
    loop = min(softmax, key=lambda loop: loop.total())
    return Counts(
        total(loop, EXPONENTIAL),
        total(loop, ONE_RESULT) + 2 * total(loop, TWO_RESULTS),
        total(loop, MAXIMA),
        loop.total(),
    )


def total(loop: Counter[str], names: tuple[str, ...]) -> int:
    """How many of a loop's instructions have one of these names."""
    return sum(loop[name] for name in names)


if __name__ == "__main__":
    assert triton.knobs.runtime.interpret is False
    # The polynomial has maxima, too: of its argument and the smallest exponent.
    found, maxima = {key: count(int(key)) for key in sys.argv[1:]}, count(0).maxima
    json.dump({key: row._replace(maxima=maxima) for key, row in found.items()}, sys.stdout)
