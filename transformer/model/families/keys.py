"""The keys of a config.json beyond sizes, read into fields of `Config`.

Keys mean what they mean to Hugging Face's transformers; one that would be ignored there and matters
is refused here.
"""

from __future__ import annotations

from transformer.model.families.family import COUNTS, NUMBERS, SOFTCAPS, Family
from transformer.model.families.rules import (
    FULL,
    SLIDING,
    Data,
    is_switched_on,
    rope_by_window,
    windows_everywhere,
    windows_everywhere_if_switched_on,
)
from transformer.model.rope import ORIGINAL, Rope, is_positive, read_key

# Rules that make all layers alike, and do not read `layer_types`.
WINDOWS_ALIKE = (windows_everywhere, windows_everywhere_if_switched_on)

# Name of an activation in a config.json -> in `Config`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

SWIGLU_ALPHA = 1.702  # of gpt-oss, whose silu is nearly gelu


def read_parts(data: Data, family: Family, num_layers: int) -> Data:
    """The fields of `Config` by which families differ, from the filled content of a config.json.

    Raises:
        ValueError: a key that asks for what the model does not do.
    """
    [architecture, *_] = data["architectures"]
    _refuse_unsupported(data, family)
    windows = layer_windows(data, architecture, family, num_layers)
    windowed = [window is not None for window in windows] or [False] * num_layers
    rope = _main_rope(data, family)
    ropes = family.ropes(data, rope, windowed)
    activation_key = "hidden_activation" if "hidden_activation" in family.keys else "hidden_act"
    activation = read_key(data, activation_key, str, None)
    if architecture == "GemmaForCausalLM" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # what Google's first files mean by it
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation {activation!r} is not supported; known are {', '.join(ACTIVATIONS)}"
        )
    attention_bias, mlp_bias = (
        key in family.keys and read_key(data, key, bool, None)
        for key in ("attention_bias", "mlp_bias")
    )
    parts: Data = {
        "layer_windows": windows,
        "rope": rope,
        "layer_ropes": () if set(ropes) == {rope} else ropes,
        "tied_embeddings": read_key(data, "tie_word_embeddings", bool, None),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "activation": ACTIVATIONS[activation],
    }
    for key, name in NUMBERS.items():
        if key not in family.keys:
            continue
        if not (is_positive(value := data[key]) or (value is None and key in SOFTCAPS)):
            raise ValueError(f"{key} must be a positive number, not {value!r:.40}")
        parts[name] = value
    if architecture == "Gemma3ForCausalLM" and parts["scores_softcap"] is not None:
        # Transformers reads it for Gemma 3 and leaves the scores as they are.
        raise ValueError(f"attn_logit_softcapping must be null in {architecture}")
    if "swiglu_limit" in parts and data.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA:
        alpha = data["swiglu_alpha"]
        raise ValueError(f"swiglu_alpha {alpha!r:.40} is not supported, only {SWIGLU_ALPHA}")
    if "num_experts_per_tok" in family.keys:
        parts |= _read_experts(data, family, num_layers)
    return {**parts, **family.parts}


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
    if family.windowed in WINDOWS_ALIKE and types != ruled:
        raise ValueError(f"layer_types of {architecture} must be {ruled[0]} in every layer")
    if SLIDING not in types:
        return ()
    if "use_sliding_window" in family.keys and not is_switched_on(data):
        raise ValueError("layer_types names sliding_attention, but use_sliding_window is off")
    size = data["sliding_window"]
    if type(size) is not int or not 0 < size < 2**30:
        raise ValueError(
            f"sliding_window must be a positive integer below 2^30 for layers of type"
            f" sliding_attention, not {size!r:.40}"
        )
    return tuple(size if kind == SLIDING else None for kind in types)


def _refuse_unsupported(data: Data, family: Family) -> None:
    """Refuse keys that ask for what this model does not do."""
    quantized = read_key(data, "quantization_config", dict, None)
    if quantized is not None and not (family.mxfp4 and quantized.get("quant_method") == "mxfp4"):
        raise ValueError("quantized weights are not supported; use the unquantized checkpoint")
    if read_key(data, "use_bidirectional_attention", bool, False):
        raise ValueError("use_bidirectional_attention is not supported, only causal attention")


def _read_experts(data: Data, family: Family, num_layers: int) -> Data:
    """The fields of `Config` for a mixture of experts."""
    [key] = family.keys.keys() & {*COUNTS}
    if type(count := data[key]) is not int or count < 1:
        raise ValueError(f"{key} must be a positive integer, not {count!r:.40}")
    parts: Data = {"num_experts": count, "experts_per_token": data["num_experts_per_tok"]}
    if "normed_routing" in family.parts:
        return {**parts, "expert_size": data["intermediate_size"]}
    if (step := read_key(data, "decoder_sparse_step", int, 1)) != 1:
        raise ValueError(f"decoder_sparse_step {step} is not supported, only 1; mlp_only_layers is")
    dense = read_key(data, "mlp_only_layers", list, [])
    return {
        **parts,
        "expert_size": data["moe_intermediate_size"],
        "dense_layers": tuple(layer for layer in range(num_layers) if layer in dense),
        "normed_routing": read_key(data, "norm_topk_prob", bool, None),
    }


def _main_rope(data: Data, family: Family) -> Rope:
    """The rotary embedding of layers without one of their own."""
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
    original = read_key(data, ORIGINAL, int, None) if ORIGINAL in family.keys else None
    rope = Rope.from_hf(data, family.rope_types, original)
    if rope.partial_rotary_factor != 1 and "partial_rotary_factor" not in family.keys:
        raise ValueError(
            f"partial_rotary_factor {rope.partial_rotary_factor} is not supported, only whole heads"
        )
    return rope
