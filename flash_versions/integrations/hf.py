"""The versions as attention implementations of Hugging Face transformers.

    from flash_versions.integrations import hf
    hf.register()                             # ["fv_auto", "fv_fa1", "fv_fa2", ...]
    model.set_attn_implementation("fv_fa2")   # or attn_implementation= at construction

Training and generation, padding on either side, dynamic and static caches, packed sequences (by
position_ids without a cache, or by cu_seq_lens_q), sliding windows, softcap, sinks, dropout and
torch.compile(fullgraph=True) work. What cannot be honoured is refused. Attention weights are never
formed.
"""

from functools import partial
from typing import Any

import torch

from flash_versions.dispatch.extras import missing
from flash_versions.integrations import unit_stride
from flash_versions.integrations.hf_mask import Ragged, what_is_seen
from flash_versions.versions.api import BASELINES, VERSIONS, attention

# What models pass along that leaves attention's result alone.
WITHOUT_EFFECT = {
    "cache_position", "ignore_index", "layer_idx", "logits_to_keep", "max_length_k",
    "max_length_q", "mm_token_type_ids", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "past_key_values", "position_ids",
    "return_dict", "seq_idx", "shift_labels", "token_type_ids", "use_cache",
}  # fmt: skip
PACKED = (
    "position_ids restart within a row, which a compiled model does not see; pass cu_seq_lens_q "
    "and cu_seq_lens_k too, or run it uncompiled."
)


def register(prefix: str = "fv_") -> list[str]:
    """Make every version known to transformers.

    Args:
        prefix: what goes before a version's name, without "flash": transformers takes names that
            contain it for kernels of its hub.

    Returns:
        The registered names, for `attn_implementation` and `set_attn_implementation`: one for
        "auto" and each version and baseline.

    Raises:
        ImportError: transformers is not installed, or older than 5.0.
        ValueError: the prefix contains "flash".
    """
    if "flash" in prefix:
        raise ValueError(
            f"prefix={prefix!r} must not contain 'flash': transformers looks for such names on its "
            f"hub."
        )
    if sentence := missing("hf", "transformers"):
        raise ImportError(sentence)
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"transformers is {transformers.__version__}; 5.0 or later works.")
    names = []
    for version in ("auto", *VERSIONS, *BASELINES):
        names.append(prefix + version)
        transformers.AttentionInterface.register(names[-1], partial(attend, version=version))
        transformers.AttentionMaskInterface.register(names[-1], what_is_seen)
    return names


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Ragged | torch.Tensor | None,
    *,
    version: str = "auto",
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function.

    Args:
        module: the layer; its `is_causal` counts where nothing else says it.
        query: (batch, heads, M, head_dim), usually a transposed view.
        key: (batch, kv_heads, N, head_dim).
        value: (batch, kv_heads, N, head_dim_v).
        attention_mask: the answer of `what_is_seen`.
        version: as in `attention`.
        dropout: probability, as `attention`'s dropout_p.
        scaling: as `attention`'s scale.
        sliding_window: W keys are seen, the query's own included; not causal: W - 1 on each side.
        softcap: as in `attention`.
        s_aux: (heads,), the sinks of gpt-oss.
        is_causal: overrides the module's; with a mask, must agree with it.
        cu_seq_lens_q: the batch, flattened, is packed sequences of queries.
        cu_seq_lens_k: the same for keys; None: as the queries'.
        deterministic: True as in `attention`; False, transformers' default, is None there.
        batch_invariant: as in `attention`; a model hands it on from its own call.
        others: what models pass along; refused unless it is known to be without effect.

    Returns:
        (o, None): o is (batch, M, heads, head_dim_v); there are no attention weights.

    Raises:
        ValueError: something was asked for that cannot be honoured.
    """
    refuse_what_is_ignored(others)
    seen = attention_mask
    if seen is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
        seen = Ragged(query.shape[2], key.shape[2], causal=is_causal, window=window)
    if not isinstance(seen, Ragged):
        raise ValueError(
            f"attention_mask has shape {tuple(seen.shape)}; these kernels take no mask but 2-D "
            f"padding given to the model; use attn_implementation='sdpa'."
        )
    batch, heads, q_length, _ = query.shape
    if (q_length, key.shape[2]) != (seen.q_length, seen.kv_length):
        raise ValueError(
            f"query has length {q_length} and key {key.shape[2]}, but the mask was made for "
            f"{seen.q_length} and {seen.kv_length}; use attn_implementation='sdpa'."
        )
    if is_causal not in (None, seen.causal) and q_length > 1:
        raise ValueError(
            f"is_causal={is_causal} was passed to attention, which contradicts its mask; set the "
            f"config's is_causal, or use attn_implementation='sdpa'."
        )
    if cu_seq_lens_q is not None:
        if seen.kv_starts is not None or seen.kv_lengths is not None or seen.keys is not None:
            raise ValueError(
                "cu_seq_lens_q was given with padding or a half-filled cache; give one of them."
            )
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        seen = Ragged(
            q_length,
            seen.kv_length,
            seen.causal,
            seen.window,
            cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_k,
        )
    if seen.one_per_row is not None:
        torch._assert_async(seen.one_per_row, PACKED)
    q, k, v = (unit_stride(x.transpose(1, 2)) for x in (query, key, value))
    options: dict[str, Any] = {
        "causal": seen.causal,
        "window": seen.window,
        "scale": scaling,
        "softcap": softcap or None,
        "sink": s_aux,
        "dropout_p": dropout,
        "deterministic": deterministic or None,
        "batch_invariant": bool(batch_invariant),
        "version": version,
    }
    if seen.cu_seqlens_q is None:
        o = attention(q, k, v, kv_starts=seen.kv_starts, kv_lengths=seen.kv_lengths, **options)
        return o.contiguous(), None
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if seen.keys is not None:
        k, v = k.index_select(0, seen.keys), v.index_select(0, seen.keys)
    if seen.queries is not None:
        q = q.index_select(0, seen.queries)
    o = attention(
        q, k, v, cu_seqlens_q=seen.cu_seqlens_q, cu_seqlens_k=seen.cu_seqlens_k, **options
    )
    if seen.queries is not None:
        o = torch.empty_like(o).index_copy(0, seen.queries, o)
    return o.reshape(batch, q_length, heads, -1).contiguous(), None


def refuse_what_is_ignored(others: dict[str, Any]) -> None:
    """ValueError for a keyword argument that may ask for another result."""
    if others.pop("output_attentions", None):
        raise ValueError(
            "output_attentions=True asks for the attention weights, which are never formed; use "
            "attn_implementation='eager'."
        )
    for name, value in others.items():
        if value is not None and name not in WITHOUT_EFFECT:
            raise ValueError(
                f"{name} was passed to attention and is not supported; use "
                f"attn_implementation='sdpa' or 'eager'."
            )
