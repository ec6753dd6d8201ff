"""A call of `attention` in FlashAttention 2's terms: what all functions of this folder end in."""

from typing import Any

import torch

from flash_versions.dispatch.request import Sides
from flash_versions.flash_attn.forward_only import forward_only
from flash_versions.flash_attn.packing import in_chunks, unpacked
from flash_versions.versions.api import attention

WindowSize = tuple[int | None, int | None] | torch.Tensor
Output = Any  # a tensor, or a tuple for a caller that asks for the LSE


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_attn_probs: bool,
    window_size: WindowSize,
    softcap: float,
    softmax_scale: float | None,
    attention_chunk: int,
    s_aux: torch.Tensor | None,
    deterministic: bool = False,
    max_seqlen_q: object = None,
    max_seqlen_k: object = None,
    **options: Any,
) -> Output:
    """`attention` in the terms of FlashAttention 2: out, or (out, lse, None); options keep their
    names.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    shape = q.shape[:-2]
    if attention_chunk != 0:
        q, k, v, options = in_chunks(attention_chunk, q, k, v, options)
    result: Any = attention(
        q,
        k,
        v,
        window=bounds_of(window_size),
        softcap=softcap or None,
        scale=softmax_scale,
        sink=s_aux,
        deterministic=deterministic or None,
        return_lse=return_attn_probs,
        **options,
    )
    out, lse = result if return_attn_probs else (result, None)
    if q.shape[:-2] != shape:  # packed for its chunks
        out, lse = unpacked(out, lse, shape)
    return (out, lse, None) if return_attn_probs else out


attend_to_pages = forward_only("attention to keys in pages")(attend)


def bounds_of(window_size: WindowSize) -> Sides:
    """The window with None in the place of what is negative; the numbers of a tensor are read on
    the host.
    """
    given: Any = window_size.tolist() if isinstance(window_size, torch.Tensor) else window_size
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(
            f"window_size={window_size!r} must be a pair (left, right), with -1 for no bound."
        )
    left, right = (None if side is None or side < 0 else side for side in given)
    return left, right
