"""The checkpoint families: what the config.json of each architecture says beyond sizes.

All families are the same parts with other switches of `Config`, so a family is a row of FAMILIES:
the switches that all its models share, the defaults of keys that its files may leave out, and rules
for what differs from layer to layer (windows, rotary embeddings). Defaults and rules are those of
Hugging Face's transformers; a key that would be ignored there and matters is refused here.

Layers differ in two ways. A token of a layer of type "sliding_attention" sees the newest
`sliding_window` tokens only, itself included (Longformer, arXiv:2004.05150). And layers may have
two rotary embeddings (Gemma 3: a faster one where there is a window), or some of them none at all
(SmolLM3, after arXiv:2501.18795).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformer.model.rope import Rope, is_positive, read_key

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys that transformers fills in where a config.json does not have them.
SLIDING_WINDOW = 4096
MAX_WINDOW_LAYERS = 28
SLIDING_WINDOW_PATTERN = 6
NO_ROPE_LAYER_INTERVAL = 4
LOCAL_THETA = 1e4

# Name of an activation in a config.json -> in `Config`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Granite's numbers, which its files call the same; 1 where they are not given.
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")

Data = dict[str, Any]


def windows_in_last_layers(data: Data, num_layers: int) -> list[bool]:
    """Qwen: from layer `max_window_layers` on. Llama, whose files may have the keys as well: none
    may follow, see `layer_types`.
    """
    first = read_key(data, "max_window_layers", int, MAX_WINDOW_LAYERS)
    return [_is_switched_on(data) and layer >= first for layer in range(num_layers)]


def windows_without_rope(data: Data, num_layers: int) -> list[bool]:
    """SmolLM3: in the layers that have no rotary embedding."""
    return [_is_switched_on(data) and not rotated for rotated in _rotated(data, num_layers)]


def windows_everywhere(data: Data, num_layers: int) -> list[bool]:
    """Mistral."""
    return [_has_size(data)] * num_layers


def windows_in_every_other(data: Data, num_layers: int) -> list[bool]:
    """Gemma 2: the first, the third and so on."""
    return [layer % 2 == 0 for layer in range(num_layers)]


def windows_but_in_every_sixth(data: Data, num_layers: int) -> list[bool]:
    """Gemma 3, whose number six is a key."""
    period = _period(data, "sliding_window_pattern", SLIDING_WINDOW_PATTERN)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def one_rope(data: Data, rope: Rope, windowed: list[bool]) -> tuple[Rope | None, ...]:
    """The same rotary embedding in every layer."""
    return (rope,) * len(windowed)


def rope_or_none(data: Data, rope: Rope, windowed: list[bool]) -> tuple[Rope | None, ...]:
    """SmolLM3: none in some layers."""
    return tuple(rope if rotated else None for rotated in _rotated(data, len(windowed)))


def rope_by_window(data: Data, rope: Rope, windowed: list[bool]) -> tuple[Rope | None, ...]:
    """Gemma 3: one of its own for layers with a window, under transformers 4's key or 5's."""
    ropes = read_key(data, "rope_parameters", dict, {})
    theta = data.get("rope_local_base_freq")
    local = Rope.from_hf(
        {
            "max_position_embeddings": data["max_position_embeddings"],
            "rope_theta": LOCAL_THETA if theta is None else theta,
            "rope_parameters": read_key(ropes, SLIDING, dict, {}),
        }
    )
    return tuple(local if window else rope for window in windowed)


@dataclass(frozen=True)
class Family:
    """How the config.json of one architecture is read.

    Attributes:
        model_type: its name in config.json.
        parts: fields of `Config` that all models of the family have alike.
        windowed: (content of config.json, layers) -> whether each layer has a window, for files
            without `layer_types`.
        layer_types: the types that layers may have.
        window_switch: whether windows also need the key `use_sliding_window`.
        ropes: (content, main rotary embedding, whether each layer has a window) -> the rotary
            embedding of each layer.
        theta: `rope_theta` where it is not given.
        tied: `tie_word_embeddings` where it is not given.
        head_dim: where it is not given; None: hidden_size by heads.
        norm_eps: `rms_norm_eps` where it is not given.
        attention_bias: whether the key of that name is honoured.
        mlp_bias: the same.
        activation_key: which key names the activation.
        activation: its value where it is not given.
        softcaps: `attn_logit_softcapping` and `final_logit_softcapping` where they are not given;
            without the first, the family has none; None: it has no such keys.
        query_pre_attn_scalar: where it is not given; None: the family has no such key.
        multipliers: whether it has MULTIPLIERS and `attention_multiplier`.
    """

    model_type: str
    parts: Data = field(default_factory=dict)
    windowed: Callable[[Data, int], list[bool]] = windows_in_last_layers
    layer_types: tuple[str, ...] = (FULL, SLIDING)
    window_switch: bool = False
    ropes: Callable[[Data, Rope, list[bool]], tuple[Rope | None, ...]] = one_rope
    theta: float = Rope.theta
    tied: bool = False
    head_dim: int | None = None
    norm_eps: float = 1e-6
    attention_bias: bool = True
    mlp_bias: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    softcaps: tuple[float | None, float | None] | None = None
    query_pre_attn_scalar: float | None = None
    multipliers: bool = False


GEMMA = {"norm_plus_one": True, "four_norms": True, "scaled_embeddings": True}

# Architecture of a config.json -> how it is read.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", layer_types=(FULL,), mlp_bias=True),
    "MistralForCausalLM": Family("mistral", windowed=windows_everywhere, attention_bias=False),
    "Qwen2ForCausalLM": Family(
        "qwen2", {"qkv_bias": True}, window_switch=True, attention_bias=False
    ),
    "Qwen3ForCausalLM": Family("qwen3", {"qk_norm": True}, window_switch=True, head_dim=128),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        windowed=windows_without_rope,
        window_switch=True,
        ropes=rope_or_none,
        theta=2e6,
        tied=True,
        mlp_bias=True,
    ),
    "GraniteForCausalLM": Family("granite", layer_types=(FULL,), mlp_bias=True, multipliers=True),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        {"norms_after": True, "qk_norm_of_all_heads": True},
        layer_types=(FULL,),
        norm_eps=1e-5,
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        {"norm_plus_one": True, "scaled_embeddings": True},
        layer_types=(FULL,),
        tied=True,
        head_dim=256,
        activation="gelu_pytorch_tanh",
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        GEMMA,
        windowed=windows_in_every_other,
        tied=True,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        softcaps=(50.0, 30.0),
        query_pre_attn_scalar=256,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {**GEMMA, "qk_norm": True},
        windowed=windows_but_in_every_sixth,
        ropes=rope_by_window,
        theta=1e6,
        tied=True,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        softcaps=(None, None),
        query_pre_attn_scalar=256,
    ),
}


def find_family(data: Data) -> tuple[str, Family]:
    """The architecture of a config.json and its family.

    Raises:
        ValueError: it is none of FAMILIES, or reads more than text.
    """
    name = (read_key(data, "architectures", list, []) or ["none"])[0]
    if isinstance(name, str) and name in FAMILIES:
        return name, FAMILIES[name]
    if "text_config" in data:
        raise ValueError(
            f"architecture {name} is not supported: with text_config it describes a model of more"
            " than text; use a text-only checkpoint, such as gemma-3-1b of Gemma 3"
        )
    raise ValueError(f"architecture {name} is not supported; known are {', '.join(FAMILIES)}")


def read_parts(data: Data, num_layers: int) -> Data:
    """The fields of `Config` by which families differ, from the content of a config.json.

    Raises:
        ValueError: a key that asks for what the model does not do.
    """
    architecture, family = find_family(data)
    _refuse_unsupported(data)
    windows = layer_windows(data, architecture, family, num_layers)
    windowed = [window is not None for window in windows] or [False] * num_layers
    rope = _main_rope(data, family)
    ropes = family.ropes(data, rope, windowed)
    attention_bias = family.attention_bias and read_key(data, "attention_bias", bool, False)
    activation = read_key(data, family.activation_key, str, family.activation)
    if architecture == "GemmaForCausalLM" and activation == "gelu":
        activation = family.activation  # what Google's first files mean by it
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation {activation!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    parts: Data = {
        "layer_windows": windows,
        "rope": rope,
        "layer_ropes": () if set(ropes) == {rope} else ropes,
        "tied_embeddings": read_key(data, "tie_word_embeddings", bool, family.tied),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": family.mlp_bias and read_key(data, "mlp_bias", bool, False),
        "activation": ACTIVATIONS[activation],
    }
    if family.softcaps is not None:
        scores, logits = family.softcaps
        if scores is None and data.get("attn_logit_softcapping") is not None:
            # Transformers reads it for Gemma 3 and leaves the scores as they are.
            raise ValueError(f"attn_logit_softcapping must be null in {architecture}")
        parts["scores_softcap"] = _read_number(data, "attn_logit_softcapping", scores, True)
        parts["logits_softcap"] = _read_number(data, "final_logit_softcapping", logits, True)
    if family.query_pre_attn_scalar is not None:
        parts["query_pre_attn_scalar"] = _read_number(
            data, "query_pre_attn_scalar", family.query_pre_attn_scalar
        )
    if family.multipliers:
        for key in (*MULTIPLIERS, "attention_multiplier"):
            parts[key] = _read_number(data, key, 1.0)
    return {**parts, **family.parts}


def write_parts(config: Any, family: Family) -> Data:
    """The keys of config.json for the fields that `read_parts` gives, as a family writes them."""
    name = {ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs != "swish"}
    data = {
        **config.rope.to_hf(),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        family.activation_key: name[config.activation],
    }
    windows = config.layer_windows or (None,) * config.num_layers
    ropes = config.layer_ropes or (config.rope,) * config.num_layers
    if SLIDING in family.layer_types and (any(windows) or not family.window_switch):
        data["sliding_window"] = max((window for window in windows if window), default=None)
        if family.windowed is not windows_everywhere:  # transformers' Mistral warns of the key
            data["layer_types"] = [SLIDING if window else FULL for window in windows]
    if any(windows) and family.window_switch:
        data["use_sliding_window"] = True
        data["max_window_layers"] = next(i for i, window in enumerate(windows) if window)
    if family.ropes is rope_or_none:
        data["pad_token_id"] = None  # its default is a token of a large vocabulary
        data["no_rope_layers"] = [int(rope is not None) for rope in ropes]
    if family.ropes is rope_by_window:
        local = next((rope for rope, window in zip(ropes, windows) if rope and window), None)
        data["rope_local_base_freq"] = LOCAL_THETA if local is None else local.theta
    if family.softcaps is not None:
        data["attn_logit_softcapping"] = config.scores_softcap
        data["final_logit_softcapping"] = config.logits_softcap
    if family.query_pre_attn_scalar is not None:
        data["query_pre_attn_scalar"] = config.query_pre_attn_scalar
    if family.multipliers:
        for key in (*MULTIPLIERS, "attention_multiplier"):
            data[key] = getattr(config, key)
    return data


def layer_windows(
    data: Data, architecture: str, family: Family, num_layers: int
) -> tuple[int | None, ...]:
    """How many tokens each layer's attention sees, None for all; () if no layer has a window.

    Raises:
        ValueError: layers of a type that the family does not have, or windows without a size.
    """
    ruled = [SLIDING if window else FULL for window in family.windowed(data, num_layers)]
    types = read_key(data, "layer_types", list, []) or ruled
    if others := sorted({str(kind) for kind in types} - set(family.layer_types)):
        raise ValueError(
            f"layers of type {', '.join(others)} are not supported, only"
            f" {' and '.join(family.layer_types)} in {architecture}"
        )
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers of {num_layers}")
    if family.windowed is windows_everywhere and types != ruled:
        raise ValueError(f"layer_types of {architecture} must be {ruled[0]} in every layer")
    if SLIDING not in types:
        return ()
    if family.window_switch and not _is_switched_on(data):
        raise ValueError("layer_types names sliding_attention, but use_sliding_window is off")
    size = data.get("sliding_window", SLIDING_WINDOW)
    if type(size) is not int or not 0 < size < 2**30:
        raise ValueError(
            f"sliding_window must be a positive integer below 2^30 for layers of type"
            f" sliding_attention, not {size!r:.40}"
        )
    return tuple(size if kind == SLIDING else None for kind in types)


def _refuse_unsupported(data: Data) -> None:
    """Refuse keys that ask for what this model does not do."""
    if data.get("quantization_config") is not None:
        raise ValueError("quantized weights are not supported; use the unquantized checkpoint")
    if read_key(data, "use_bidirectional_attention", bool, False):
        raise ValueError("use_bidirectional_attention is not supported, only causal attention")


def _main_rope(data: Data, family: Family) -> Rope:
    """The rotary embedding of layers without one of their own."""
    if data.get("rope_theta") is None:
        data = {**data, "rope_theta": family.theta}
    ropes = read_key(data, "rope_parameters", dict, {})
    if family.ropes is rope_by_window and ropes:
        if others := sorted(str(name) for name in ropes.keys() - {FULL, SLIDING}):
            raise ValueError(
                f"rope_parameters {others[0]!r} is not supported, only those of full_attention and"
                " of sliding_attention"
            )
        scaling = read_key(data, "rope_scaling", dict, {})
        whole = {**read_key(ropes, FULL, dict, {}), **scaling}
        data = {**data, "rope_parameters": whole, "rope_scaling": None}
    return Rope.from_hf(data)


def _rotated(data: Data, num_layers: int) -> list[bool]:
    """Whether each layer of SmolLM3 has a rotary embedding: 1 in `no_rope_layers` says it has."""
    given = read_key(data, "no_rope_layers", list, None)
    if given is None:
        period = _period(data, "no_rope_layer_interval", NO_ROPE_LAYER_INTERVAL)
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    if len(given) < num_layers or not all(value in (0, 1) for value in given):
        raise ValueError(
            f"no_rope_layers must be 0 or 1 for each of {num_layers} layers, not {given!r:.60}"
        )
    return [value == 1 for value in given[:num_layers]]


def _is_switched_on(data: Data) -> bool:
    return read_key(data, "use_sliding_window", bool, False) and _has_size(data)


def _has_size(data: Data) -> bool:
    """Whether there is a window's size; one that is missing has a default, null means no window."""
    return "sliding_window" not in data or read_key(data, "sliding_window", int, None) is not None


def _period(data: Data, key: str, default: int) -> int:
    period = read_key(data, key, int, default)
    if period < 1:
        raise ValueError(f"{key} must be a positive integer, not {period}")
    return period


def _read_number(
    data: Data, key: str, default: float | None, optional: bool = False
) -> float | None:
    """A positive number; None where it is null and may be."""
    value = data.get(key, default)
    if value is None and optional:
        return None
    if not is_positive(value):
        raise ValueError(f"{key} must be a positive number, not {value!r:.40}")
    return value
