"""The matrix products for one architecture, a row for each kernel. See apart.py."""

import re

import torch

from flash_versions.inspect.command import compiling
from tests.transformer.kernels.test_gemm import operands
from transformer.model.kernels.gemm import hopper as gemm_hopper
from transformer.model.kernels.gemm import portable as gemm_portable
from transformer.model.kernels.gemm.config import default_config

HOPPER = {
    "plain": (default_config(512, 4096, 132), ""),
    "bias residual": (default_config(512, 4096, 132, True), "bias residual"),
    "swiglu": (default_config(8192, 8192, 132, swiglu=True), "swiglu bias"),
    "many tiles": (default_config(8192, 8192, 132), "bias"),
    "many tiles, residual": (default_config(8192, 8192, 132, True), "residual"),
}
PORTABLE = [("bias residual", torch.float16), ("swiglu", torch.bfloat16), ("bias", torch.float32)]


def row(name, module, arch, config, what, dtype=torch.bfloat16):
    """What the compiler made of a kernel."""
    inputs = operands(512, 512, 512, what, dtype)
    c = torch.empty(512, 512, dtype=dtype)
    with compiling(arch) as found:
        module.gemm(c=c, config=config, **inputs)
    (kernel,) = found
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", kernel.sass)
    return kernel.counts | {
        "name": name,
        "shared": kernel.shared,
        "spills": kernel.assembly.spill_stores,
        "serialised": kernel.serialised,
        "unused_barriers": kernel.unused_barriers,
        "injected": kernel.assembly.injected,
        "stmatrix": kernel.ptx.count("stmatrix"),
        "ldmatrix": kernel.ptx.count("ldmatrix"),
        "fences": kernel.ptx.count("fence.proxy.async"),
        "stores_under_way": sorted(set(re.findall(r"bulk\.wait_group\.read\s+(\d)", kernel.ptx))),
        "products_under_way": sorted({int(wait, 16) for wait in waits}),
        "global_stores": len(re.findall(r"st\.global", kernel.ptx)),
        "loops": [
            {"products": loop.opcodes["HGMMA"], "local_memory": loop.local_memory,
             "instructions": len(loop.instructions)}
            for loop in kernel.hot_loops
        ],
    }  # fmt: skip


def rows(arch):
    """The rows of an architecture."""
    rows = []
    if arch == "sm_90":
        for name, (config, what) in HOPPER.items():
            rows.append(row(name, gemm_hopper, arch, config, what))
    for what, dtype in PORTABLE:
        rows.append(row(f"portable {what} {dtype}", gemm_portable, arch, None, what, dtype))
    return rows
