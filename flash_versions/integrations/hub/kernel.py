"""FlashAttention 1 to 4 as Triton kernels: attention, FlashAttention 2's functions, and layers.

`flash_versions.integrations.hub.export` writes this module as the `__init__.py` of the kernel.
Without a GPU it turns Triton's interpreter on, which works only before triton is imported;
elsewhere set TRITON_INTERPRET=1 before Python starts.
"""

from flash_versions.dispatch import interpreter

interpreter.enable_without_gpu()  # before anything imports triton

from flash_versions.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_versions.integrations.hub import layers  # noqa: E402
from flash_versions.versions import masks  # noqa: E402
from flash_versions.versions.api import VERSIONS, attention  # noqa: E402

__all__ = [
    "VERSIONS",
    "attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "layers",
    "masks",
]
