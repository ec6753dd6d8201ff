"""The shape of a model, and Hugging Face's config.json: reading, refusing, writing."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from transformer.model.families.family import MULTIPLIERS, NUMBERS, find_family
from transformer.model.families.keys import ACTIVATIONS, read_parts
from transformer.model.rope import BY_LENGTH, Rope, is_positive

# Field of Config -> the key of config.json that must give it.
HF_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}

OPTIONAL_NUMBERS = tuple(name for name in NUMBERS.values() if name not in MULTIPLIERS)

EXPERT_SIZES = ("experts_per_token", "expert_size")

# Field of Config -> the largest size that is no mistake; positions are counted in int32.
LARGEST = {"num_layers": 1024, "max_positions": 2**31 - 1}
LARGEST_ELSEWHERE = 2**20


@dataclass(frozen=True)
class Config:
    """The shape of a model: its sizes, and the switches by which families differ.

    Attributes:
        rope: the rotary embedding of layers without one of their own.
        tied_embeddings: whether the head is the embedding.
        qk_norm: norm the head_dim numbers of each query and key head, before they turn.
        activation: what the gate goes through: "silu" or "gelu_tanh".
        norm_plus_one: see `model.RMSNorm`.
        four_norms: also norm what attention and feed-forward give, before it is added.
        norms_after: norm that only, and not what they read (OLMo 2).
        qk_norm_of_all_heads: norm queries and keys as wholes, before they are cut into heads.
        sinks: each head has a logit in the denominator of its softmax that belongs to no token.
        swiglu_limit: bounds of gate and up in gpt-oss's kind of silu; None: silu itself.
        scaled_embeddings: multiply them by the root of hidden_size.
        embedding_multiplier: multiply them by this (Granite).
        residual_multiplier: multiply what a part adds.
        logits_scaling: divide the logits by this.
        attention_multiplier: the scale of the scores; None: see query_pre_attn_scalar.
        query_pre_attn_scalar: scores are divided by its root; None: by that of head_dim.
        scores_softcap: scores s become softcap * tanh(s / softcap); None: they stay.
        logits_softcap: the same for the logits.
        layer_windows: per layer, how many tokens each one sees, itself included; None: all before.
            () is None everywhere.
        num_experts: feed-forwards of a layer, of which each token takes some; 0: one for all.
        experts_per_token: how many it takes.
        expert_size: the intermediate size of each.
        normed_routing: their weights add up to 1; else they are parts of a softmax over all.
        dense_layers: layers with one feed-forward all the same.
        layer_ropes: per layer, the rotary embedding; None: none. () is `rope` everywhere.

    Raises:
        ValueError: sizes that are no positive integers, head counts that do not divide, odd heads,
            numbers that are not positive, not as many windows or rotary embeddings as layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    norm_plus_one: bool = False
    four_norms: bool = False
    norms_after: bool = False
    qk_norm_of_all_heads: bool = False
    sinks: bool = False
    swiglu_limit: float | None = None
    scaled_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attention_multiplier: float | None = None
    query_pre_attn_scalar: float | None = None
    scores_softcap: float | None = None
    logits_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normed_routing: bool = False
    dense_layers: tuple[int, ...] = ()
    layer_windows: tuple[int | None, ...] = ()
    layer_ropes: tuple[Rope | None, ...] = ()

    def __post_init__(self):
        for name in (*HF_KEYS, "num_kv_heads", "head_dim"):
            _check_size(name, getattr(self, name), name)
        for name in ("num_experts", *EXPERT_SIZES) if self.num_experts else ():
            _check_size(name, getattr(self, name), name)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"a token cannot take {self.experts_per_token} of {self.num_experts} experts"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"query heads ({self.num_heads}) must be a multiple of key heads"
                f" ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, not {self.head_dim}")
        for rope in {self.rope, *self.layer_ropes} - {None}:
            rope.turned(self.head_dim)
            rope.for_length(self.max_positions, self.head_dim)
        for name in ("norm_eps", *OPTIONAL_NUMBERS, *MULTIPLIERS):
            optional = name in OPTIONAL_NUMBERS
            value = getattr(self, name)
            if not (is_positive(value) or (optional and value is None)):
                or_none = " or None" if optional else ""
                raise ValueError(f"{name} must be a positive number{or_none}, not {value!r}")
        if self.activation not in ACTIVATIONS.values():
            known = ", ".join(dict.fromkeys(ACTIVATIONS.values()))
            raise ValueError(f"activation {self.activation!r} is unknown; known are {known}")
        for name in ("layer_windows", "layer_ropes"):
            if (given := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"{name} has {given} entries for {self.num_layers} layers")
        for window in self.layer_windows:
            if window is not None:
                _check_size("a layer's window", window, "max_positions")

    @property
    def trained_positions(self) -> int:
        """The tokens up to which the rotary embeddings do not depend on the length of a text."""
        ropes = {self.rope, *self.layer_ropes} - {None}
        limits = [x.original_max_position_embeddings for x in ropes if x and x.type in BY_LENGTH]
        return min(limits, default=self.max_positions)

    def ropes_at(self, length: int) -> tuple[Rope | None, ...]:
        """The rotary embedding of each layer in texts of up to so many tokens; None: none."""
        ropes = self.layer_ropes or (self.rope,) * self.num_layers
        return tuple(rope and rope.for_length(length, self.head_dim) for rope in ropes)

    def attention_options(self, layer: int) -> dict[str, Any]:
        """What a layer asks of `flash_versions.attention` beyond causal attention: scale, and
        softcap and window where it has them.
        """
        scalar = self.query_pre_attn_scalar
        options: dict[str, Any] = {"scale": self.attention_multiplier}
        if self.attention_multiplier is None:
            options["scale"] = (self.head_dim if scalar is None else scalar) ** -0.5
        if self.scores_softcap is not None:
            options["softcap"] = self.scores_softcap
        window = self.layer_windows[layer] if self.layer_windows else None
        if window is not None:
            options["window"] = (window - 1, 0)  # so many before the token itself
        return options

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> Config:
        """Read the content of a config.json, as transformers 4 or 5 write it.

        Raises:
            ValueError: a missing key, or one that asks for what this model does not do.
        """
        family = find_family(data)
        data = family.filled(data)
        sizes: dict[str, Any] = {
            name: _check_size(key, data.get(key), name) for name, key in HF_KEYS.items()
        }
        parts = read_parts(data, family, sizes["num_layers"])
        sizes["max_positions"] = parts["rope"].context(sizes["max_positions"])
        if (head_dim := data.get("head_dim")) is None:
            if sizes["hidden_size"] % sizes["num_heads"]:
                raise ValueError(
                    f"hidden_size ({sizes['hidden_size']}) must be a multiple of"
                    f" num_attention_heads ({sizes['num_heads']}) where head_dim is not given"
                )
            head_dim = sizes["hidden_size"] // sizes["num_heads"]
        kv_heads = data.get("num_key_value_heads", sizes["num_heads"])
        return cls(
            **sizes,
            num_kv_heads=_check_size("num_key_value_heads", kv_heads, "num_kv_heads"),
            head_dim=head_dim,
            norm_eps=data["rms_norm_eps"],
            **parts,
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json for a model that is made here, in transformers 4's keys, which
        transformers 5 reads as well.

        Raises:
            ValueError: it is no plain Llama, Qwen2 or Qwen3.
        """
        family = "Qwen3" if self.qk_norm else "Qwen2" if self.qkv_bias else "Llama"
        data = {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": family.lower(),
            **{key: getattr(self, name) for name, key in HF_KEYS.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": False,
            "hidden_act": "silu",
        }
        if Config.from_hf(data) != self:
            raise ValueError(f"no config.json is known for {self}; give save_model one")
        return data


def _check_size(name: str, value: Any, field: str) -> int:
    largest = LARGEST.get(field, LARGEST_ELSEWHERE)
    if type(value) is not int or not 0 < value <= largest:
        given = reprlib.repr(value)
        raise ValueError(f"{name} must be a positive integer up to {largest}, not {given}")
    return value
