"""The matrix products, and those of a norm, by name: of each kernel its summary and a little more.
See compiled.py.
"""

import re
from functools import partial

import torch

from flash_versions.inspect.command import compiling
from tests.compile.compiled import unused_barriers
from transformer.model.kernels.gemm import hopper, portable
from transformer.model.kernels.gemm.config import default_config

MANY_SWIGLU = default_config(8192, 8192, 132, swiglu=True)
PORTABLE = {
    "bf16": (portable.gemm, "swiglu", torch.bfloat16),
    "fp16": (portable.gemm, "bias residual", torch.float16),
    "fp32": (portable.gemm, "bias", torch.float32),
    "norm": (portable.gemm, "swiglu", torch.bfloat16),
    "norm, fp32": (portable.gemm, "bias", torch.float32),
}
HOPPER = {
    "plain": (partial(hopper.gemm, config=default_config(512, 4096, 132)), ""),
    "norm": (hopper.gemm, ""),
}
OPTIONS = {
    "swiglu": (partial(hopper.gemm, config=MANY_SWIGLU), "swiglu bias"),
    "many": (partial(hopper.gemm, config=default_config(8192, 8192, 132, True)), "residual"),
    "norm, swiglu": (hopper.gemm, "swiglu"),
}
CALLS: dict[str, dict[str, tuple]] = {"portable": PORTABLE, "hopper": HOPPER, "options": OPTIONS}


def rows(arch: str, group: str) -> dict[str, dict]:
    """What the tests look at, of each call of a group."""
    found = {}
    for name, (gemm, what, *other) in CALLS[group].items():
        dtype = other[0] if other else torch.bfloat16
        a, b, c = (torch.empty(1024, 1024, dtype=dtype) for _ in range(3))
        fused = {"up": torch.empty_like(b)} if "swiglu" in what else {}
        fused |= {"bias": c[0]} if "bias" in what else {}
        fused |= {"residual": torch.empty_like(c)} if "residual" in what else {}
        fused |= {"eps": 1e-6} if "norm" in name else {}
        with compiling(arch) as kernels:
            gemm(a, b, c, **fused)
        (kernel,) = kernels
        found[name] = kernel.summary() | {
            "unused_barriers": unused_barriers(kernel.ttgir),
            "stmatrix": kernel.ptx.count("stmatrix"),
            "fences": kernel.ptx.count("fence.proxy.async"),
            "stores_under_way": sorted(
                set(re.findall(r"bulk\.wait_group\.read\s+(\d)", kernel.ptx))
            ),
            "global_stores": kernel.ptx.count("st.global"),
        }
    return found
