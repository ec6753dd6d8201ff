"""What a kernel finds in Gluon's modules, by name; what Triton has, too, is that of `language`."""

from types import SimpleNamespace

from flash_versions.simulator.gluon import machine, mbarrier, shared, tma, tmem, wgmma
from flash_versions.simulator.gluon.ptx import inline_asm_elementwise
from flash_versions.simulator.state import here

# What builtins of ours are made of: see `tiles/triton_compat.py`.
Semantic = SimpleNamespace(
    memdesc_reinterpret=lambda tile, *form: tile.reinterpret(*form),
    _convert_to_ir_values=lambda values, require_i64=True: values,
    builder=SimpleNamespace(
        create_async_tma_reduce=lambda kind, *given: tma.async_atomic_add(*given)
    ),
)


def nothing(*arguments, **named):
    """A kernel is simulated when the one before has ended."""


def members(module, names):
    """Some of a module's members by name."""
    return {name: getattr(module, name) for name in names.split()}


LAYOUTS = """
    AutoLayout BlockedLayout SliceLayout DistributedLinearLayout DotOperandLayout
    NVMMADistributedLayout NVMMASharedLayout SwizzledSharedLayout PaddedSharedLayout
    SharedLinearLayout CoalescedLayout
"""
GLUON = {
    **dict.fromkeys(LAYOUTS.split(), mbarrier.Layout),
    **dict.fromkeys(("barrier", "thread_barrier"), machine.barrier),  # Triton 3.7 renamed it
    "allocate_shared_memory": shared.allocate_shared_memory,
    "shared_memory_descriptor": shared.Shared,
    "warp_specialize": machine.warp_specialize,
    "inline_asm_elementwise": inline_asm_elementwise,
    "convert_layout": lambda value, layout, assert_trivial=False: value,
    "set_auto_layout": lambda value, layout: value,
    "num_warps": lambda: here.partition.threads // 32,
    "num_ctas": lambda: 1,
}
BOTH = {"mbarrier": mbarrier, "tma": tma, "fence_async_shared": tma.fence_async_shared}
HOPPER = BOTH | members(wgmma, "warpgroup_mma warpgroup_mma_wait warpgroup_mma_init")
BLACKWELL = BOTH | {"tensor_memory_descriptor": tmem.TensorMemory}
BLACKWELL |= members(tmem, "allocate_tensor_memory get_tmem_reg_layout TensorMemoryLayout")
BLACKWELL |= members(tmem, "tcgen05_commit tcgen05_mma")
CUDA_EXTRA = dict.fromkeys(("gdc_wait", "gdc_launch_dependents"), nothing)
