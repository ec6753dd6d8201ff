"""The shape of a model, and Hugging Face's config.json: reading, writing, refusing."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from transformer.rope import Rope, is_positive, read_key

# Architecture of a Hugging Face config.json -> its model_type.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Field of Config -> the key of config.json that must give it.
HF_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
}

# Field of Config -> the largest size that is no mistake; positions are counted in int32.
LARGEST = {"num_layers": 1024, "max_positions": 2**31 - 1}
LARGEST_ELSEWHERE = 2**20


@dataclass(frozen=True)
class Config:
    """The shape of a model.

    Raises:
        ValueError: sizes that are no positive integers, head counts that do not divide, odd heads.
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

    def __post_init__(self):
        for name in (*HF_KEYS, "num_kv_heads", "head_dim"):
            _check_size(name, getattr(self, name), name)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"query heads ({self.num_heads}) must be a multiple of key heads"
                f" ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, not {self.head_dim}")
        if not is_positive(self.norm_eps):
            raise ValueError(f"norm_eps must be a positive number, not {self.norm_eps!r}")

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> Config:
        """Read the content of a config.json, as transformers 4 or 5 write it.

        Raises:
            ValueError: a missing key, or one that asks for what this model does not do.
        """
        architecture = _architecture(data)
        sizes = {name: _check_size(key, data.get(key), name) for name, key in HF_KEYS.items()}
        _refuse_unsupported(data, sizes["num_layers"])
        head_dim = data.get("head_dim")
        if head_dim is None:
            if sizes["hidden_size"] % sizes["num_heads"]:
                raise ValueError(
                    f"hidden_size ({sizes['hidden_size']}) must be a multiple of"
                    f" num_attention_heads ({sizes['num_heads']}) where head_dim is not given"
                )
            head_dim = sizes["hidden_size"] // sizes["num_heads"]
        kv_heads = data.get("num_key_value_heads")
        if kv_heads is None:
            kv_heads = sizes["num_heads"]
        attention_bias = read_key(data, "attention_bias", bool, False)
        mlp_bias = read_key(data, "mlp_bias", bool, False)
        qwen2 = architecture == "Qwen2ForCausalLM"
        return cls(
            **sizes,
            num_kv_heads=_check_size("num_key_value_heads", kv_heads, "num_kv_heads"),
            head_dim=head_dim,
            norm_eps=data.get("rms_norm_eps", cls.norm_eps),
            rope=Rope.from_hf(data),
            tied_embeddings=read_key(data, "tie_word_embeddings", bool, False),
            qkv_bias=qwen2 or attention_bias,
            output_bias=not qwen2 and attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and mlp_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json, in transformers 4's keys, which transformers 5 reads as well.

        Raises:
            ValueError: no Hugging Face architecture has this combination of parts.
        """
        data = {
            **{key: getattr(self, name) for name, key in HF_KEYS.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            **self.rope.to_hf(),
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": self.output_bias,
            "mlp_bias": self.mlp_bias,
        }
        for architecture, model_type in ARCHITECTURES.items():
            described = {"architectures": [architecture], "model_type": model_type, **data}
            if Config.from_hf(described) == self:
                return described
        raise ValueError(f"no architecture of {', '.join(ARCHITECTURES)} has the parts of {self}")


def _check_size(name: str, value: Any, field: str) -> int:
    largest = LARGEST.get(field, LARGEST_ELSEWHERE)
    if type(value) is not int or not 0 < value <= largest:
        given = reprlib.repr(value)
        raise ValueError(f"{name} must be a positive integer up to {largest}, not {given}")
    return value


def _architecture(data: dict[str, Any]) -> str:
    """The architecture of a config.json, refused if this model is another."""
    architecture = (read_key(data, "architectures", list, []) or ["none"])[0]
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture} is not supported; known are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _refuse_unsupported(data: dict[str, Any], num_layers: int) -> None:
    """Refuse a config.json that asks for what this model does not do."""
    if (activation := data.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"activation {activation!r} is not supported; known are silu, swish")
    if data.get("quantization_config") is not None:
        raise ValueError("quantized weights are not supported; use the unquantized checkpoint")
    windows = (
        read_key(data, "use_sliding_window", bool, False)
        and read_key(data, "sliding_window", int, None) is not None
    )
    from_layer = read_key(data, "max_window_layers", int, 0)
    layer_types = read_key(data, "layer_types", list, []) or [
        "sliding_attention" if windows and layer >= from_layer else "full_attention"
        for layer in range(num_layers)
    ]
    if others := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
        raise ValueError(
            f"layers of type {', '.join(others)} are not supported, only full_attention"
        )
