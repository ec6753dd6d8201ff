"""FlashAttention 2's step on a KV cache: append the new keys, then attend to all of them."""

from numbers import Integral

import torch

from flash_versions.dispatch.request import check_integers
from flash_versions.flash_attn.call import Output, WindowSize, attend, bounds_of
from flash_versions.flash_attn.forward_only import forward_only
from flash_versions.flash_attn.kv_cache import append_to_cache, as_block_table, capacity_of, rotate
from flash_versions.flash_attn.packing import places_of


@forward_only("a step on a cache")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    batch_invariant: bool = False,
    version: str = "auto",
) -> Output:
    """One step of decoding: append to a cache in place, then attend to all of it.

    There is no gradient: inputs may require grad, and a backward raises a ValueError.

    The lengths stay on the device: no step waits for them, and a step can be a CUDA graph.

    Args:
        q: (batch, M, heads, head_dim).
        k_cache: (batch_cache, N, kv_heads, head_dim), with a contiguous last dimension; with a
            block_table (pages, page_size, kv_heads, head_dim).
        v_cache: like k_cache, with any head_dim.
        k: (batch, new, kv_heads, head_dim), the keys to append at slots cache_seqlens[b] ...; what
            does not fit is dropped. None: append nothing.
        v: like k, with v_cache's head_dim.
        rotary_cos: (positions, rotary_dim / 2), at least as many positions as the cache has slots:
            turn k by its slots, and q. With causal or a window, query i is at position
            cache_seqlens[b] + i; without, all queries are at cache_seqlens[b]. Dimensions from
            rotary_dim on are not turned. None: no rotary embedding.
        rotary_sin: like rotary_cos.
        cache_seqlens: (batch,) integers, or one for all: the tokens in the cache before this call,
            counted from slot 0. None: the cache is full.
        cache_batch_idx: (batch,) integers: sequence b is row cache_batch_idx[b] of the cache.
        cache_leftpad: (batch,) integers: the keys of sequence b begin at slot cache_leftpad[b].
        block_table: (batch, max_pages) integers: slot j of sequence b is row j % page_size of page
            block_table[b, j // page_size]; any page size. With cache_batch_idx, too, sequence b has
            row cache_batch_idx[b] of the table.
        rotary_interleaved: turn pairs of dimensions 2i and 2i + 1 (GPT-J); else i and i +
            rotary_dim / 2 (GPT-NeoX, Llama in Hugging Face's layout).
        num_splits: ranges into which the keys are split; 0 lets the version choose.
        return_softmax_lse: also return the LSE.
        cu_seqlens_q: (batch + 1,) integers: q is packed, (total_q, heads, head_dim), as in
            `flash_attn_varlen_func`.
        cu_seqlens_k_new: (batch + 1,) integers: k and v are packed, (total_new, kv_heads, dim):
            sequence b appends the rows cu_seqlens_k_new[b] .. cu_seqlens_k_new[b+1] - 1.
        max_seqlen_q: an integer or a tensor; not looked at.

    The last three are FlashAttention 3's. The others are those of `flash_attn_func`; N there is the
    length after appending.

    Returns:
        out (batch, M, heads, head_dim_v), packed (total_q, heads, head_dim_v). With
        return_softmax_lse, (out, softmax_lse): softmax_lse is fp32, natural log, (batch, heads, M),
        packed (heads, total_q).

    Raises:
        ValueError: an argument is malformed, or the version does not support what was asked for.
    """
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "s_aux": s_aux}
    for name, x in tensors.items():
        optional = name in ("k", "v", "s_aux")
        if not isinstance(x, torch.Tensor) and not (optional and x is None):
            raise ValueError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor.")
    check_integers("cu_seqlens_q", cu_seqlens_q, ("batch + 1",), q.device)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check_integers("cu_seqlens_k_new", cu_seqlens_k_new, (batch + 1,), q.device)
    if cu_seqlens_k_new is not None and k is None:
        raise ValueError("cu_seqlens_k_new was given without k and v, whose rows it cuts.")
    block_table = as_block_table(block_table, cache_batch_idx, batch, q.device)
    capacity = capacity_of(k_cache, block_table)
    new = 0 if k is None or cu_seqlens_k_new is not None else k.shape[1]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens is None; appending k needs the lengths before it.")
        cache_seqlens = capacity
    if not isinstance(cache_seqlens, torch.Tensor):
        if not isinstance(cache_seqlens, Integral):
            raise ValueError(f"cache_seqlens={cache_seqlens!r} must be an integer or a tensor.")
        if not 0 <= cache_seqlens <= capacity - new:
            raise ValueError(
                f"cache_seqlens={cache_seqlens} and {new} new tokens; the cache has {capacity} "
                f"slots."
            )
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    check_integers("cache_seqlens", cache_seqlens, (batch,), q.device)
    check_integers("cache_leftpad", cache_leftpad, (batch,), q.device)
    if k is not None and v is not None:
        append_to_cache(
            k_cache, v_cache, k, v, cache_seqlens, block_table=block_table, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
            cu_seqlens_k_new=cu_seqlens_k_new
        )  # fmt: skip
    elif k is not None or v is not None:
        raise ValueError("k and v go together; one of them is None.")
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin need k and v, the tokens at these positions.")
    if rotary_cos is not None and rotary_sin is not None:
        if cu_seqlens_q is None:
            before, place = cache_seqlens[:, None], torch.arange(q.shape[1], device=q.device)[None]
        else:
            sequence, place = (x[None] for x in places_of(cu_seqlens_q, q.shape[0]))
            before = torch.nn.functional.pad(cache_seqlens, (0, 1))[sequence]
        one_by_one = bool(causal) or bounds_of(window_size) != (None, None)
        rows = q if cu_seqlens_q is None else q[None]
        positions = before + place * one_by_one
        q = rotate(rows, rotary_cos, rotary_sin, positions, rotary_interleaved).view_as(q)
    result = attend(
        q, k_cache, v_cache, return_attn_probs=return_softmax_lse, window_size=window_size,
        softcap=softcap, softmax_scale=softmax_scale, attention_chunk=attention_chunk,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, s_aux=s_aux,
        batch_invariant=batch_invariant, cu_seqlens_q=cu_seqlens_q,
        kv_lengths=cache_seqlens + (new if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()),
        kv_starts=cache_leftpad, block_table=block_table, causal=causal, alibi_slopes=alibi_slopes,
        num_splits=num_splits or None, version=version
    )  # fmt: skip
    return result[:2] if return_softmax_lse else result
