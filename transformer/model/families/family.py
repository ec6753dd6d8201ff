"""The checkpoint families: which switches of `Config` each has, and how its config.json is read.

All families are the same parts with other switches, so a family is a row of FAMILIES: the switches
that all its models share, the keys that its files may have or leave out, and rules for what differs
from layer to layer. Defaults are those of Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import permutations

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
    SLIDING,
    Data,
    one_rope,
    rope_by_window,
    rope_or_none,
    windows_but_in_every,
    windows_everywhere,
    windows_everywhere_if_switched_on,
    windows_in_last_layers,
    windows_without_rope,
)
from transformer.model.rope import ORIGINAL, Rope, read_key

# Granite's numbers, which its files call the same; 1 where they are not given.
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")

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
COUNTS = ("num_experts", "num_local_experts")  # transformers 5 takes them for the same
EXPERTS = (*COUNTS, "num_experts_per_tok", "moe_intermediate_size")
NULL = ("sliding_window", "rms_norm_eps", *NUMBERS, *EXPERTS)  # null is not the default

# Keys of all families, and their values where they are not given.
KEYS: Data = {
    "sliding_window": 4096,
    "max_window_layers": 28,
    "rope_theta": Rope.theta,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Family:
    """How the config.json of one architecture is read.

    Attributes:
        keys: those that only some families honour, and values that are not those of KEYS.
        parts: fields of `Config` that all models of the family have alike.
        windowed: (content of config.json, layers) -> whether each layer has a window, for files
            without `layer_types`.
        layer_types: the types that layers may have.
        ropes: (content, main rotary embedding, whether each layer has a window) -> the rotary
            embedding of each layer.
        rope_types: the types of rotary embeddings, by other names; None: those of ROPE_TYPES.
        mxfp4: whether its weights may be stored in that format.
        layout: shapes of the parameters -> how its files store them.
    """

    keys: Data
    parts: Data = field(default_factory=dict)
    windowed: Callable[[Data, int], list[bool]] = windows_in_last_layers
    layer_types: tuple[str, ...] = (FULL, SLIDING)
    ropes: Callable[[Data, Rope, list[bool]], tuple[Rope | None, ...]] = one_rope
    rope_types: Mapping[str, str] | None = None
    mxfp4: bool = False
    layout: Callable[[Shapes], Layout] = one_by_one

    def filled(self, data: Data) -> Data:
        """The content of a config.json, with the defaults of what it leaves out."""
        given = {k: v for k, v in data.items() if v not in (None, {}) or k in NULL}
        for key, other in permutations(COUNTS):
            if other in given:
                given.setdefault(key, given[other])
        return {**KEYS, **self.keys, **given}


BIASES = {"attention_bias": False, "mlp_bias": False}
SWITCH = {"use_sliding_window": False}
GEMMA = {"norm_plus_one": True, "scaled_embeddings": True}
GEMMA_KEYS = {"tie_word_embeddings": True, "head_dim": 256, "attention_bias": False}
OLMO = {"norms_after": True, "qk_norm_of_all_heads": True}
GELU = "gelu_pytorch_tanh"

# Architecture of a config.json -> how it is read.
FAMILIES = {
    "LlamaForCausalLM": Family(BIASES, layer_types=(FULL,)),
    "MistralForCausalLM": Family({}, windowed=windows_everywhere),
    "MixtralForCausalLM": Family(
        {
            "sliding_window": None,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {"normed_routing": True},
        windowed=windows_everywhere,
        layout=experts_apart("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "Phi3ForCausalLM": Family(
        {
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            ORIGINAL: 4096,
        },
        windowed=windows_everywhere,
        rope_types={"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")},
        layout=joined_projections,
    ),
    "Qwen2ForCausalLM": Family(SWITCH, {"qkv_bias": True}),
    "Qwen3ForCausalLM": Family(
        {**SWITCH, "head_dim": 128, "attention_bias": False}, {"qk_norm": True}
    ),
    "Qwen3MoeForCausalLM": Family(
        {
            **SWITCH,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        {"qk_norm": True},
        windowed=windows_everywhere_if_switched_on,
        layout=experts_apart("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "SmolLM3ForCausalLM": Family(
        {
            **SWITCH,
            **BIASES,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        windowed=windows_without_rope,
        ropes=rope_or_none,
    ),
    "GraniteForCausalLM": Family(
        {**BIASES, **dict.fromkeys((*MULTIPLIERS, "attention_multiplier"), 1.0)},
        layer_types=(FULL,),
    ),
    "Olmo2ForCausalLM": Family(
        {"attention_bias": False, "rms_norm_eps": 1e-5}, OLMO, layer_types=(FULL,)
    ),
    "Olmo3ForCausalLM": Family(
        {"attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        OLMO,
        windowed=windows_but_in_every(4),
        ropes=rope_by_window,
    ),
    "GptOssForCausalLM": Family(
        {
            "attention_bias": True,
            "sliding_window": 128,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1.5e5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                ORIGINAL: 4096,
                "truncate": False,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
        },
        {"normed_routing": True, "mlp_bias": True, "sinks": True},
        windowed=windows_but_in_every(2),
        mxfp4=True,
        layout=experts_together,
    ),
    "GemmaForCausalLM": Family({**GEMMA_KEYS, "hidden_act": GELU}, GEMMA, layer_types=(FULL,)),
    "Gemma2ForCausalLM": Family(
        {
            **GEMMA_KEYS,
            "hidden_activation": GELU,
            **dict(zip((*SOFTCAPS, "query_pre_attn_scalar"), (50.0, 30.0, 256))),
        },
        {**GEMMA, "four_norms": True},
        windowed=windows_but_in_every(2),
    ),
    "Gemma3ForCausalLM": Family(
        {
            **GEMMA_KEYS,
            "hidden_activation": GELU,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            **dict.fromkeys(SOFTCAPS),
            "query_pre_attn_scalar": 256,
        },
        {**GEMMA, "four_norms": True, "qk_norm": True},
        windowed=windows_but_in_every("sliding_window_pattern"),
        ropes=rope_by_window,
    ),
}


def find_family(data: Data) -> Family:
    """The family of a config.json by its architecture.

    Raises:
        ValueError: it is none of FAMILIES, or reads more than text.
    """
    name = (read_key(data, "architectures", list, []) or ["none"])[0]
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    if "text_config" in data:
        raise ValueError(
            f"architecture {name} is not supported: with text_config it describes a model of more"
            " than text; use a text-only checkpoint, such as gemma-3-1b of Gemma 3"
        )
    raise ValueError(f"architecture {name} is not supported; known are {', '.join(FAMILIES)}")
