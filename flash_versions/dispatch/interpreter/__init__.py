"""Triton without a GPU: when kernels are interpreted, and an interpreter that is right and quick.

May import: torch, triton, numpy; nothing of this package.
"""

from flash_versions.dispatch.interpreter.absent import triton_missing
from flash_versions.dispatch.interpreter.switch import enable_without_gpu, enabled, say

__all__ = ["enable_without_gpu", "enabled", "say", "triton_missing"]
