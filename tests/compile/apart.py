"""Kernels compiled in a process of its own, because compiling and interpreting cannot share one.

    TRITON_INTERPRET=0 python -m tests.compile.apart kernels.attention sm_90 fa3

prints what rows("sm_90", "fa3") of tests/compile/kernels/attention.py returns.
"""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from functools import cache

from tests.helpers import ROOT


@cache
def compiled(module: str, *arguments: str):
    """What `rows` of a module below this folder returns in that process."""
    command = [sys.executable, "-m", "tests.compile.apart", module, *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def assemble_once() -> None:
    """Hear what ptxas says as Triton compiles: `Compiled.assembly` would have it assemble again."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

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

    CUDABackend.make_cubin = make_cubin


if __name__ == "__main__":
    module, *arguments = sys.argv[1:]
    rows = importlib.import_module(f"tests.compile.{module}").rows
    assemble_once()
    print(json.dumps(rows(*arguments)))
