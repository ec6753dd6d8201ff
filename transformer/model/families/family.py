"""The checkpoint families: which switches of `Config` each has, and how its config.json is read.

All families are the same parts with other switches, so a family is a row of FAMILIES: the switches
that all its models share, the defaults of keys that its files may leave out, and rules for what
differs from layer to layer. Defaults are those of Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from transformer.model.families.layout import (
    Layout,
    Shapes,
    experts_apart,
    experts_together,
    joined_projections,
    one_by_one,
)
from transformer.model.families.rules import (
    FULL,
    OLMO_THETA,
    SLIDING,
    Data,
    one_rope,
    rope_by_window,
    rope_or_none,
    unscaled_by_window,
    windows_but_in_every,
    windows_everywhere,
    windows_everywhere_if_switched_on,
    windows_in_last_layers,
    windows_without_rope,
)
from transformer.model.rope import Rope, read_key

# Granite's numbers, which its files call the same; 1 where they are not given.
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True)
class Family:
    """How the config.json of one architecture is read.

    Attributes:
        model_type: its name in config.json.
        parts: fields of `Config` that all models of the family have alike.
        windowed: (content of config.json, layers) -> whether each layer has a window, for files
            without `layer_types`.
        layer_types: the types that layers may have.
        window: `sliding_window` where it is not given; None: no window.
        window_switch: whether windows also need the key `use_sliding_window`.
        ropes: (content, main rotary embedding, whether each layer has a window) -> the rotary
            embedding of each layer.
        theta: `rope_theta` where it is not given.
        tied: `tie_word_embeddings` where it is not given.
        head_dim: where it is not given; None: hidden_size by heads.
        norm_eps: `rms_norm_eps` where it is not given.
        attention_bias: whether the key of that name is honoured.
        biased: its value where it is not given.
        mlp_bias: the same.
        activation_key: which key names the activation.
        activation: its value where it is not given.
        numbers: its keys of NUMBERS, and their values where they are not given.
        rope_types: the types of rotary embeddings, by other names; None: those of ROPE_TYPES.
        scaling: parameters of the rotary embedding where they are not given.
        original: `original_max_position_embeddings` where it is not given beside the parameters of
            the rotary embedding; None: it is one of them.
        partly_rotated: whether the key `partial_rotary_factor` is honoured.
        experts: the keys of the numbers of a mixture of experts, by field of `Config`, and their
            values where they are not given; None: it is none.
        mxfp4: whether its weights may be stored in that format.
        layout: shapes of the parameters -> how its files store them.
    """

    model_type: str
    parts: Data = field(default_factory=dict)
    windowed: Callable[[Data, int], list[bool]] = windows_in_last_layers
    layer_types: tuple[str, ...] = (FULL, SLIDING)
    window: int | None = 4096
    window_switch: bool = False
    ropes: Callable[[Data, Rope, list[bool]], tuple[Rope | None, ...]] = one_rope
    theta: float = Rope.theta
    tied: bool = False
    head_dim: int | None = None
    norm_eps: float = 1e-6
    attention_bias: bool = True
    biased: bool = False
    mlp_bias: bool = False
    activation_key: str = "hidden_act"
    activation: str = "silu"
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    rope_types: Mapping[str, str] | None = None
    scaling: Data | None = None
    original: int | None = None
    partly_rotated: bool = False
    experts: Mapping[str, tuple[str, int | None]] | None = None
    mxfp4: bool = False
    layout: Callable[[Shapes], Layout] = one_by_one


# Key of a config.json that is a positive number -> field of `Config`.
NUMBERS = {
    "attn_logit_softcapping": "scores_softcap",
    "final_logit_softcapping": "logits_softcap",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "swiglu_limit": "swiglu_limit",
    "attention_multiplier": "attention_multiplier",
    **{name: name for name in MULTIPLIERS},
}
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # may be null

GEMMA = {"norm_plus_one": True, "four_norms": True, "scaled_embeddings": True}

# Architecture of a config.json -> how it is read.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", layer_types=(FULL,), mlp_bias=True),
    "MistralForCausalLM": Family("mistral", windowed=windows_everywhere, attention_bias=False),
    "MixtralForCausalLM": Family(
        "mixtral",
        {"normed_routing": True},
        windowed=windows_everywhere,
        window=None,
        theta=1e6,
        norm_eps=1e-5,
        attention_bias=False,
        experts={
            "num_experts": ("num_local_experts", 8),
            "experts_per_token": ("num_experts_per_tok", 2),
            "expert_size": ("intermediate_size", None),
        },
        layout=experts_apart("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        windowed=windows_everywhere,
        window=None,
        norm_eps=1e-5,
        attention_bias=False,
        rope_types={"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")},
        original=4096,
        partly_rotated=True,
        layout=joined_projections,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", {"qkv_bias": True}, window_switch=True, attention_bias=False
    ),
    "Qwen3ForCausalLM": Family("qwen3", {"qk_norm": True}, window_switch=True, head_dim=128),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {"qk_norm": True},
        windowed=windows_everywhere_if_switched_on,
        window_switch=True,
        experts={
            "num_experts": ("num_experts", 128),
            "experts_per_token": ("num_experts_per_tok", 8),
            "expert_size": ("moe_intermediate_size", 768),
        },
        layout=experts_apart("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        windowed=windows_without_rope,
        window_switch=True,
        ropes=rope_or_none,
        theta=2e6,
        tied=True,
        mlp_bias=True,
    ),
    "GraniteForCausalLM": Family(
        "granite",
        layer_types=(FULL,),
        mlp_bias=True,
        numbers=dict.fromkeys((*MULTIPLIERS, "attention_multiplier"), 1.0),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        {"norms_after": True, "qk_norm_of_all_heads": True},
        layer_types=(FULL,),
        norm_eps=1e-5,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        {"norms_after": True, "qk_norm_of_all_heads": True},
        windowed=windows_but_in_every(4),
        ropes=unscaled_by_window,
        theta=OLMO_THETA,
        norm_eps=1e-5,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        {"normed_routing": True, "mlp_bias": True, "sinks": True},
        windowed=windows_but_in_every(2),
        window=128,
        theta=1.5e5,
        scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        head_dim=64,
        norm_eps=1e-5,
        biased=True,
        experts={
            "num_experts": ("num_local_experts", 128),
            "experts_per_token": ("num_experts_per_tok", 4),
            "expert_size": ("intermediate_size", None),
        },
        numbers={"swiglu_limit": 7.0},
        mxfp4=True,
        layout=experts_together,
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
        windowed=windows_but_in_every(2),
        tied=True,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        numbers=dict(zip((*SOFTCAPS, "query_pre_attn_scalar"), (50.0, 30.0, 256))),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {**GEMMA, "qk_norm": True},
        windowed=windows_but_in_every(6, "sliding_window_pattern"),
        ropes=rope_by_window,
        theta=1e6,
        tied=True,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        numbers={**dict.fromkeys(SOFTCAPS), "query_pre_attn_scalar": 256},
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
