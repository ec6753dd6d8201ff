"""Doors into other people's models: transformers (`hf`) and torch's own attention (`sdpa`)."""

import torch


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x, copied if its last dimension is not contiguous, which the kernels need."""
    return x if x.stride(-1) == 1 else x.contiguous()
