"""`attention`: check the arguments, choose a version, run it."""

from typing import Literal, Unpack, overload

import torch

from flash_versions.dispatch.autograd.call import run
from flash_versions.dispatch.autograd.kept import find_call, serve
from flash_versions.dispatch.precision import Fp8
from flash_versions.dispatch.replay import keys
from flash_versions.dispatch.request import Options, Sides, make_request
from flash_versions.dispatch.version import BASELINES, EXPLICIT, VERSIONS, choose_version, register
from flash_versions.versions import fa1, fa2, fa3, fa4
from flash_versions.versions.oracle.reference import REFERENCE, SDPA

register(module.VERSION for module in (fa1, fa2, fa3, fa4))
register((REFERENCE, SDPA))
EXPLICIT[fa4.EXPLICIT.name] = fa4.EXPLICIT

__all__ = ["BASELINES", "VERSIONS", "attention", "choose_version"]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    version: str = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    version: str = ...,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    version: str = ...,
    return_lse: bool,
    **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sides | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_starts: torch.Tensor | None = None,
    query_ends: torch.Tensor | None = None,
    version: str = "auto",
    num_splits: int | None = None,
    return_lse: bool = False,
    precision: str | Fp8 | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention; `flash_versions.attention_reference` is the specification.

    Differentiable once in q, k, v and sink, through o and through the LSE. Under torch.autocast, q,
    k and v are cast to its dtype. Works under torch.compile, torch.export and checkpointing; not
    under torch.func's derivatives and forward-mode differentiation, for which there is
    version="reference".

    Args:
        q: (batch, M, heads, head_dim), float32, float16 or bfloat16; or, quantised already,
            float8_e4m3fn or float8_e5m2. Any strides, but the last dimension's must be 1. head_dim
            up to 512; up to 256 with version="fa1" and in FP8.
        k: (batch, N, kv_heads, head_dim). heads is a multiple of kv_heads: query heads h*g ..
            h*g+g-1 use key head h.
        v: (batch, N, kv_heads, head_dim_v).
        causal: query i sees keys j <= i + N - M: the last query sees the last key (bottom-right
            aligned).
        scale: positive factor on the scores; None means head_dim ** -0.5.
        window: (left, right), inclusive: query i sees keys i + N - M - left .. i + N - M + right;
            None on a side means no bound. With causal, right is 0. Both are 0 or more.
        softcap: scores s become softcap * tanh(s / softcap).
        alibi_slopes: (heads,) or (batch, heads): score (i, j) loses slope * |i + N - M - j|. No
            gradient.
        sink: (heads,), a logit in the denominator of every softmax, and in the LSE, that belongs
            to no key.
        dropout_p: probability with which an element of the softmax is dropped; those that are kept
            count 1 / (1 - dropout_p) times. Drawn from torch's generator.
        cu_seqlens_q: (batch + 1,) integers that never decrease, from 0 to at most total: sequences
            are packed, b has the rows cu_seqlens_q[b] .. cu_seqlens_q[b+1] - 1 of q (total, heads,
            head_dim). Rows of no sequence see no key.
        cu_seqlens_k: the same for k and v (total, kv_heads, dim); None, with packed k: as the
            queries'. With block_table, its differences give lengths only.
        kv_lengths: (batch,) integers: sequence b has only its first kv_lengths[b] keys, and causal,
            window and ALiBi align to kv_lengths[b] in the place of N. Clamped to 0 .. N. With
            cu_seqlens_k, N is the length that it gives; the keys behind have zero gradients.
        kv_starts: (batch,) integers: the keys of sequence b start in row kv_starts[b] (left
            padding), which is position 0. Clamped to 0 .. the sequence's end. Rows in front of it
            have zero gradients.
        block_table: (batch, max_pages) integers, for inference: k and v are (pages, page_size,
            kv_heads, dim), and key j of sequence b is row j % page_size of page block_table[b, j //
            page_size]. Entries up to its length must be pages that exist, seen or not. Without
            kv_lengths and cu_seqlens_k, all pages are full.
        query_starts: (N,), (batch, N) or (batch, kv_heads, N) integers: queries i <
            query_starts[j] do not see key j, whatever causal and window allow. Queries are counted
            from 0, wherever the diagonal is. None: the first one sees it. `flash_versions.masks`
            makes these for documents, shared prompts and trees.
        query_ends: the same: queries i >= query_ends[j] do not see key j. If that is no later than
            its start, no query sees it. No interval mask is possible with lengths, packed
            sequences, pages or FP8.
        version: a name in VERSIONS or BASELINES, a file that `load_version` has loaded, or "auto":
            the newest version that takes these inputs. "fa4-blackwell" is FA4's kernel for
            Blackwell, which never ran on hardware; "lesson-fa2" and others are `LESSONS`.
        num_splits: FA2's split-KV: ranges into which the keys are split; None lets the version
            choose.
        return_lse: also return the log-sum-exp of the scores.
        precision: "fp8" or an `Fp8`: quantise float16 or bfloat16 inputs to 8 bits first,
            which halves the time of the products and costs accuracy. For inference. None: as the
            dtype says; 8-bit inputs are multiplied as they are, packed sequences and pages of them
            in 16 bits.
        q_descale: the scale of an 8-bit q, float32 and positive: q * q_descale is what it stands
            for. (1,) for all of it, (batch, kv_heads) for the query heads of each key head, or
            (batch, heads, ceil(M / 64)) for every 64 queries. None is 1.
        k_descale: the scale of an 8-bit k: (1,), (batch, kv_heads), or (batch, kv_heads, ceil(N /
            128)) for every 128 keys. No blocks with packed sequences, pages or kv_starts.
        v_descale: the same of v.
        deterministic: True: the same inputs give the same gradients to the bit, because all sums
            have a fixed order. False: a faster kernel may add in any order, where a version has
            one. None: as torch.use_deterministic_algorithms says when the
            gradients are computed. The forward gives the same bits in any case.
        batch_invariant: True: a row of o and of the LSE is a function of its query, its keys and
            values and their order, to the bit. The batch, other rows, the chunk of the prompt,
            packing, padding on either side, pages and decoding in the place of prefill change
            nothing, nor do they change dq, dk and dv. Not with dropout_p, num_splits, or FP8 that
            is quantised in the call. False: what is fastest for a shape.
        check: read the values of cu_seqlens, kv_lengths, kv_starts, block_table, query_starts,
            query_ends and the scales on the host and refuse what is out of range. Without it, the
            host reads none of them, and cu_seqlens or pages out of range make the kernels read and
            write outside of the tensors.

    Returns:
        o: (batch, M, heads, head_dim_v) in q's dtype, for an 8-bit q in bfloat16; 0 for a query
        that sees no key. Packed: (total, heads, head_dim_v). With return_lse, (o, lse): lse is
        fp32, natural log, (batch, heads, M), packed (heads, total); for a query that sees no key
        -inf, or the sink.

    Raises:
        ValueError: an argument is malformed, or the version does not support what was asked for.
        RuntimeError: a forward-mode derivative is asked for, or a gradient by torch.func;
            AOTInductor packages the call for a GPU; the driver refuses a launch. The backward
            raises one if it is differentiated.
    """
    call, tensors, where = keys.NOT_FOUND
    plain = precision is q_descale is k_descale is v_descale is None
    if plain and not (dropout_p or check or torch.compiler.is_compiling()):
        options = (
            version, causal, scale, softcap, num_splits, return_lse, deterministic, batch_invariant
        )  # fmt: skip
        call, tensors, where = find_call(q, k, v, options, window, (
            alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, kv_lengths, kv_starts, block_table,
            query_starts, query_ends
        ))  # fmt: skip
    if call is not None:
        o, lse = serve(call, tensors, where)
        return (o, lse) if return_lse else o  # type: ignore[return-value]
    request = make_request(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, sink=sink, dropout_p=dropout_p, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, kv_lengths=kv_lengths, kv_starts=kv_starts,
        block_table=block_table, query_starts=query_starts, query_ends=query_ends,
        num_splits=num_splits, return_lse=return_lse, precision=precision, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, deterministic=deterministic,
        batch_invariant=batch_invariant, check=check
    )  # fmt: skip
    o, lse = run(version, request, where)
    if cu_seqlens_q is not None:
        o, lse = o.squeeze(0), lse if lse is None else lse.squeeze(0)
    return (o, lse) if return_lse else o  # type: ignore[return-value]
