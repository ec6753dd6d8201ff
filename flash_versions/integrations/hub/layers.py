"""Layers that `kernels.kernelize` puts in the place of a model's own: stateless, only `forward`.

A model's layer takes part if its `forward` has the same parameters and it is marked with
`@use_kernel_forward_from_hub("FlashAttention")`.
"""

import torch
from torch import nn

from flash_versions.versions.api import attention


class FlashAttention(nn.Module):
    """Softmax attention of a batch, differentiable."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: (batch, M, heads, head_dim).
            key: (batch, N, kv_heads, head_dim).
            value: (batch, N, kv_heads, head_dim_v).
            causal: the last query sees the last key, each earlier one a key less.
            scale: positive factor on the scores; None means head_dim ** -0.5.

        Returns:
            (batch, M, heads, head_dim_v) in query's dtype.

        Raises:
            ValueError: an argument is malformed, or no kernel takes it.
        """
        return attention(query, key, value, causal=causal, scale=scale)


class PackedFlashAttention(nn.Module):
    """Softmax attention of sequences that are packed in one tensor, differentiable."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: (total, heads, head_dim).
            key: (total, kv_heads, head_dim).
            value: (total, kv_heads, head_dim_v).
            cu_seqlens: (batch + 1,) integers; sequence b has the rows cu_seqlens[b] ..
                cu_seqlens[b+1] - 1.
            causal: a query sees no later key of its sequence.
            scale: positive factor on the scores; None means head_dim ** -0.5.

        Returns:
            (total, heads, head_dim_v) in query's dtype.

        Raises:
            ValueError: an argument is malformed, or no kernel takes it.
        """
        return attention(query, key, value, cu_seqlens_q=cu_seqlens, causal=causal, scale=scale)
