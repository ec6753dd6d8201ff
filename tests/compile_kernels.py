"""Compile the kernels for a GPU that is not here, through their real host code; print JSON.

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
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import JITFunction

from flash_versions import VERSIONS, interpreter, kv_cache, version
from flash_versions.launch import Launcher
from flash_versions.request import Request, make_request

KIB = 1024
SHARED_MEMORY = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}


@dataclass(frozen=True)
class Shape:
    """What a call looks like."""

    queries: int = 512
    keys: int = 512
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True
    options: dict = field(default_factory=dict)

    def request(self) -> Request:
        """A request of uninitialised tensors of this shape."""
        q = torch.empty(1, self.queries, self.heads, self.head_dim, dtype=self.dtype)
        k = torch.empty(1, self.keys, self.kv_heads, self.head_dim, dtype=self.dtype)
        if "cu_seqlens_q" in self.options:
            q, k = q[0], k[0]
        return make_request(q, k, k, **self.options)


CAUSAL = {"causal": True, "num_splits": 1}
INT32 = torch.zeros(2, dtype=torch.int32)
SHAPES = {
    "prefill-64": Shape(options=CAUSAL),
    "prefill-128": Shape(head_dim=128, options=CAUSAL),
    "prefill-256": Shape(head_dim=256, options=CAUSAL),
    "prefill-80": Shape(head_dim=80, dtype=torch.float16, options=CAUSAL),
    "prefill-128-fp32": Shape(head_dim=128, dtype=torch.float32, options=CAUSAL),
    "decode-128": Shape(1, 4096, 32, 8, 128, backward=False, options={"num_splits": 4}),
    "packed": Shape(kv_heads=2, head_dim=128, options={"causal": True, "cu_seqlens_q": INT32}),
    "scores": Shape(
        options={
            "window": (100, 20),
            "softcap": 30.0,
            "alibi_slopes": torch.empty(4),
            "sink": torch.empty(4),
            "dropout_p": 0.1,
        }
    ),
    "pages": Shape(
        backward=False,
        options={"num_splits": 1, "kv_lengths": INT32[:1], "block_table": INT32[None]},
    ),
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


def intercept(package: str, compiled: dict) -> None:
    """Put a CompileOnly in the place of every kernel of a package's modules."""
    for path in sorted((Path(version.__file__).parent / package).glob("*.py")):
        name = ".".join(["flash_versions", *Path(package).parts, path.stem])
        for launcher in vars(importlib.import_module(name)).values():
            if isinstance(launcher, Launcher):
                kernel = launcher.kernel
                kernel = kernel.kernel if isinstance(kernel, CompileOnly) else kernel
                launcher.kernel = CompileOnly(kernel, compiled)
                launcher.compiled.clear()


def compile_version(name: str, shape: str, capability: int) -> list[dict]:
    """Compile what one call of a version would launch, forward and backward; a row for each
    kernel.
    """
    request, chosen = SHAPES[shape].request(), VERSIONS[name]
    if chosen.unsupported(request):
        return []
    compiled: dict = {}
    intercept(name, compiled)
    intercept("", compiled)  # what they share
    results = chosen.forward(request)
    if SHAPES[shape].backward:
        chosen.backward(request, *results, torch.empty_like(results[0]), results[1])
    return [row(name, shape, capability, kernel, found) for kernel, found in compiled.items()]


def compile_append(capability: int) -> list[dict]:
    """Compile the kernel that appends to a KV cache, with everything that it can do."""
    compiled: dict = {}
    intercept("", compiled)
    cache = torch.empty(4, 16, 2, 128, dtype=torch.bfloat16)
    new = torch.empty(1, 3, 2, 128, dtype=torch.bfloat16)
    tables = torch.empty(2, 64, 64)
    kv_cache.append_op._init_fn(cache, cache, new, new, INT32[:1], INT32[None], *tables, True)
    return [row("", "append", capability, kernel, found) for kernel, found in compiled.items()]


def row(name: str, shape: str, capability: int, kernel: str, found) -> dict:
    """What the compiler made of a kernel."""
    ptx = found.asm["ptx"]
    registers, stack = resources(found.asm["cubin"])
    return {
        "version": name,
        "shape": shape,
        "kernel": kernel,
        "capability": capability,
        "shared": found.metadata.shared,
        "registers": registers,
        "stack": stack,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma.sync": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "cp.async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "ex2": ptx.count("ex2.approx"),
    }


def main() -> None:
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(FakeDriver(capability))
    interpreter.enabled = lambda: True  # so that tensors on the CPU are let through
    version.compute_capability = lambda device: divmod(capability, 10)
    version.shared_memory_limit = lambda device: SHARED_MEMORY[capability]
    rows = [
        row
        for name in VERSIONS
        for shape in SHAPES
        if capability in (80, 90) or shape.startswith("prefill")
        for row in compile_version(name, shape, capability)
    ] + compile_append(capability)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
