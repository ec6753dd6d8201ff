"""A small Gluon kernel and calls of FA2, inspected where kernels are compiled: what test_inspect.py
asserts. See apart.py.
"""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions import VERSIONS
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.inspect.command import Compiled, compile_call, compiling
from flash_versions.versions.tiles.triton_compat import load_tile

ROWS = 64


@gluon.jit
def attention_kernel(q, k, v, o, blocks):
    """Unnormalised attention of 64 queries: the fewest lines that TMA and wgmma need."""
    rows: gl.constexpr = q.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])
    tiles = gl.allocate_shared_memory(q.dtype, [3] + q.block_type.shape, q.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, q.block_type.nbytes)
    load_tile(q, [0, 0], full, tiles.index(0))
    mbarrier.wait(full, 0)
    acc = gl.zeros([rows, rows], gl.float32, layout)
    for block in range(blocks):
        mbarrier.expect(full, 2 * q.block_type.nbytes)
        load_tile(k, [block * rows, 0], full, tiles.index(1))
        load_tile(v, [block * rows, 0], full, tiles.index(2))
        mbarrier.wait(full, (block + 1) & 1)
        s = gl.zeros([rows, rows], gl.float32, layout)
        k_tile = tiles.index(1).permute((1, 0))
        token = warpgroup_mma(tiles.index(0), k_tile, s, use_acc=False, is_async=True)
        p = gl.exp2(warpgroup_mma_wait(0, deps=[token]))
        p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, layout, 2))
        token = warpgroup_mma(p, tiles.index(2), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
    index = gl.arange(0, rows, gl.SliceLayout(1, layout))[:, None] * rows
    gl.store(o + index + gl.arange(0, rows, gl.SliceLayout(0, layout))[None, :], acc)


launch_attention = Launcher(attention_kernel)


def compile_gluon() -> Compiled:
    """The kernel above, launched twice: compiled once, as the launches do not differ."""
    x = torch.empty(512, ROWS, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], gl.bfloat16)
    tiles = TensorDescriptor.from_tensor(x, [ROWS, ROWS], layout)
    o = torch.zeros(ROWS, ROWS)
    with compiling("sm_90") as found:
        for _ in range(2):
            launch_attention(("key",), (1,), (tiles, tiles, tiles, o, 8), {})
    assert not o.any(), "nothing runs"
    assert not launch_attention.compiled, "a launch elsewhere must not find this compiled form"
    [kernel] = found
    return kernel


def with_ptx(kernel: Compiled, old: str, new: str) -> Compiled:
    """A kernel with its PTX changed."""
    ptx = re.sub(old, new, kernel.ptx)
    assert ptx != kernel.ptx
    code = SimpleNamespace(asm=kernel.code.asm | {"ptx": ptx}, metadata=kernel.code.metadata)
    return replace(kernel, code=code)


def rows() -> dict:
    """What was found, by name."""
    before = (Launcher.__call__, triton.runtime.driver._active, devices.assumed)
    gluon_kernel = compile_gluon()
    product = r"(wgmma\.mma_async[^{]*\{(%\w+)[^;]*;)"
    waits = r"wgmma\.wait_group\.sync\.aligned[^;]*;"

    q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16)
    long = torch.empty(1, 8192, 2, 64, dtype=torch.bfloat16)
    request = make_request(q, q, q, causal=True)
    fa2 = VERSIONS["fa2"]
    config = LaunchConfig(64, 32, 4, 2)
    varied = replace(fa2, variants={"small tiles": partial(fa2.forward, config=config)})
    errors = {}
    for name, call in {
        "arch": lambda: compile_call("fa2", request, "sm_75"),
        "variant": lambda: compile_call(varied, request, variant="large tiles"),
        "request": lambda: compile_call("fa1", make_request(q, q, q, softcap=3.0)),
    }.items():
        try:
            call()
        except ValueError as error:
            errors[name] = str(error)
    document = {
        "gluon": gluon_kernel.summary(),
        "touched": list(
            with_ptx(gluon_kernel, product, r"\1 add.f32 \2, \2, 0f3F800000;").serialised
        ),
        "without waits": list(with_ptx(gluon_kernel, waits, "").assembly.injected),
        "few registers": with_ptx(
            gluon_kernel, r"(\.reqntid [^\n]*)", r"\1\n.maxnreg 72"
        ).assembly.spill_stores,
        "fa2": {
            arch: [kernel.summary() for kernel in compile_call("fa2", request, arch, backward=True)]
            for arch in ("sm_80", "sm_90")
        },
        "split": [k.kernel for k in compile_call("fa2", make_request(long[:, :1], long, long))],
        "shared": [
            compile_call(varied, request, variant=variant)[0].shared
            for variant in (None, "small tiles")
        ],
        "errors": errors,
    }
    after = (Launcher.__call__, triton.runtime.driver._active, devices.assumed)
    document["restored"] = before == after
    return document
