"""FlashAttention 1 to 4 as Triton kernels: attention, FlashAttention 2's functions, and layers.

`flash_versions.integrations.hub.export` writes this module as the `__init__.py` of the kernel.
"""

from flash_versions.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_versions.integrations.hub import layers
from flash_versions.versions import masks
from flash_versions.versions.api import VERSIONS, attention

__all__ = [
    "VERSIONS",
    "attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "layers",
    "masks",
]
