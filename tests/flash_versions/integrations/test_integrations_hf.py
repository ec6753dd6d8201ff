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
from transformers import AttentionInterface, StaticCache, masking_utils

from flash_versions import BASELINES, VERSIONS
from flash_versions.integrations import hf
from flash_versions.integrations.hf_mask import Ragged, what_is_seen

NAMES = hf.register()
WINDOW = 5
LENGTH = 13
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "initializer_range": 0.3, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "experts_implementation": "eager",  # the default knows no fp64
}
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
    },
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, **EXPERTS},
    # Its masks have a window, which it does not tell the attention function.
    "Qwen2Moe": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
    | {"num_experts": 2, "shared_expert_intermediate_size": 16, **EXPERTS},
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ModernBert": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
}
MASKED_LM = ("Bert", "ModernBert")
LEFT = torch.tensor([[0] * pads + [1] * (LENGTH - pads) for pads in (2, 9)])
PADDING = {"none": None, "left": LEFT, "right": LEFT.flip(1), "between": LEFT.roll(4, 1)}
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
    """Hold `run(model)` with a version against eager attention."""
    exact = run(model_of(name, "eager", device, **changes).double())
    baseline = run(model_of(name, "eager", device, **changes))
    found = run(model_of(name, f"fv_{version}", device, **changes))
    assert distance(found, exact) <= 2 * distance(baseline, exact) + EPS


@pytest.mark.parametrize(
    ("version", "name", "padding"),
    [
        *[("auto", *x) for x in zip(MODELS, ["left", "right", "none", "left"] * 2)],
        ("auto", "Bert", "right"), ("auto", "ModernBert", "none"), ("auto", "GptOss", "right"),
        ("fa1", "Llama", "right"), ("fa1", "Llama", "none"),
    ],
)  # fmt: skip
def test_logits_and_gradients(version, name, padding, device):
    """FA1 has neither windows nor sinks, and pads on the right need nothing of a version."""
    ids, mask = tokens(device), PADDING[padding]
    mask = None if mask is None else mask.to(device)
    check(name, version, device, lambda model: results_of(model, ids, mask))


@pytest.mark.parametrize(
    ("version", "name", "cache", "padding"),
    [
        ("fa1", "Llama", "dynamic", "none"),
        ("fa2", "Llama", "dynamic", "left"),
        ("fa2", "Mistral", "static", "left"),
        pytest.param("fa2", "Gemma2", "dynamic", "left", marks=pytest.mark.slow),
        pytest.param("fa2", "GptOss", "static", "none", marks=pytest.mark.slow),
    ],
)
def test_generate_token_for_token(version, name, cache, padding, device):
    mask = PADDING[padding]
    options = {
        "attention_mask": None if mask is None else mask.to(device),
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    ids = tokens(device)
    expected = model_of(name, "eager", device).generate(ids, **options)
    assert torch.equal(model_of(name, f"fv_{version}", device).generate(ids, **options), expected)


@pytest.mark.parametrize(
    ("name", "padding"), [("Llama", "none"), ("Llama", "between"), ("Mistral", "left")]
)
def test_static_cache_filled_piece_by_piece(name, padding, device):
    """No mask at all where there is no padding: the half-filled cache has to say what is there."""
    ids, mask = tokens(device), PADDING[padding]
    mask = (torch.ones_like(LEFT) if mask is None else mask).to(device)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    pieces = []
    with torch.no_grad():
        whole = model_of(name, "eager", device)(ids, attention_mask=mask, position_ids=places)
        model = model_of(name, "fv_fa2", device)
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 7)
        for start, end in ((0, 3), (3, 8), (8, 9), (9, LENGTH)):
            given = None if padding == "none" else mask[:, :end]
            at = places[:, start:end]
            found = model(ids[:, start:end], given, position_ids=at, past_key_values=cache)
            pieces.append(found.logits)
    difference = (torch.cat(pieces, 1) - whole.logits)[mask.bool()].abs().max()
    assert difference <= 1e-5 * whole.logits.abs().max()


@pytest.mark.parametrize(
    ("name", "by"), [("Llama", "cu_seq_lens"), ("Mistral", "position_ids"), ("Mistral", "rows")]
)
def test_packed_sequences(name, by, device):
    lengths = (4, 1, LENGTH - 5)
    bounds = torch.tensor([0, 4, 5, LENGTH], dtype=torch.int32, device=device)
    options = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device)}
    options["use_cache"] = False  # transformers sees no restarts where it keeps a cache
    if by == "cu_seq_lens":
        longest = bounds.diff().max()
        options |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        options |= {"max_length_q": longest, "max_length_k": longest}
    if by == "rows":  # they restart at another place in every row
        places = [[*range(n), *range(LENGTH - n)] for n in (5, 9)]
        options["position_ids"] = torch.tensor(places, device=device)
    ids = tokens(device, batch=len(options["position_ids"]))
    check(name, "fa2", device, lambda model: results_of(model, ids, **options))
    ids, options["position_ids"] = ids[:1], options["position_ids"][:1]
    alone = model_of(name, "eager", device)(ids[:, 5:]).logits
    together = model_of(name, "fv_fa2", device)(ids, **options).logits[:, 5:]
    assert (alone - together).abs().max() <= 1e-5 * alone.abs().max()


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


def test_cross_attention(device):
    both = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}
    sizes = {f"{half}_{x}": n for half in ("encoder", "decoder") for x, n in both.items()}
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, max_position_embeddings=32, dropout=0.0, init_std=0.3, **sizes
    )
    ids, mask = tokens(device), LEFT.to(device)
    decoder_ids = tokens(device, length=6)
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).to(device)

    def run(implementation, dtype):
        model.to(dtype).set_attn_implementation(implementation)
        logits = model(ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
        return with_gradients(model, logits)

    exact, baseline = run("sdpa", torch.float64), run("eager", torch.float32)
    assert distance(run("fv_fa2", torch.float32), exact) <= 2 * distance(baseline, exact) + EPS


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


def called(**options):
    """What `attend` or the mask function says to these arguments."""
    q = torch.zeros(1, 2, 4, 8)
    mask = options.pop("mask", None)
    hf.attend(torch.nn.Module(), q, q, q, mask, **options)


def masked(kind=masking_utils.create_causal_mask, chunk=None, **options):
    config = model_of("Llama", "fv_fa2", attention_chunk_size=chunk).config
    return kind(config, torch.zeros(1, LENGTH, 32), None, None, **options)


OTHER_LENGTHS, CAUSAL = Ragged(4, 5, causal=True), Ragged(4, 4, causal=True)
CHUNKED = masking_utils.create_chunked_causal_mask
BLOCKS = torch.zeros(1, LENGTH, dtype=torch.long)
REFUSED = {
    "attention_mask has shape \\(1, 1, 4, 4\\)": lambda: called(mask=torch.ones(1, 1, 4, 4)),
    "output_attentions=True asks for the attention w": lambda: called(output_attentions=True),
    "score_mod was passed to attention and is not": lambda: called(score_mod=abs),
    "position_bias was passed to attention and": lambda: called(position_bias=torch.zeros(1)),
    "query has length 4 and key 4, but the mask was": lambda: called(mask=OTHER_LENGTHS),
    "is_causal=False was passed to attention, which": lambda: called(mask=CAUSAL, is_causal=False),
    "cu_seq_lens_q was given with padding": lambda: model_of("Llama", "fv_fa2")(
        tokens("cpu"), attention_mask=LEFT, cu_seq_lens_q=torch.tensor([0, 26])
    ),
    "the model asks for an attention pattern of its": lambda: masked(
        or_mask_function=lambda b, h, q, k: k % 2 == 0
    ),
    "the model asks for an attention pattern": lambda: masked(block_sequence_ids=BLOCKS),
    "the model attends in chunks of 4 and sees 13": lambda: masked(CHUNKED, 4),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        REFUSED[sentence]()
    one_chunk = masked(CHUNKED, LENGTH)
    assert one_chunk == Ragged(LENGTH, LENGTH, causal=True), "one chunk is no pattern"


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
    last = hf.attend(layer, q[:, :, 5:], q, q, Ragged(1, 6, True), version="fa2", is_causal=False)[
        0
    ]
    assert (last.transpose(1, 2) - full[:, :, 5:]).abs().max() < 1e-5


def test_a_mask_that_ends_before_the_slots():
    """Of the slots of positions 3 to 6, it has two; the query is at the second of them."""
    mask = torch.tensor([[0, 0, 0, 0, 1]])
    seen = what_is_seen(1, 4, 1, 4, 3, masking_utils.causal_mask_function, mask)
    assert (seen.kv_starts.tolist(), seen.kv_lengths.tolist()) == ([1], [2])


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
