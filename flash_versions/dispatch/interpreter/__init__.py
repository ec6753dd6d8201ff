"""Triton without a GPU: when kernels are interpreted, and an interpreter, right and quick."""

from flash_versions.dispatch.interpreter.absent import triton_missing
from flash_versions.dispatch.interpreter.switch import enable_without_gpu, enabled, say

__all__ = ["enable_without_gpu", "enabled", "say", "triton_missing"]
