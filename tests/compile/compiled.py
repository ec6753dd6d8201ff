"""Kernels that several tests look at, compiled once in a process."""

import contextlib
import importlib
import io
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
