"""The versions inside transformers' models: logits, gradients and tokens as with eager attention.

The rule is the budget's: the distance to an fp64 run may be twice that of transformers' own eager
attention in fp32, plus one rounding. In the fp64 run every row is alone, without padding.
"""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AttentionInterface, StaticCache
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

from flash_versions import BASELINES, VERSIONS
from flash_versions.integrations import hf
from flash_versions.integrations.hf_mask import Ragged, packed, with_padding
from tests.helpers.rotation import rotated

NAMES = hf.register()
WINDOW = 5
LENGTH = 13
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",  # the default knows no fp64
}
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, **EXPERTS},
    # Its masks have a window, which it does not tell the attention function.
    "Qwen2Moe": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
    | {"num_experts": 2, "shared_expert_intermediate_size": 16, **EXPERTS},
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ModernBert": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
}
MASKED_LM = ("Bert", "ModernBert")
LEFT = torch.tensor([[0] * pads + [1] * (LENGTH - pads) for pads in (2, 9)])
PADDING = {"none": None, "left": LEFT, "right": LEFT.flip(1)}
EPS = torch.finfo(torch.float32).eps


@cache
def cpu_model(name: str, **changes) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name], **changes})
    kind = "ForMaskedLM" if name in MASKED_LM else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, name + kind)(config).eval()


def model_of(name: str, implementation: str, device: str = "cpu", **changes):
    model = cpu_model(name, **changes).float().to(device)
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation(implementation)
    return model


def tokens(device: str, batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 64, (batch, length)).to(device)


def logits_of(model, ids, mask=None, **options) -> torch.Tensor:
    """The logits of the real tokens; in fp64 from every row alone."""
    if mask is None:
        return model(input_ids=ids, **options).logits
    if model.dtype != torch.float64:
        return model(input_ids=ids, attention_mask=mask, **options).logits[mask.bool()]
    places = torch.arange(ids.shape[1], device=ids.device)
    rows = zip(ids, mask.bool())
    return torch.cat(
        [model(input_ids=x[m][None], position_ids=places[m][None]).logits[0] for x, m in rows]
    )


def results_of(model, ids, mask=None, **options) -> dict[str, torch.Tensor]:
    """The logits of the real tokens, and the gradients of all parameters."""
    return with_gradients(model, logits_of(model, ids, mask, **options))


def with_gradients(model, logits) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    logits.square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def distance(results, exact) -> float:
    """The largest distance of the logits, or of the gradients, relative to the largest of them."""
    assert results.keys() == exact.keys()
    names = [name for name in exact if name != "logits"]
    return max(
        max((results[n] - exact[n]).abs().max().item() for n in group)
        / max(exact[n].abs().max().item() for n in group)
        for group in (["logits"], names)
        if group
    )


def check(name, version, device, run, **changes) -> None:
    """Hold `run(model)` with a version against eager attention; a version may also refuse, but the
    newest and FA2 must not.
    """
    exact = run(model_of(name, "eager", device, **changes).double())
    baseline = run(model_of(name, "eager", device, **changes))
    try:
        found = run(model_of(name, f"fv_{version}", device, **changes))
    except ValueError as error:
        assert str(error).startswith(f"version '{version}': ") and version == "fa1"
        return
    assert distance(found, exact) <= 2 * distance(baseline, exact) + EPS


ENCODERS_AND_SINKS = ("Bert", "ModernBert", "GptOss")


@pytest.mark.parametrize(
    ("name", "padding"), rotated(MODELS, ["left", "none", "right"], ENCODERS_AND_SINKS)
)
def test_logits_and_gradients(name, padding, device):
    ids, mask = tokens(device), PADDING[padding]
    mask = None if mask is None else mask.to(device)
    check(name, "auto", device, lambda model: results_of(model, ids, mask))


@pytest.mark.parametrize(
    "name, padding", [("Llama", "left"), ("Mistral", "right"), ("GptOss", "none")]
)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version(version, name, padding, device):
    ids, mask = tokens(device), PADDING[padding]
    mask = None if mask is None else mask.to(device)
    check(name, version, device, lambda model: results_of(model, ids, mask))


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Bert", "ModernBert"])
def test_padding_without_gradients(name, padding, device):
    ids, mask = tokens(device), PADDING[padding].to(device)

    @torch.no_grad()
    def run(model):
        return {"logits": logits_of(model, ids, mask)}

    check(name, "fa2", device, run)


@pytest.mark.parametrize("version", VERSIONS)
def test_right_padding_of_a_decoder_needs_nothing_of_a_version(version, device):
    """No real query sees a pad, so that even FA1 can train on it."""
    ids, mask = tokens(device), PADDING["right"].to(device)
    exact = results_of(model_of("Llama", "eager", device).double(), ids, mask)
    assert distance(results_of(model_of("Llama", f"fv_{version}", device), ids, mask), exact) < 1e-5


CACHES = [(cache, padding) for cache in ("dynamic", "static") for padding in ("left", "none")]


@pytest.mark.parametrize(
    ("name", "cache"), rotated(["Llama", "Mistral", "Gemma2", "GptOss"], CACHES, ["Llama"])
)
def test_generate_token_for_token(name, cache, device):
    """With one cache and padding for each model; with Llama's all of them."""
    cache_implementation, padding = cache
    mask = PADDING[padding]
    options = {
        "attention_mask": None if mask is None else mask.to(device),
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache_implementation,
        "disable_compile": True,
    }
    ids = tokens(device)
    expected = model_of(name, "eager", device).generate(ids, **options)
    assert torch.equal(model_of(name, "fv_fa2", device).generate(ids, **options), expected)


def test_fa1_generates_without_padding(device):
    ids, options = tokens(device), {"max_new_tokens": 6, "do_sample": False}
    expected = model_of("Llama", "eager", device).generate(ids, **options)
    assert torch.equal(model_of("Llama", "fv_fa1", device).generate(ids, **options), expected)


def test_generate_compiled(device):
    """With a static cache transformers compiles the decoding step; one graph must do for all."""
    ids, mask = tokens(device), LEFT.to(device)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model_of("Llama", "eager", device).generate(
        ids, attention_mask=mask, disable_compile=True, **options
    )
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    config = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    model = model_of("Llama", "fv_fa2", device)
    found = model.generate(ids, attention_mask=mask, compile_config=config, **options)
    assert torch.equal(found, expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_static_cache_filled_piece_by_piece(name, padding, device):
    """No mask at all where there is no padding: the half-filled cache has to say what is there."""
    ids, mask = tokens(device), PADDING[padding]
    mask = torch.ones_like(LEFT) if mask is None else mask
    model = model_of(name, "fv_fa2", device)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 7)
    pieces = []
    with torch.no_grad():
        whole = model_of(name, "eager", device)(ids, attention_mask=mask.to(device)).logits
        model.set_attn_implementation("fv_fa2")
        for start, end in ((0, 3), (3, 8), (8, 9), (9, LENGTH)):
            given = None if padding == "none" else mask[:, :end].to(device)
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end].to(device)
            found = model(
                ids[:, start:end], attention_mask=given, past_key_values=cache, position_ids=places
            )
            pieces.append(found.logits)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        places = (mask.cumsum(1) - 1).clamp(min=0).to(device)
        whole = model(ids, attention_mask=mask.to(device), position_ids=places).logits
    real = mask.bool()
    difference = (torch.cat(pieces, 1)[real] - whole[real]).abs().max()
    assert difference <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences(name, by, device):
    lengths = (4, 1, LENGTH - 5)
    bounds = torch.tensor([0, 4, 5, LENGTH], dtype=torch.int32, device=device)
    options = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device)}
    options["use_cache"] = False  # transformers sees no restarts where it keeps a cache
    if by == "cu_seq_lens":
        longest = bounds.diff().max()
        options |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        options |= {"max_length_q": longest, "max_length_k": longest}
    ids = tokens(device, batch=1)
    check(name, "fa2", device, lambda model: results_of(model, ids, **options))
    alone = model_of(name, "eager", device)(ids[:, 5:]).logits
    together = model_of(name, "fv_fa2", device)(ids, **options).logits[:, 5:]
    assert (alone - together).abs().max() <= 1e-5 * alone.abs().max()


def test_packed_rows(device):
    """position_ids restart at another place in every row."""
    places = [[*range(n), *range(LENGTH - n)] for n in (3, 9)]
    options = {"position_ids": torch.tensor(places, device=device), "use_cache": False}
    ids = tokens(device)
    check("Mistral", "fa2", device, lambda model: results_of(model, ids, **options))


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_pads_between_real_tokens(grad, device):
    mask = torch.ones_like(LEFT).to(device)
    mask[0, 3:5] = mask[0, -1] = mask[1, 0] = mask[1, 7] = 0
    ids = tokens(device)

    def run(model):
        with torch.set_grad_enabled(grad):
            return {"logits": logits_of(model, ids, mask).detach()}

    check("Llama", "fa2", device, run)
    with pytest.raises(ValueError, match="attention_mask has a pad between real tokens, which"):
        logits_of(model_of("Mistral", "fv_fa2", device), ids, mask)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_cross_attention(padding, device):
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        dropout=0.0,
        init_std=0.3,
    )
    ids, mask = tokens(device), PADDING[padding].to(device)
    decoder_ids = tokens(device, length=6)
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).to(device)

    def run(implementation, dtype):
        model.to(dtype).set_attn_implementation(implementation)
        logits = model(ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
        return with_gradients(model, logits)

    exact, baseline = run("sdpa", torch.float64), run("eager", torch.float32)
    assert distance(run("fv_fa2", torch.float32), exact) <= 2 * distance(baseline, exact) + EPS


def test_dropout(device):
    ids = tokens(device)
    model = model_of("Llama", "fv_fa2", device, attention_dropout=0.5)
    without = logits_of(model, ids)
    model.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(logits_of(model, ids))
    model.eval()
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[0], without)


def test_gradient_checkpointing(device):
    ids, mask = tokens(device), LEFT.to(device)
    model = model_of("Llama", "fv_fa2", device)
    expected = results_of(model, ids, mask)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = results_of(model, ids, mask)
    model.gradient_checkpointing_disable()
    model.eval()
    assert all(torch.equal(found[n], x) for n, x in expected.items())


def test_autocast(device):
    """Qwen3's norms give fp32 queries beside bf16 values."""
    ids = tokens(device)

    @torch.no_grad()
    def run(implementation):
        with torch.autocast(device, torch.bfloat16):
            return {"logits": logits_of(model_of("Qwen3", implementation, device), ids).double()}

    with torch.no_grad():
        exact = {"logits": logits_of(model_of("Qwen3", "eager", device).double(), ids)}
    bf16 = torch.finfo(torch.bfloat16).eps
    assert distance(run("fv_fa2"), exact) <= 2 * distance(run("sdpa"), exact) + bf16


@pytest.mark.parametrize("name, padding", [("Llama", "none"), ("Mistral", "left")])
def test_compile_of_training(name, padding, device):
    ids, mask = tokens(device), PADDING[padding]
    mask = None if mask is None else mask.to(device)
    model = model_of(name, "fv_fa2", device)
    expected = results_of(model, ids, mask, use_cache=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = with_gradients(model, logits if mask is None else logits[mask.bool()])
    assert distance(found, expected) <= 8 * EPS


def test_compiled_model_asserts_what_it_cannot_see(device):
    """On a GPU the assertion would end the process, so this runs on the CPU."""
    ids = tokens("cpu", batch=1)
    restarting = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)])[None]
    bounds = torch.tensor([0, 4, LENGTH])
    if device == "cuda":
        pytest.skip("a failed assertion on the device ends the process")
    model = model_of("Llama", "fv_fa2")
    expected = model(ids, position_ids=restarting, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="position_ids restart within a row, which a comp"):
            compiled(ids, position_ids=restarting, use_cache=False)
        found = compiled(
            ids,
            position_ids=restarting,
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
        )
    assert (found.logits - expected).abs().max() <= 8 * EPS * expected.abs().max()


def test_register_gives_every_version_a_name():
    assert [f"fv_{name}" for name in ("auto", *VERSIONS, *BASELINES)] == NAMES
    assert hf.register(prefix="ours-")[0] == "ours-auto"
    assert set(NAMES) <= set(AttentionInterface().valid_keys())
    with pytest.raises(ValueError, match="^prefix='my_flash_' must not contain 'flash'"):
        hf.register(prefix="my_flash_")


def test_register_without_transformers(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ImportError, match="^transformers is 4.57.1; 5.0 or later works.$"):
        hf.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="^transformers is not installed; pip install 'flash-ver"):
        hf.register()


REFUSED = {
    "attention_mask has shape \\(2, 1, 13, 13\\)": {
        "attention_mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    },
    "output_attentions=True asks for the attention weights": {"output_attentions": True},
    "score_mod was passed to attention and is not supported": {"score_mod": abs},
    "cu_seq_lens_q was given with padding": {
        "attention_mask": LEFT,
        "cu_seq_lens_q": torch.tensor([0, 26]),
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        model_of("Llama", "fv_fa2")(tokens("cpu"), **REFUSED[sentence])


def test_deterministic_is_handed_on(monkeypatch):
    found = []
    given = hf.attention
    monkeypatch.setattr(
        hf, "attention", lambda *x, **y: found.append(y["deterministic"]) or given(*x, **y)
    )
    x = torch.randn(1, 2, 4, 16)
    for asked in ({}, {"deterministic": False}, {"deterministic": True}):
        hf.attend(torch.nn.Identity(), x, x, x, None, **asked)
    assert found == [None, None, True]


def test_decoder_as_an_encoder(device):
    """transformers makes its masks bidirectional for this option."""
    ids, mask = tokens(device), LEFT.to(device)
    with torch.no_grad():
        logits = [
            logits_of(model_of("Llama", name, device), ids, mask, is_causal=False)
            for name in ("sdpa", "fv_fa2")
        ]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()


def test_is_causal_may_not_contradict_the_mask():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="^is_causal=False was passed to attention, which contrad"):
        hf.attend(torch.nn.Module(), q, q, q, Ragged(4, 4, causal=True), is_causal=False)


def test_position_bias_is_refused():
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1)
    model = transformers.T5EncoderModel(config)
    model.set_attn_implementation("fv_fa2")
    with pytest.raises(ValueError, match="^position_bias was passed to attention and is not supp"):
        model(tokens("cpu"))


def test_patterns_that_are_no_window_are_refused():
    config = model_of("Llama", "fv_fa2").config
    embeds = torch.zeros(1, LENGTH, 32)
    with pytest.raises(ValueError, match="^the model asks for an attention pattern of its own"):
        create_causal_mask(
            config, embeds, None, None, or_mask_function=lambda b, h, q, k: k % 2 == 0
        )
    with pytest.raises(ValueError, match="^the model asks for an attention pattern of its own"):
        create_causal_mask(
            config, embeds, None, None, block_sequence_ids=torch.zeros(1, LENGTH, dtype=torch.long)
        )
    config.attention_chunk_size = 4
    with pytest.raises(ValueError, match="^the model attends in chunks of 4 and sees 13 position"):
        create_chunked_causal_mask(config, embeds, None, None)
    config.attention_chunk_size = LENGTH
    assert create_chunked_causal_mask(config, embeds, None, None) == Ragged(LENGTH, LENGTH, True)
    del config.attention_chunk_size


def test_mask_for_other_lengths_is_refused():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(
        ValueError, match="^query has length 4 and key 4, but the mask was made for 4"
    ):
        hf.attend(torch.nn.Module(), q, q, q, Ragged(4, 5, causal=True))


def test_no_mask_means_what_the_call_or_the_layer_says(device):
    """Vision towers ask for no mask; a window then counts on both sides."""
    q = torch.randn(1, 2, 6, 8, device=device)
    layer = torch.nn.Module()
    behind = torch.arange(6)[:, None] - torch.arange(6)
    for options, visible in (
        ({"is_causal": False}, behind < 6),
        ({}, behind >= 0),
        ({"is_causal": False, "sliding_window": 3}, behind.abs() < 3),
        ({"sliding_window": 3}, (behind >= 0) & (behind < 3)),
    ):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, q, q, attn_mask=visible.to(device)
        )
        o, weights = hf.attend(layer, q, q, q, None, version="fa2", **options)
        assert weights is None
        assert (o.transpose(1, 2) - expected).abs().max() < 1e-5
    layer.is_causal = False
    o, _ = hf.attend(layer, q, q, q, None, version="fa2")
    full = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert (o.transpose(1, 2) - full).abs().max() < 1e-5


def test_training_on_padded_rows_copies_nothing():
    """Whatever the side and the pattern, keys are told by their ends."""
    assert torch.is_grad_enabled()
    for causal in (True, False):
        seen = with_padding(Ragged(LENGTH, LENGTH, causal=causal), LEFT.bool())
        assert seen.kv_starts.tolist() == [2, 9] and seen.cu_seqlens_q is None
    seen = with_padding(Ragged(LENGTH, LENGTH, causal=False), LEFT.flip(1).bool())
    assert seen.kv_lengths.tolist() == [LENGTH - 2, LENGTH - 9] and seen.cu_seqlens_q is None


def test_packing_puts_every_slot_into_one_sequence():
    """Pads too: as queries without keys, and as keys without queries."""
    real = LEFT.bool()
    seen = packed(Ragged(LENGTH, LENGTH, causal=True), real)
    assert seen.cu_seqlens_q.tolist() == [0, 11, 15, 26, 26]
    assert seen.cu_seqlens_k.tolist() == [0, 11, 15, 15, 26]
    assert real.flatten()[seen.keys].tolist() == [True] * 15 + [False] * 11
    assert sorted(seen.queries.tolist()) == list(range(26))


def test_ragged_moves_to_a_device():
    seen = packed(Ragged(LENGTH, LENGTH, causal=True), LEFT.bool()).to("meta")
    assert seen.keys.is_meta and seen.cu_seqlens_q.is_meta and seen.kv_starts is None


def test_the_page_trains_on_packed_documents():
    """The lines of docs/use/plug_in.md, against one document after the other in eager attention."""
    page = (Path(__file__).parents[3] / "docs/use/plug_in.md").read_text()
    (lines,) = [x for x in page.split("```python\n") if "DataCollatorWithFlattening" in x]
    model = model_of("Llama", "fv_fa3", vocab_size=128)
    names = {"model": model}
    exec(lines.partition("```")[0], names)
    alone = model_of("Llama", "eager", vocab_size=128).double()
    alone.load_state_dict(model.state_dict())
    total = 0
    for document in ([5, 17, 99, 3], [8, 2]):
        ids = torch.tensor([document])
        total += alone(input_ids=ids, labels=ids).loss * (len(document) - 1)
    (total / 4).backward()  # four tokens are predicted
    assert names["loss"].item() == pytest.approx(total.item() / 4, rel=64 * EPS)
    for own, other in zip(model.parameters(), alone.parameters()):
        scale = other.grad.abs().max()
        assert (own.grad - other.grad).abs().max() <= 64 * EPS * scale
