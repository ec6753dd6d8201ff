"""Attention of torch's nested tensors: sequences of different lengths as one tensor, not padded.

    from flash_versions.integrations.nested import nested_attention
    q, k, v = (torch.nested.nested_tensor(x, layout=torch.jagged) for x in (qs, ks, vs))
    o = nested_attention(q, k, v, causal=True)

A jagged tensor has its rows one behind the other, as packed sequences have, so nothing is copied.
"""

from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from flash_versions.versions.api import attention

RAGGED = 1  # the dimension of the lengths


def nested_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """`attention` of each sequence for itself.

    Args:
        q: nested, of layout torch.jagged: (batch, lengths of its own, heads, head_dim).
        k: nested, (batch, lengths of its own, kv_heads, head_dim). Sequences may have other lengths
            than in q.
        v: nested, (batch, lengths as in k, kv_heads, head_dim_v).
        options: of `attention`, without return_lse and those that say where sequences begin.

    Raises:
        ValueError: a tensor is not nested, is not jagged or has its lengths elsewhere; or what
            `attention` refuses.

    Returns:
        o (batch, lengths as in q, heads, head_dim_v), nested.
    """
    q, k, v = (_jagged(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} sequences, k {k.shape[0]} and v {v.shape[0]}; give as many."
        )
    if options.pop("return_lse", False):
        raise ValueError("return_lse=True is not possible; call attention with q.values().")
    bounds = {"cu_seqlens_q": q.offsets().int()}
    if k.offsets() is not q.offsets():
        bounds["cu_seqlens_k"] = k.offsets().int()
    o = attention(q.values(), k.values(), v.values(), **bounds, **options)
    return torch.nested.nested_tensor_from_jagged(o, q.offsets())


def _jagged(name: str, x: Any) -> NestedTensor:
    """x, if it is a jagged tensor with the lengths in front of the heads."""
    if not isinstance(x, NestedTensor):
        raise ValueError(
            f"{name} is no jagged tensor; torch.nested.nested_tensor(..., layout=torch.jagged) "
            f"makes one, and attention takes the others."
        )
    if x.dim() != 4 or x._ragged_idx != RAGGED:
        raise ValueError(
            f"{name} has {x.dim()} dimensions with the lengths in number {x._ragged_idx}; it must "
            f"be (batch, lengths, heads, head_dim)."
        )
    if x.lengths() is not None:
        raise ValueError(f"{name} has rows of no sequence; give a contiguous tensor.")
    return x
