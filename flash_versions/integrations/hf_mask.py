"""What the queries of a transformers model see: lengths in the place of a mask.

transformers asks a mask function once per forward pass, and hands its answer to the attention
function of every layer. Ours answers with a `Ragged`, in one of three forms:

* plain: every row is one sequence, and causal and window say the rest.
* by ends: row b has the keys in slots kv_starts[b] .. kv_lengths[b] - 1. Nothing is copied, which
  decoding with a cache needs. Training takes it, too, on whatever side the padding is.
* packed: the real tokens of all rows, one after another. It takes what has no ends: pads between
  real tokens, and windows that look ahead. A compiled model trains on it, as it sees no pads.

In a compiled model, no value is read on the host in any form. What would have to be read is
asserted on the device instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from flash_versions.dispatch.request import Sides

HOLES = (
    "attention_mask has a pad between real tokens, which works neither with a sliding window nor "
    "in a compiled model with a cache; pad on one side."
)


@dataclass(frozen=True)
class Ragged:
    """What the queries of a batch see, in the place of a mask.

    Args:
        q_length: queries per row that it is made for.
        kv_length: key slots per row that it is made for.
        causal: no query sees a later key.
        window: as in `attention`.
        kv_starts: (batch,) int32 or None; as in `attention`.
        kv_lengths: (batch,) int32 or None; as in `attention`.
        cu_seqlens_q: int32 or None; packed sequences of queries, as in `attention`.
        cu_seqlens_k: the same for keys.
        queries: (batch * q_length,) or None; the packed queries are these of the flattened batch.
        keys: (batch * kv_length,) or None; the same for keys.
        one_per_row: bool scalar or None; what a compiled model has to assert: no row holds several
            sequences.
    """

    q_length: int
    kv_length: int
    causal: bool
    window: Sides | None = None
    kv_starts: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    one_per_row: torch.Tensor | None = None
    ndim: ClassVar[int] = 4  # for transformers: a mask that has already been prepared

    def contiguous(self) -> "Ragged":
        """For transformers, which calls it on the masks that it prepares for a compiled model."""
        return self

    def to(self, device: torch.device | str, **options: Any) -> "Ragged":
        """For accelerate, which moves masks to the device of a layer."""
        moved: dict[str, Any] = {
            name: x.to(device, **options)
            for name, x in vars(self).items()
            if isinstance(x, torch.Tensor)
        }
        return replace(self, **moved)


def what_is_seen(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Ragged | torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str | None = None,
    cache_position: torch.Tensor | None = None,
    **others: Any,
) -> Ragged:
    """transformers' mask function: what the queries see.

    Query i has position q_offset + i, the key in slot j kv_offset + j. Slots that a half-filled
    cache has not written yet lie after the last query.

    Args:
        batch_size: rows.
        kv_length: key slots per row.
        q_length: queries per row.
        q_offset: position of the first query; a tensor for a static cache.
        kv_offset: position of the first slot.
        mask_function: transformers' pattern: causal, bidirectional, or an intersection of one of
            them with a sliding window or packed sequences.
        attention_mask: (batch, positions), True for a real token; or an answer given before.
        local_size: the pattern's window.
        use_vmap: a model or user put a pattern of its own on top.
        config: the model's.
        device: where the model runs.
        cache_position: (q_length,) positions of the queries, in the place of q_length and q_offset
            before transformers 5.4.
        others: ignored, but for allow_is_bidirectional_skip, with which only bidirectional
            patterns come.

    Raises:
        ValueError: the kernels cannot express the pattern.
    """
    if isinstance(attention_mask, Ragged):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    assert q_length is not None and mask_function is not None
    causal = "allow_is_bidirectional_skip" not in others
    window = window_of(mask_function, use_vmap, causal, local_size, kv_length, kv_offset, config)
    seen = Ragged(q_length, kv_length, causal, window)
    if causal and q_length != kv_length:
        end = q_offset + (q_length - kv_offset)
        if isinstance(end, torch.Tensor) or end != kv_length:
            ends = torch.zeros(batch_size, dtype=torch.int32, device=device) + end
            seen = replace(seen, kv_lengths=ends.int())
    if attention_mask is not None:
        missing = max(0, kv_offset + kv_length - attention_mask.shape[1])
        real = pad(attention_mask.bool(), (0, missing))
        return with_padding(seen, real[:, kv_offset : kv_offset + kv_length])
    if causal and q_length == kv_length:
        return with_restarts(seen, mask_function, batch_size, device)
    return seen


def window_of(
    mask_function: Callable[..., Any],
    use_vmap: bool,
    causal: bool,
    local_size: int | None,
    kv_length: int,
    kv_offset: int,
    config: Any,
) -> Sides | None:
    """The window of transformers' pattern, None if it hides nothing; ValueError for a pattern that
    is more than a window. For the arguments see `what_is_seen`.
    """
    pattern = mask_function.__code__.co_qualname
    plain = pattern in ("causal_mask_function", "bidirectional_mask_function")
    if use_vmap or not (plain or pattern.startswith("and_masks.")):
        raise ValueError(
            f"the model asks for an attention pattern of its own ({pattern}), which is no window; "
            f"use attn_implementation='sdpa' or 'flex_attention'."
        )
    if plain or local_size is None:
        return None
    positions = kv_offset + kv_length
    if local_size == getattr(config, "attention_chunk_size", None) and positions > local_size:
        raise ValueError(
            f"the model attends in chunks of {local_size} and sees {positions} positions, which is "
            f"no window; use attn_implementation='sdpa'."
        )
    if kv_length <= local_size:
        return None
    return (local_size - 1, 0) if causal else (local_size, local_size)


def with_restarts(
    seen: Ragged, mask_function: Callable[..., Any], batch: int, device: torch.device | str | None
) -> Ragged:
    """The sequences of rows whose position_ids restart: within transformers' pattern, a query sees
    the key before its own unless a sequence starts there.
    """
    if mask_function.__code__.co_qualname == "causal_mask_function":
        return seen
    place = torch.arange(1, seen.q_length, device=device)
    row = torch.arange(batch, device=device)[:, None]
    goes_on = mask_function(row, place.new_zeros(()), place, place - 1).expand(batch, -1)
    if torch.compiler.is_compiling():
        return replace(seen, one_per_row=goes_on.all())
    first = pad(~goes_on, (1, 0), value=True).flatten().nonzero().flatten()
    if len(first) == batch:
        return seen
    bounds = pad(first, (0, 1), value=batch * seen.q_length).int()
    return replace(seen, cu_seqlens_q=bounds, cu_seqlens_k=bounds)


def with_padding(seen: Ragged, real: torch.Tensor) -> Ragged:
    """What is seen of the slots that hold real tokens: bool (batch, kv_length).

    Under a causal pattern, pads on the right need nothing: no real query sees them.
    """
    slots = torch.arange(seen.kv_length, device=real.device)
    if seen.kv_lengths is not None:
        real = real & (slots < seen.kv_lengths[:, None])
    runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    holes = (runs > 1).any()
    if torch.compiler.is_compiling():
        by_ends = seen.causal and seen.q_length != seen.kv_length and not torch.is_grad_enabled()
        if by_ends or seen.window is not None:
            torch._assert_async(~holes, HOLES)
    else:
        flags = torch.stack((holes, ~real[:, 0].all(), ~real.all()))
        has_holes, left, anywhere = flags.tolist()
        if has_holes and seen.window is not None:
            raise ValueError(HOLES)
        if not (has_holes or left if seen.causal else anywhere):
            return seen
        aligned = seen.causal or seen.window is None
        by_ends = aligned and not has_holes
    if not by_ends:
        return packed(seen, real)
    first = (real.cumsum(1) == 0).sum(1, dtype=torch.int32)
    if not seen.causal:
        return replace(seen, kv_starts=first if left else None, kv_lengths=first + real.sum(1))
    return replace(seen, kv_starts=first)


def packed(seen: Ragged, real: torch.Tensor) -> Ragged:
    """The real tokens of all rows as packed sequences; the shapes do not depend on how many.

    Two sequences more hold the pads: one of queries that have no key, one of keys that have no
    query. A query belongs to its key's slot, but for patterns without positions (cross-attention
    among them), where all queries count.
    """
    batch, q_length, kv_length = len(real), seen.q_length, seen.kv_length
    queries = None
    q_ends = torch.arange(1, batch + 1, device=real.device) * q_length
    if seen.causal or seen.window is not None:
        slots = torch.arange(-q_length, 0, device=real.device)
        end = kv_length if seen.kv_lengths is None else seen.kv_lengths[0]
        queries, q_ends = real_first(real[:, end + slots])
    keys, k_ends = real_first(real)
    end_q, end_k = (k_ends.new_full((1,), batch * n) for n in (q_length, kv_length))
    start = torch.zeros_like(end_q)
    return replace(
        seen,
        kv_lengths=None,
        cu_seqlens_q=torch.cat((start, q_ends, end_q, end_q)).int(),
        cu_seqlens_k=torch.cat((start, k_ends, k_ends[-1:], end_k)).int(),
        queries=queries,
        keys=keys,
    )


def real_first(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the real tokens of a flattened batch are, in order, and after them the pads; and where
    the real tokens of each row end in that order.
    """
    return (~real).flatten().int().argsort(stable=True), real.sum(1).cumsum(0)
