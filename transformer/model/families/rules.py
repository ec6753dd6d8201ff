"""What differs from layer to layer, by the rules of each family: windows and rotary embeddings.

A token of a layer of type "sliding_attention" sees the newest `sliding_window` tokens only, itself
included (Longformer, arXiv:2004.05150). Layers may have two rotary embeddings (Gemma 3: a faster
one where there is a window; OLMo 3: one that is not scaled there), or some of them none at all
(SmolLM3, after arXiv:2501.18795).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformer.model.rope import Rope, read_key

FULL, SLIDING = "full_attention", "sliding_attention"

Data = dict[str, Any]  # the content of a config.json, with the defaults of what it leaves out


def windows_in_last_layers(data: Data, num_layers: int) -> list[bool]:
    """Qwen: from layer `max_window_layers` on. Llama, whose files may have the keys as well: none
    may follow, see `layer_types`.
    """
    first = read_key(data, "max_window_layers", int, 0)
    return [is_switched_on(data) and layer >= first for layer in range(num_layers)]


def windows_without_rope(data: Data, num_layers: int) -> list[bool]:
    """SmolLM3: in the layers that have no rotary embedding."""
    return [is_switched_on(data) and not rotated for rotated in _rotated(data, num_layers)]


def windows_everywhere(data: Data, num_layers: int) -> list[bool]:
    """Mistral, Mixtral and Phi-3."""
    return [has_size(data)] * num_layers


def windows_everywhere_if_switched_on(data: Data, num_layers: int) -> list[bool]:
    """Qwen3 with experts."""
    return [is_switched_on(data)] * num_layers


def windows_but_in_every(period: int | str) -> Callable[[Data, int], list[bool]]:
    """Gemma 2, 3, OLMo 3 and gpt-oss: all layers but each second, fourth or sixth; perhaps the
    number is a key.
    """

    def windowed(data: Data, num_layers: int) -> list[bool]:
        every = read_key(data, period, int, 0) if isinstance(period, str) else period
        if every < 1:
            raise ValueError(f"{period} must be a positive integer, not {every}")
        return [(layer + 1) % every != 0 for layer in range(num_layers)]

    return windowed


def one_rope(data: Data, rope: Rope, windowed: list[bool]) -> tuple[Rope | None, ...]:
    """The same rotary embedding in every layer."""
    return (rope,) * len(windowed)


def rope_or_none(data: Data, rope: Rope, windowed: list[bool]) -> tuple[Rope | None, ...]:
    """SmolLM3: none in some layers."""
    return tuple(rope if rotated else None for rotated in _rotated(data, len(windowed)))


def rope_by_window(data: Data, rope: Rope, windowed: list[bool]) -> tuple[Rope | None, ...]:
    """One of its own for layers with a window: faster (Gemma 3, under transformers 4's key or 5's),
    or without the scaling for longer texts, which they do not need (OLMo 3).
    """
    ropes = read_key(data, "rope_parameters", dict, {})
    local = Rope.from_hf(
        {
            "max_position_embeddings": data["max_position_embeddings"],
            "rope_theta": data.get("rope_local_base_freq", data["rope_theta"]),
            "rope_parameters": read_key(ropes, SLIDING, dict, {}),
        }
    )
    return tuple(local if window else rope for window in windowed)


def _rotated(data: Data, num_layers: int) -> list[bool]:
    """Whether each layer of SmolLM3 has a rotary embedding: 1 in `no_rope_layers` says it has."""
    given = read_key(data, "no_rope_layers", list, None)
    if given is None:
        return windows_but_in_every("no_rope_layer_interval")(data, num_layers)
    if len(given) < num_layers or not all(value in (0, 1) for value in given):
        raise ValueError(
            f"no_rope_layers must be 0 or 1 for each of {num_layers} layers, not {given!r:.60}"
        )
    return [value == 1 for value in given[:num_layers]]


def is_switched_on(data: Data) -> bool:
    """Whether config.json switches windows on."""
    return read_key(data, "use_sliding_window", bool, False) and has_size(data)


def has_size(data: Data) -> bool:
    """Whether there is a window's size; null means no window."""
    return read_key(data, "sliding_window", int, None) is not None
