"""Kernels that several tests look at, compiled once in a process."""

import contextlib
import importlib
import io
import re
from functools import cache
from unittest import mock

import triton
from triton.backends.nvidia.compiler import CUDABackend


@cache
def compiled(module: str, *arguments: str):
    """What `rows` of a module below this folder returns."""
    rows = importlib.import_module(f"tests.compile.{module}").rows
    with assembled_once():
        return rows(*arguments)


def unused_barriers(ttgir: str) -> list[str]:
    """Barriers that are initialised though nobody waits for them.

    Their memory is then also a tile's, which PTX forbids: on a GPU that changes from one process to
    another, what was initialised comes back, in the middle of the tile.
    """
    slots: dict[str, str] = {}
    initialised, used = set[str](), set[str]()
    before_partitions = re.split(r"\n\s*partition0\(", ttgir)[0]
    for line in before_partitions.splitlines():
        if slot := re.search(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", line):
            slots[slot[1]] = slot[2]
        elif barrier := re.search(r"ttng\.init_barrier (%\w+),", line):
            initialised.add(slots.get(barrier[1], barrier[1]))
        else:
            values = re.findall(r"%\w+", re.sub(r"^\s*%\S+ = ", "", line))
            used.update(slots.get(value, value) for value in values)
    return sorted(initialised - used)


@contextlib.contextmanager
def assembled_once():
    """Hear what ptxas says as Triton compiles: `Compiled.assembly` would have it assemble again."""
    assemble, heard = CUDABackend.make_cubin, {}

    def make_cubin(self, ptx, metadata, options, capability):
        if (ptx, capability) not in heard:
            log = io.StringIO()
            with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
                triton.knobs.nvidia.dump_ptxas_log = True
                cubin = assemble(self, ptx, metadata, options, capability)
            heard[ptx, capability] = cubin, log.getvalue()
        cubin, log = heard[ptx, capability]
        if triton.knobs.nvidia.dump_ptxas_log:
            print(log)
        return cubin

    with mock.patch.object(CUDABackend, "make_cubin", make_cubin):
        yield
