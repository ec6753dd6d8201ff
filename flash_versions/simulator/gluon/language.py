"""What a kernel finds in Gluon's modules, by name; what Triton has, too, is that of `language`."""

from types import SimpleNamespace

from flash_versions.simulator.gluon import machine, mbarrier, shared, tma, tmem, wgmma
from flash_versions.simulator.gluon.ptx import inline_asm_elementwise
from flash_versions.simulator.state import here


class Layout:
    """Takes anything, means nothing."""

    def __init__(self, *arguments, **named):
        pass

    @classmethod
    def get_default_for(cls, *arguments, **named):
        return cls()


class Semantic:
    """What builtins of ours are made of: see `tiles/triton_compat.py`."""

    @staticmethod
    def memdesc_reinterpret(tile, dtype, shape, layout):
        return tile.reinterpret(dtype, shape, layout)

    @staticmethod
    def _convert_to_ir_values(values, require_i64=True):
        return values

    def add(kind, desc, coord, tile):
        tma.async_atomic_add(desc, coord, tile)

    builder = SimpleNamespace(create_async_tma_reduce=add)


def num_warps():
    return here.partition.threads // 32


def gdc_wait():
    """A kernel is simulated when the one before has ended."""


def gdc_launch_dependents():
    """See `gdc_wait`."""


LAYOUTS = (
    "AutoLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout", "DotOperandLayout",
    "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout", "PaddedSharedLayout",
    "SharedLinearLayout", "CoalescedLayout",
)  # fmt: skip
GLUON = {
    **dict.fromkeys(LAYOUTS, Layout),
    "allocate_shared_memory": shared.allocate_shared_memory,
    "shared_memory_descriptor": shared.Shared,
    "warp_specialize": machine.warp_specialize,
    "inline_asm_elementwise": inline_asm_elementwise,
    **dict.fromkeys(("barrier", "thread_barrier"), machine.barrier),  # Triton 3.7 renamed it
    "convert_layout": lambda value, layout, assert_trivial=False: value,
    "set_auto_layout": lambda value, layout: value,
    "num_warps": num_warps,
    "num_ctas": lambda: 1,
}
BOTH = {"mbarrier": mbarrier, "tma": tma, "fence_async_shared": tma.fence_async_shared}
HOPPER = BOTH | {
    name: getattr(wgmma, name)
    for name in ("warpgroup_mma", "warpgroup_mma_wait", "warpgroup_mma_init")
}
BLACKWELL = BOTH | {
    "tensor_memory_descriptor": tmem.TensorMemory,
    **{
        name: getattr(tmem, name)
        for name in (
            "allocate_tensor_memory", "get_tmem_reg_layout", "tcgen05_commit", "tcgen05_mma",
            "tensor_memory_descriptor_type", "TensorMemoryLayout",
        )
    },
}  # fmt: skip
CUDA_EXTRA = {"gdc_wait": gdc_wait, "gdc_launch_dependents": gdc_launch_dependents}
