"""Compile a version's kernels for a GPU that is not here, through its real host code; print JSON.

    TRITON_INTERPRET=0 python tests/compile_kernels.py 90

Triton's compiler needs no GPU, but its launcher asks a driver what to compile for. This program
answers for it: it stands in for the driver, and for each kernel, which it compiles instead of
launching. A process of its own, because compiling and interpreting cannot share one.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import JITFunction

from flash_versions import VERSIONS, version

KIB = 1024
SHARED_MEMORY = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}

# What a call looks like: queries, keys, heads, kv_heads, head_dim, dtype, causal, splits.
SHAPES = {
    "prefill-64": (512, 512, 4, 4, 64, torch.bfloat16, True, 1),
    "prefill-128": (512, 512, 4, 4, 128, torch.bfloat16, True, 1),
    "prefill-256": (512, 512, 4, 4, 256, torch.bfloat16, True, 1),
    "prefill-80": (512, 512, 4, 4, 80, torch.float16, True, 1),
    "prefill-128-fp32": (512, 512, 4, 4, 128, torch.float32, True, 1),
    "decode-128": (1, 4096, 32, 8, 128, torch.bfloat16, False, 4),
}


class FakeDriver(DriverBase):
    """A CUDA driver of a given compute capability that can compile for it and never launch."""

    def __init__(self, capability: int):
        self.capability = capability
        self.get_current_stream = lambda device=None: 0
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError


class CompileOnly:
    """Stands in for a kernel: kernel[grid](...) compiles, keeps the result, launches nothing."""

    def __init__(self, kernel: JITFunction, compiled: dict):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def compile_for(*args, **options):
            name = self.kernel.__name__
            self.compiled[name] = self.kernel.warmup(*args, grid=grid, **options)

        return compile_for


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack (spills), as the cubin says."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found, out
    return int(found[1]), int(found[2])


def compile_version(name: str, shape: str, capability: int) -> list[dict]:
    """Compile what one call of a version would launch; a row for each kernel."""
    queries, keys, heads, kv_heads, head_dim, dtype, causal, splits = SHAPES[shape]
    compiled: dict = {}
    for path in sorted((Path(version.__file__).parent / name).glob("*.py")):
        module = importlib.import_module(f"flash_versions.{name}.{path.stem}")
        for attribute, value in list(vars(module).items()):
            if isinstance(value, JITFunction) and attribute.endswith("_kernel"):
                setattr(module, attribute, CompileOnly(value, compiled))
            elif isinstance(value, CompileOnly):
                value.compiled = compiled
    q = torch.empty(1, queries, heads, head_dim, dtype=dtype)
    k = torch.empty(1, keys, kv_heads, head_dim, dtype=dtype)
    options = {"causal": causal, "scale": 0.1, "num_splits": splits}
    VERSIONS[name].forward(q, k, k, **options)
    rows = []
    for kernel, result in compiled.items():
        ptx = result.asm["ptx"]
        registers, stack = resources(result.asm["cubin"])
        rows.append(
            {
                "version": name,
                "shape": shape,
                "kernel": kernel,
                "capability": capability,
                "shared": result.metadata.shared,
                "registers": registers,
                "stack": stack,
                "wgmma": ptx.count("wgmma.mma_async"),
                "mma.sync": ptx.count("mma.sync"),
                "tcgen05": ptx.count("tcgen05.mma"),
                "cp.async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
                "ex2": ptx.count("ex2.approx"),
            }
        )
    return rows


def main() -> None:
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(FakeDriver(capability))
    version.shared_memory_limit = lambda device: SHARED_MEMORY[capability]
    rows = [
        row
        for name in VERSIONS
        for shape in SHAPES
        for row in compile_version(name, shape, capability)
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
