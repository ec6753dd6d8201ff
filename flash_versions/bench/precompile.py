"""Compile in several processes at once what a benchmark would compile one after another.

Each process calls its share of the competitors once, on the shapes that will be measured, and
leaves the kernels in the compilers' caches on disk: Triton's, and that of flash-attn-4.
"""

import subprocess
import sys
import time
from contextlib import suppress

import torch

from flash_versions import VERSIONS
from flash_versions.bench.measure import host_times
from flash_versions.bench.suites import SUITES, Competitor, Shape, competitors

SECONDS = 240.0  # after which a process is ended; what it has not compiled is compiled later

Call = tuple[str, Shape, Competitor]


def precompile(processes: int, suites: list[str]) -> str:
    """Fill the caches in so many processes; returns a sentence on how that went."""
    began = time.monotonic()
    command = [sys.executable, "-m", "flash_versions.bench.precompile"]
    children = [
        subprocess.Popen([*command, str(share), str(processes), *suites])
        for share in range(processes)
    ]
    late = 0
    try:
        for child in children:
            try:
                child.wait(max(SECONDS - (time.monotonic() - began), 0))
            except subprocess.TimeoutExpired:
                late += 1
    finally:
        for child in children:
            child.kill()
            child.wait()
    failed = max(sum(child.returncode != 0 for child in children) - late, 0)
    return (
        f"compiled in advance in {time.monotonic() - began:.0f} s; of {processes} processes "
        f"{failed} failed and {late} were ended after {SECONDS:.0f} s"
    )


def parts(suites: list[str]) -> list[list[Call]]:
    """The calls that compile something, in parts that share kernels and so belong together."""
    found: dict[tuple, list[Call]] = {}
    for suite in suites:
        for shape in SUITES[suite]:
            for one in competitors(suite, shape):
                way = one.row(suite, shape)["pass"]
                if one.compiles:
                    key = (one.name, way, shape.D, shape.causal, shape.M == 1)
                    found.setdefault(key, []).append((suite, shape, one))
    return list(found.values())


def compile_share(share: int, shares: int, suites: list[str]) -> None:
    """Call what belongs to one of so many processes."""
    for part in parts(suites)[share::shares]:
        for suite, shape, one in part:
            inputs = shape.inputs()
            with suppress(Exception):  # the measurement will meet it again, and say why
                (one.backward if suite.endswith("backward") else one.forward)(*inputs)()
                torch.cuda.synchronize()
    if "launch" in suites and (versions := list(VERSIONS)[share::shares]):
        host_times(1, versions)


if __name__ == "__main__":
    compile_share(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
