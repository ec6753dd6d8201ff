"""What a config.json may say, and the rotary embedding that it describes, against transformers."""

import importlib
from dataclasses import replace

import pytest
import torch

from tests.transformer.model.test_model import CONFIG as QWEN3
from transformer.model.decoder import Config
from transformer.model.families.family import FAMILIES
from transformer.model.rope import BY_LENGTH, Rope, rotary_table, rotate

HF = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

FULL, SLIDING = "full_attention", "sliding_attention"


def of(*families):
    return [{"architectures": [f"{family}ForCausalLM"]} for family in families]


QWEN3_MOE, QWEN2, MISTRAL, SMOLLM3, PHI3 = of("Qwen3Moe", "Qwen2", "Mistral", "SmolLM3", "Phi3")
GEMMA2, GEMMA3, OLMO3, MIXTRAL, GPT_OSS = of("Gemma2", "Gemma3", "Olmo3", "Mixtral", "GptOss")

LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.0, 6.0],
}
PAIRS = {
    name: tuple(1 + i / x for i in range(32))
    for name, x in (("short_factor", 64), ("long_factor", 4))
}
ROPES = {
    "default": {"theta": 1e6},
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, no truncation": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, ramp of no width": {**YARN, "original_max_position_embeddings": 6},
    "yarn, ramp past all dimensions": {**YARN, "theta": 4.0},
    "dynamic": DYNAMIC,
    "dynamic, half of a head": {**DYNAMIC, "partial_rotary_factor": 0.5},
    "longrope": {**LONGROPE, **PAIRS},
}


@pytest.mark.parametrize("parameters", ROPES.values(), ids=ROPES)
def test_rotary_embedding_has_the_bits_of_transformers(parameters):
    """Frequencies, magnitude and what turns, in short texts and in long ones, which some types tell
    apart; a longer table begins with the bits of a shorter one.
    """
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    functions = importlib.import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    rope, positions, head_dim = Rope(**parameters), 512, 64
    data = {f"rope_{n}" if n in ("theta", "type") else n: v for n, v in parameters.items()}
    theirs = llama.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=128 if rope.type == "dynamic" else positions,
        rope_parameters={"rope_theta": rope.theta, "rope_type": rope.type, **data},
    )
    q = torch.randn(1, positions, 3, head_dim, generator=torch.Generator().manual_seed(0))
    whole = rotary_table(rope, head_dim, positions, q.device, q.dtype)
    for length in (positions, 129, 128, 3):
        resolved = rope.for_length(length, head_dim)
        if rope.type in functions:
            at_most = torch.tensor(length)
            frequencies, magnitude = functions[rope.type](theirs, seq_len=at_most)
            torch.testing.assert_close(resolved.frequencies(head_dim), frequencies, rtol=0, atol=0)
            assert resolved.magnitude() == magnitude
        turned = q[:, :length, :, : rope.turned(head_dim)]
        for x in (turned, turned.bfloat16()):
            cos, sin = llama.LlamaRotaryEmbedding(theirs)(x, torch.arange(length)[None])
            expected, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
            table = rotary_table(resolved, head_dim, length, q.device, x.dtype)
            assert torch.equal(rotate(x, *table.unbind(1)), expected)
        assert (resolved == rope) == (length <= 128 or rope.type not in BY_LENGTH)
        assert torch.equal(rotary_table(rope, head_dim, length, q.device, q.dtype), whole[:length])


LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    "older, newer",
    [
        ({"head_dim": None}, {"head_dim": 12}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        (LINEAR, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ],
    ids=["head_dim", "key heads", "scaling"],
)
def test_what_older_files_leave_out_or_call_otherwise(older, newer):
    assert Config.from_hf({**HF, **older}) == Config.from_hf({**HF, **newer})


def test_qwen2_has_its_own_idea_of_biases():
    qwen2 = {**HF, "architectures": ["Qwen2ForCausalLM"]}
    config = Config.from_hf({**qwen2, "attention_bias": True, "mlp_bias": True})
    assert config == Config.from_hf(qwen2)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_parts_that_no_config_json_is_made_for_are_refused():
    with pytest.raises(ValueError, match="no config.json is known for Config"):
        replace(QWEN3, layer_windows=(4, 8)).to_hf()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_keys_mean_what_they_mean_to_transformers(architecture):
    """Older checkpoints left out what was the default then."""
    transformers = pytest.importorskip("transformers")
    given = {**HF, "architectures": [architecture], "num_hidden_layers": 40}
    kind = getattr(transformers, architecture).config_class
    # The ids of special tokens have defaults beyond this vocabulary.
    theirs = kind(**{**given, "pad_token_id": None, "eos_token_id": 0}).to_dict()
    assert Config.from_hf({**theirs, "architectures": [architecture]}) == Config.from_hf(given)


@pytest.mark.parametrize(
    "given, windows",
    [
        ({**QWEN2, "use_sliding_window": True}, (None, None, 8, 8)),
        ({**QWEN2, "use_sliding_window": False}, ()),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": None}, ()),
        (MISTRAL, (8, 8, 8, 8)),
        ({**MISTRAL, "sliding_window": None}, ()),
        ({**SMOLLM3, "use_sliding_window": True}, (None, None, None, 8)),
        (GEMMA2, (8, None, 8, None)),
        (OLMO3, (8, 8, 8, None)),
        ({**QWEN3_MOE, "use_sliding_window": True}, (8, 8, 8, 8)),
        ({**GEMMA3, "sliding_window_pattern": 3}, (8, 8, None, 8)),
        ({**GEMMA2, "layer_types": [FULL] * 4}, ()),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_family_has_its_own_layers_with_windows(given, windows):
    config = Config.from_hf(
        {**HF, "num_hidden_layers": 4, "max_window_layers": 2, "sliding_window": 8, **given}
    )
    assert config.layer_windows == windows
    for layer, window in enumerate(windows):
        asked = config.attention_options(layer).get("window")
        assert asked == (None if window is None else (window - 1, 0))


ROPE_4 = "rope_scaling"


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; known are L"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}},
            "with text_config it describes a model of more than text; use a text-only checkpoint",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"num_key_value_heads": 3}, r"query heads \(4\) must be a multiple of key heads \(3\)"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({**GPT_OSS, "quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "a token cannot take 9 of 8 experts"),
        ({**MIXTRAL, "num_experts_per_tok": None}, "experts_per_token must be a positive integer"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported, only 1"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention are not"),
        ({ROPE_4: {"type": "axial", "factor": 2.0}}, "rope type 'axial' is not supported"),
        ({ROPE_4: LONGROPE, "max_position_embeddings": 10**9}, "short_factor has 2 numbers for 6"),
        ({ROPE_4: {"type": "linear"}}, "'linear' needs the parameter factor"),
        ({ROPE_4: {**YARN, "mrope_section": [1]}}, "'mrope_section' is not supported"),
        ({**QWEN2, "layer_types": [SLIDING] * 2}, "but use_sliding_window is off"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "must be null in Gemma3ForCausalLM"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_the_model_cannot_do_is_refused_by_name(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config.from_hf({**HF, **change})
