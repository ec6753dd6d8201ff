"""What calls of every shape launch on one architecture, a row for each kernel. See apart.py: a
process of its own for each of PARTS.
"""

from dataclasses import dataclass, field
from unittest import mock

import torch

from flash_versions import VERSIONS
from flash_versions.dispatch import interpreter
from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import Request, make_request
from flash_versions.flash_attn import kv_cache
from flash_versions.inspect.command import Compiled, compile_call, compiling
from flash_versions.versions.fa3.fp8 import forward as forward_fp8
from flash_versions.versions.fp8.quantize import prepare


@dataclass(frozen=True)
class Shape:
    """What a call looks like."""

    queries: int = 512
    keys: int = 512
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True
    options: dict = field(default_factory=dict)

    def request(self) -> Request:
        """A request of uninitialised tensors of this shape."""
        q = torch.empty(1, self.queries, self.heads, self.head_dim, dtype=self.dtype)
        k = torch.empty(1, self.keys, self.kv_heads, self.head_dim, dtype=self.dtype)
        v = torch.empty(*k.shape[:3], self.head_dim_v or self.head_dim, dtype=self.dtype)
        if "cu_seqlens_q" in self.options:
            q, k, v = q[0], k[0], v[0]
        return make_request(q, k, v, **({"num_splits": 1} | self.options))


CAUSAL = {"causal": True}
INT32 = torch.zeros(2, dtype=torch.int32)
ENDS = {"query_ends": torch.zeros(512, dtype=torch.int32)}
SHAPES = {
    "prefill-64": Shape(options=CAUSAL),
    "prefill-128": Shape(head_dim=128, options=CAUSAL),
    "prefill-256": Shape(head_dim=256, options=CAUSAL),
    "prefill-80": Shape(head_dim=80, dtype=torch.float16, options=CAUSAL),
    "prefill-128-fp32": Shape(head_dim=128, dtype=torch.float32, options=CAUSAL),
    "full-64": Shape(backward=False),
    "full-128": Shape(head_dim=128, backward=False),
    "groups-64": Shape(kv_heads=2, backward=False),
    "groups-128": Shape(kv_heads=1, head_dim=128, backward=False, options=CAUSAL),
    "ragged-128": Shape(500, 700, head_dim=128, backward=False, options=CAUSAL),
    "long-64": Shape(8192, 8192, backward=False, options=CAUSAL),
    "window-256": Shape(head_dim=256, backward=False, options={"window": (100, 20)}),
    "panels-96": Shape(kv_heads=2, head_dim=96, backward=False, options=CAUSAL | ENDS),
    "order-112": Shape(4001, 4001, 36, 36, head_dim=112, backward=False),  # `prefers_order`
    "panels-160": Shape(head_dim=160, dtype=torch.float16, backward=False),
    "panels-192": Shape(kv_heads=2, head_dim=192, backward=False, options=CAUSAL),
    "192-by-128": Shape(head_dim=192, head_dim_v=128, backward=False, options=CAUSAL),
    "64-by-256": Shape(head_dim_v=256, backward=False),
    "softcap-128": Shape(head_dim=128, backward=False, options={"softcap": 30.0}),
    "decode-128": Shape(1, 4096, 32, 8, 128, backward=False, options={"num_splits": 4}),
    "packed": Shape(kv_heads=2, head_dim=128, options={"causal": True, "cu_seqlens_q": INT32}),
    "padded": Shape(
        head_dim=128,
        options={"causal": True, "kv_lengths": INT32[:1], "sink": torch.empty(4)},
    ),
    "scores": Shape(
        options={
            "window": (100, 20),
            "softcap": 30.0,
            "alibi_slopes": torch.empty(4),
            "sink": torch.empty(4),
            "dropout_p": 0.1,
        }
    ),
    "intervals-64": Shape(queries=64, kv_heads=2, options=CAUSAL | ENDS),  # one tile
    "intervals-128": Shape(kv_heads=2, head_dim=128, options=CAUSAL | ENDS),
    "intervals-256": Shape(kv_heads=2, head_dim=256, options=CAUSAL | ENDS),
    "pages": Shape(
        backward=False,
        options={"kv_lengths": INT32[:1], "block_table": INT32[None]},
    ),
}


FP8_SHAPES = {
    "fp8-128": Shape(head_dim=128, options=CAUSAL),
    "fp8-256": Shape(head_dim=256, options={"window": (100, 20)}),
    "fp8-scores": Shape(
        kv_heads=2,
        options={"softcap": 30.0, "alibi_slopes": torch.empty(4), "kv_lengths": INT32[:1]},
    ),
    "fp8-decode": Shape(1, 4096, 32, 8, 80),
}
# For the kernel for Hopper, by what shares a scale.
FP8_HOPPER_SHAPES = {
    ("head", "fp8-full-64"): Shape(),
    ("head", "fp8-causal-128"): Shape(head_dim=128, options=CAUSAL),
    ("head", "fp8-full-256"): Shape(head_dim=256),
    ("block", "fp8-full-64"): Shape(),
    ("block", "fp8-full-128"): Shape(head_dim=128),
    ("block", "fp8-causal-256"): Shape(head_dim=256, options=CAUSAL),
}
QUANTISED = {"fp8:block": 128, "fp8:head": 128, "fp8:block:hadamard": 256}  # -> head_dim
# What is compiled together, by architecture; "wide" is what repeats for another size what the other
# parts show.
PARTS = {
    "sm_80": ("all", "wide"),
    "sm_89": ("all", "wide"),
    "sm_90": ("fa1 fa2", "fa3", "fa4 fp8", "wide"),
    "sm_100": ("all", "wide"),
    "sm_120": ("all", "wide"),
}
# Of FA4, which has FA3's boxes, masks and tiles; test_fa4_compile.py has more of its own. Only the
# kernels for Hopper have panels.
REPEATED = {
    "fa1": ("panels-96", "order-112", "panels-160", "panels-192"),
    "fa2": ("panels-96", "order-112", "panels-160", "panels-192"),
    "fa3": ("decode-128",),  # FA2's
    "fa4": (
        "decode-128", "full-64", "full-128", "ragged-128", "192-by-128", "softcap-128", "pages",
        "panels-96", "order-112",
    ),
}  # fmt: skip
# On Hopper.
WIDE = {
    "fa1": (
        "full-64", "full-128", "ragged-128", "192-by-128", "64-by-256", "prefill-80",
        "prefill-128-fp32", "window-256", "prefill-64", "prefill-256", "padded",
    ),
    "fa2": (
        "full-64", "full-128", "ragged-128", "64-by-256", "softcap-128", "prefill-80",
        "prefill-64", "prefill-256", "packed", "padded", "intervals-64", "intervals-256",
    ),
    "fa3": (
        "full-64", "ragged-128", "64-by-256", "prefill-128-fp32", "scores", "panels-160",
        "intervals-64",
    ),
    "fa4": (
        "64-by-256", "prefill-128-fp32", "scores", "packed", "prefill-80", "intervals-64",
        "intervals-256", "panels-160",
    ),
}  # fmt: skip
# Elsewhere: head_dim 64 needs less of everything, and 256 has the least room on sm_89.
WIDE_ELSEWHERE = {"sm_89": ("prefill-64", "prefill-128-fp32", "padded")}
VARIANTS = ("no overlap", "late wait")  # of FA3, at head_dim 128
# What is looked at closely, by the ends of modules' names.
ASYNCHRONOUS = ("hopper.forward", "hopper.backward.kernel")
FP8_KERNELS = ("fa3.fp8.forward", "fp8.kernels")
LOOP_OPCODES = ("HGMMA", "QGMMA", "MUFU", "SHFL", "PRMT", "STS", "LDS", "LDL", "STL")


def compile_version(name: str, shape: str, arch: str, variant: str | None = None) -> list[dict]:
    """Rows of what one call of a version launches: forward and, if it is its own, backward."""
    request = SHAPES[shape].request()
    with compiling(arch):
        if VERSIONS[name].unsupported(request):
            return []
    before = list(VERSIONS)[: list(VERSIONS).index(name)]
    repeated = any(VERSIONS[x].backward is VERSIONS[name].backward for x in before)
    backward = SHAPES[shape].backward and variant is None and not repeated
    kernels = compile_call(name, request, arch, variant=variant, backward=backward)
    return [row(name, shape, kernel) | {"variant": variant} for kernel in kernels]


def compile_append(arch: str) -> list[dict]:
    """A row of the kernel that appends to a KV cache, with everything that it can do."""
    cache = torch.empty(4, 16, 2, 128, dtype=torch.bfloat16)
    new = torch.empty(1, 3, 2, 128, dtype=torch.bfloat16)
    tables = torch.empty(2, 64, 64)
    # Tensors on the CPU are let through only where kernels are interpreted.
    where = INT32[:1], INT32[:1], INT32[None]
    with compiling(arch) as found, mock.patch.object(interpreter, "enabled", lambda: True):
        kv_cache.append_op._init_fn(cache, cache, new, new, *where, *tables, True)
    return [row("", "append", kernel) for kernel in found]


def quantized(request: Request, scales: str) -> Quantized:
    """What a request's tensors are quantised to; uninitialised."""
    batch, queries, heads, _ = request.q.shape
    keys, kv_heads = request.k.shape[1:3]
    of_queries, of_keys = (batch, kv_heads, 1), (batch, kv_heads, 1)
    if scales == "block":
        of_queries, of_keys = (batch, heads, -(-queries // 64)), (batch, kv_heads, -(-keys // 128))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (request.q, request.k, request.v))
    k_scale = torch.empty(of_keys)
    return Quantized(
        q,
        k,
        v.permute(0, 2, 3, 1).contiguous(),
        torch.empty(of_queries),
        k_scale,
        torch.empty(of_keys),
        k_scale[..., 0].contiguous(),
    )


def compile_fp8(shape: str, about: Shape, arch: str, scales: str, portable: bool) -> list[dict]:
    """A row of FA3's FP8 kernel, the portable one or the one that the call is served by."""
    request = make_request(*about.request()[:3], precision=f"fp8:{scales}", **about.options)
    forward = forward_fp8.forward if portable else VERSIONS["fa3"].forward_quantized
    with compiling(arch) as found:
        if VERSIONS["fa3"].unsupported(request):
            return []
        forward(request, quantized(request, scales))
    return [row("fa3", shape, kernel) | {"variant": scales} for kernel in found]


def compile_quantize(precision: str, head_dim: int, arch: str) -> list[dict]:
    """Rows of what quantises the tensors of a call."""
    request = make_request(*Shape(head_dim=head_dim).request()[:3], precision=precision)
    with compiling(arch) as found:
        prepare(request)
    return [row("", precision, kernel) for kernel in found]


def asynchrony(kernel: Compiled) -> dict:
    """What ptxas says about the order of the products, and the order in the hot loops."""
    return {
        "serialised": kernel.serialised,
        "loops": [
            {
                "local_memory": loop.local_memory,
                "events": [[e.name, e.times] for e in loop.events],
                "opcodes": {name: loop.opcodes[name] for name in LOOP_OPCODES},
            }
            for loop in kernel.hot_loops
        ],
    }


def threads(kernel: Compiled) -> dict:
    """What ptxas spills, and how often each hot loop moves data between threads by shuffles."""
    return {
        "spills": kernel.assembly.spill_stores,
        "shuffles": [loop.opcodes["SHFL"] for loop in kernel.hot_loops],
    }


def row(version: str, shape: str, kernel: Compiled) -> dict:
    """What the tests look at."""
    return {
        "version": version,
        "shape": shape,
        "kernel": kernel.kernel,
        "module": kernel.module,
        "arch": kernel.arch,
        "shared": kernel.shared,
        "registers": kernel.registers,
        "stack": kernel.stack,
        "unused_barriers": kernel.unused_barriers,
        **(asynchrony(kernel) if kernel.module.endswith(ASYNCHRONOUS) else {}),
        **(threads(kernel) if kernel.module.endswith(FP8_KERNELS) else {}),
        **kernel.counts,
    }


def wanted(version: str, shape: str, arch: str) -> bool:
    """Whether a shape shows something that no other does."""
    if arch == "sm_90":
        return shape not in REPEATED.get(version, ())
    if shape == "prefill-128-fp32":
        return arch == "sm_89"  # as little shared memory as any
    if version in ("fa1", "fa2"):
        return shape == "prefill-128"  # test_tiles.py has the other head dims
    return shape in ("prefill-64", "prefill-128", "prefill-256")


def wide(version: str, shape: str, arch: str) -> bool:
    """Whether it repeats for another size what others show."""
    if arch == "sm_90":
        return shape in WIDE[version]
    return shape in WIDE_ELSEWHERE.get(arch, ("prefill-64", "prefill-256", "padded"))


def compile_versions(arch: str, part: str) -> list[dict]:
    """Rows of a part's calls in the inputs' own types."""
    rows = []
    for version in VERSIONS if part in ("all", "wide") else part.split():
        for shape in SHAPES:
            if version in VERSIONS and wanted(version, shape, arch):
                if wide(version, shape, arch) == (part == "wide"):
                    rows += compile_version(version, shape, arch)
    return rows


def compile_ablation(part: str) -> list[dict]:
    """Rows of the forms of FA3's kernel for Hopper."""
    rows = []
    for variant in VERSIONS["fa3"].variants:
        for shape in ("prefill-64", "prefill-128", "prefill-256"):
            if shape == "prefill-128" or variant == "late wait":
                if (shape == "prefill-128" and variant in VARIANTS) == (part == "fa3"):
                    rows += compile_version("fa3", shape, "sm_90", variant)
    return rows


def compile_all_fp8(arch: str, part: str) -> list[dict]:
    """Rows of a part's calls in FP8, and of what quantises on Hopper."""
    rows = []
    if arch == "sm_90":
        for (scales, shape), about in FP8_HOPPER_SHAPES.items():
            if (scales == "block" and shape != "fp8-full-128") == (part == "wide"):
                rows += compile_fp8(shape, about, arch, scales, portable=False)
    if arch == "sm_90" and part == "wide":
        for precision, head_dim in QUANTISED.items():
            rows += compile_quantize(precision, head_dim, arch)
    for shape, about in FP8_SHAPES.items():
        if arch == "sm_90" or shape in ("fp8-128", "fp8-256"):
            if (arch != "sm_90" and shape == "fp8-256") == (part == "wide"):
                rows += compile_fp8(shape, about, arch, "block", portable=True)
    return rows


def rows(arch: str, part: str) -> list[dict]:
    """The rows of a part."""
    assert part in PARTS[arch]
    rows = compile_versions(arch, part)
    if arch == "sm_90" and part in ("fa3", "wide"):
        rows += compile_ablation(part)
    if part in ("all", "fa4 fp8", "wide"):
        rows += compile_all_fp8(arch, part)
    if part in ("all", "fa1 fa2"):
        rows += compile_append(arch)
    return rows
