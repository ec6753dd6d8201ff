"""FlashAttention 2's functions, with its names, parameters, order, defaults and layouts.

    from flash_versions.flash_attn import flash_attn_func

`causal` and `window_size` are aligned to the bottom right, as there. New, by keyword: `version`, a
name in VERSIONS or BASELINES, or "auto" for the newest that can; `s_aux`, an attention sink (see
`attention`) under the name that transformers looks for; and arguments of FlashAttention 3.

What differs from FlashAttention 2:

* More is possible: float32, 8-bit floats, head dims of any size up to 512 and another one in v,
  pages of any size, softcap with dropout, a gradient through the LSE.
* A query that sees no key has the LSE -inf instead of +inf; out is 0 as there.
* With return_attn_probs, S_dmask is None: the probabilities are never in memory. Dropout draws
  other numbers, from torch's generator.
* Maximum lengths are not needed and not looked at: a tensor there costs no synchronisation.
* `deterministic` is False by default, as there; torch.use_deterministic_algorithms(True) counts,
  too.

Source: flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flash_versions.dispatch.request import check_integers
from flash_versions.flash_attn.call import Output, WindowSize, attend, attend_to_pages
from flash_versions.flash_attn.packing import UsedQueries

Function = TypeVar("Function", bound=Callable[..., Any])
NOT_STACKED = ("q", "k", "v", "q_descale", "k_descale", "v_descale", "s_aux")


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attention_chunk: int = 0,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    batch_invariant: bool = False,
    version: str = "auto",
) -> Output:
    """Attention of sequences of one length.

    Args:
        q: (batch, M, heads, head_dim). A last dimension that is not contiguous is copied; so k, v.
        k: (batch, N, kv_heads, head_dim); query heads h*g .. h*g+g-1 use key head h, g = heads /
            kv_heads.
        v: (batch, N, kv_heads, head_dim_v).
        dropout_p: probability with which an element of the softmax is dropped; 0 in evaluation.
        softmax_scale: positive factor on the scores; None means head_dim ** -0.5.
        causal: query i sees keys j <= i + N - M.
        window_size: (left, right), inclusive: query i sees keys i + N - M - left .. i + N - M +
            right. None or any negative number on a side means no bound, as in FlashAttention 2 and
            3, so no window is empty: (0, 0) is one key. (FlashAttention 4 counts a negative number
            as a distance.) With causal, right is 0. A tensor of two integers is read on the host.
        softcap: scores s become softcap * tanh(s / softcap); 0 means off.
        alibi_slopes: (heads,) or (batch, heads): score (i, j) loses slope * |i + N - M - j|.
        deterministic: the same inputs give the same gradients to the bit; see `attention`.
        return_attn_probs: also return the LSE.
        attention_chunk: as in FlashAttention 3, for Llama 4: query i, at position p = i + N - M,
            sees only keys j with j // attention_chunk = p // attention_chunk. 0 means no chunks. It
            is a mask of `masks.chunks`, which FA1 refuses; lengths, packed sequences and pages are
            cut into chunks.
        q_descale: with an 8-bit q, k and v, as in FlashAttention 3, (1,) or (batch, kv_heads): what
            the numbers of q count, for the query heads of a key head; see `attention`. out is
            bfloat16, and a backward raises a ValueError.
        k_descale: the same of k.
        v_descale: the same of v.
        s_aux: (heads,), a logit in the denominator of every softmax that belongs to no key.
        batch_invariant: a row's bits do not depend on other rows; see `attention`.
        version: which kernels.

    Returns:
        out (batch, M, heads, head_dim_v). With return_attn_probs, (out, softmax_lse, None):
        softmax_lse is fp32, natural log, (batch, heads, M).

    Raises:
        ValueError: an argument is malformed, or the version does not support what was asked for.
    """
    return attend(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
        attention_chunk=attention_chunk, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, s_aux=s_aux, batch_invariant=batch_invariant, version=version
    )  # fmt: skip


def _with_options(function: Function) -> Function:
    """Give a function of stacked tensors, (..., *options, **named), the options of those of q, k
    and v: its signature says them one by one.
    """
    options = inspect.signature(flash_attn_func).parameters.values()
    chosen = [p for p in options if p.name not in NOT_STACKED]
    own = inspect.signature(function).parameters.values()
    first = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    returned = inspect.signature(function).return_annotation
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*first, *chosen], return_annotation=returned
    )
    return function


@_with_options
def flash_attn_qkvpacked_func(qkv: torch.Tensor, *options: Any, **named: Any) -> Output:
    """`flash_attn_func` on q, k and v stacked in qkv (batch, length, 3, heads, head_dim).

    The gradient of qkv is one tensor, too. Other arguments, results and errors are those of
    `flash_attn_func`.
    """
    q, k, v = _unpack("qkv", qkv, "(batch, length, 3, heads, head_dim)", 2, 3)
    return flash_attn_func(q, k, v, *options, **named)


@_with_options
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *options: Any, **named: Any
) -> Output:
    """`flash_attn_func` on q (batch, M, heads, head_dim) and on k and v stacked in kv (batch, N, 2,
    kv_heads, head_dim).

    The gradient of kv is one tensor, too. Other arguments, results and errors are those of
    `flash_attn_func`.
    """
    k, v = _unpack("kv", kv, "(batch, length, 2, kv_heads, head_dim)", 2, 2)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    batch_invariant: bool = False,
    version: str = "auto",
) -> Output:
    """Attention of sequences of any lengths, packed without padding.

    Args:
        q: (total_q, heads, head_dim), the queries of all sequences one after the other.
        k: (total_k, kv_heads, head_dim); with a block_table (pages, page_size, kv_heads, head_dim).
        v: like k, with any head_dim.
        cu_seqlens_q: (batch + 1,) integers from 0 to total_q: sequence b has the rows
            cu_seqlens_q[b] .. cu_seqlens_q[b+1] - 1. None: q is (batch, M, heads, head_dim).
        cu_seqlens_k: the same for k and v; with a block_table its differences give the lengths.
            None: k and v are (batch, N, kv_heads, dim), or packed as q is.
        max_seqlen_q: an integer or a tensor; not looked at.
        max_seqlen_k: an integer or a tensor; not looked at.
        block_table: (batch, max_pages) integers: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. Then there is no gradient: a backward raises a
            ValueError.
        seqused_q: (batch,) integers, as in FlashAttention 3: only the first seqused_q[b] queries of
            sequence b are used, and M is their number. The others have out = 0, the LSE -inf and
            zero gradients. q is copied, and so is out.
        seqused_k: (batch,) integers, as in FlashAttention 3: only the first seqused_k[b] keys of
            sequence b are used, and N is their number. The others have zero gradients. Nothing is
            copied.

    The others are those of `flash_attn_func`; M and N are the lengths of each sequence.

    Returns:
        out (total_q, heads, head_dim_v). With return_attn_probs, (out, softmax_lse, None):
        softmax_lse is fp32, natural log, (heads, total_q). If q is not packed, they are as
        `flash_attn_func` returns them.

    Raises:
        ValueError: an argument is malformed, or the version does not support what was asked for.
    """
    if seqused_k is not None:
        check_integers("cu_seqlens_q", cu_seqlens_q, ("batch + 1",), q.device)
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        check_integers("seqused_k", seqused_k, (batch,), q.device)
    chosen = attend if block_table is None else attend_to_pages
    used = None
    if seqused_q is not None:
        if cu_seqlens_k is None and block_table is None and k.dim() == 3:
            cu_seqlens_k = cu_seqlens_q
        used = UsedQueries.of(q, cu_seqlens_q, seqused_q)
        q, cu_seqlens_q = used.q, used.cu_seqlens
    result = chosen(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, kv_lengths=seqused_k, dropout_p=dropout_p,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_attn_probs=return_attn_probs,
        block_table=block_table, attention_chunk=attention_chunk, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, s_aux=s_aux, batch_invariant=batch_invariant,
        version=version
    )  # fmt: skip
    if used is None:
        return result
    out, lse = used.in_place(*result[:2]) if return_attn_probs else used.in_place(result, None)
    return (out, lse, None) if return_attn_probs else out


@_with_options
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    *options: Any,
    **named: Any,
) -> Output:
    """`flash_attn_varlen_func` on q, k and v stacked in qkv (total, 3, heads, head_dim).

    cu_seqlens (batch + 1,) holds for all three, and the gradient of qkv is one tensor. Other
    arguments, results and errors are those of `flash_attn_varlen_func`.
    """
    q, k, v = _unpack("qkv", qkv, "(total, 3, heads, head_dim)", 1, 3)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *lengths, *options, **named)


@_with_options
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    *options: Any,
    **named: Any,
) -> Output:
    """`flash_attn_varlen_func` on q (total_q, heads, head_dim) and on k and v stacked in kv
    (total_k, 2, kv_heads, head_dim).

    The gradient of kv is one tensor, too. Other arguments, results and errors are those of
    `flash_attn_varlen_func`.
    """
    k, v = _unpack("kv", kv, "(total, 2, kv_heads, head_dim)", 1, 2)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *lengths, *options, **named)


def _unpack(
    name: str, packed: torch.Tensor, layout: str, dim: int, parts: int
) -> tuple[torch.Tensor, ...]:
    """The tensors that are stacked along a dimension; the gradient of all is one stack."""
    if packed.dim() != dim + 3 or packed.shape[dim] != parts:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be {layout}.")
    return packed.unbind(dim)
