"""The fused forward against the ordinary one: the same tokens, no second copy of the weights."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import flash_versions
from flash_versions.simulator import launch
from tests.transformer.model.test_model import CONFIG
from transformer.model import fused
from transformer.model.cache import KVCache
from transformer.model.decoder import Transformer
from transformer.model.kernels.decode import gemv
from transformer.model.kernels.decode.sample import Draws, choose
from transformer.model.layers import TORCH
from transformer.model.paged_cache import PagedKVCache
from transformer.model.rope import Rope

TINY = replace(CONFIG, vocab_size=101, tied_embeddings=False, qk_norm=False)
FAMILIES = {
    "llama": {"rope": Rope(500000.0, "llama3", 8.0, 16, 1.0, 4.0), "mlp_bias": True},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True, "qkv_bias": True, "output_bias": True},
    "mistral": {"layer_windows": (5, 5)},
}
STEPS = 4


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The simulator runs programs one by one; test_gemv has the tiles that are for GPUs."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(gemv, "choose_tile", lambda rows, width: (32, 64, 4))


def tiny(
    device: str, dtype: torch.dtype = torch.float32, kernels: str = "torch", **changed
) -> Transformer:
    """A model with weights that make sharp logits, so that a greedy token means something."""
    config = replace(TINY, **changed)
    version = "sdpa" if device == "cpu" else "fa2"
    model = Transformer(config, partial(flash_versions.attention, version=version), kernels)
    for parameter in model.parameters():
        mean, std = (0.0, 0.25) if parameter.dim() > 1 else (0.5, 0.3)
        nn.init.normal_(parameter, mean, std)
    return model.to(device, dtype).eval()


def continued(model, forward, cache, prompt, padding=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens behind a prompt (batch, STEPS), and the logits that they were taken from."""
    with torch.inference_mode():
        logits = [model(prompt, cache, padding, last_only=True)]
        for _ in range(STEPS):
            logits.append(forward(logits[-1].argmax(-1), cache, last_only=True))
    logits = torch.cat(logits, 1)
    return logits.argmax(-1), logits


@pytest.mark.parametrize(
    ("family", "batch"), [("llama", 1), ("qwen3", 2), ("mistral", 2), ("qwen2", 1)]
)
def test_greedy_tokens_are_those_of_the_ordinary_forward(device, family, batch):
    """Token for token in fp32: one sequence, and a batch with pads whose cache is fixed."""
    model = tiny(device, **FAMILIES[family])
    prompt = torch.randint(101, (batch, 7)).to(device)
    padding = torch.tensor([0, 3], device=device) if batch == 2 else None
    found = []
    for forward in (model, partial(fused.forward, model)):
        cache = KVCache(model.config, batch, 24, device)
        if batch == 2:
            cache.fix()
        found.append(continued(model, forward, cache, prompt, padding))
    (expected, logits), (got, fused_logits) = found
    assert torch.equal(got, expected)
    assert len(expected.unique()) > 1  # not one token again and again
    torch.testing.assert_close(fused_logits, logits, rtol=0, atol=2e-5 * logits.abs().max().item())


def test_a_row_that_is_full(device):
    """A fixed cache goes on over its last slot; one that grows says that there is no room."""
    model = tiny(device)
    prompt = torch.randint(101, (2, 7), device=device)
    cache, expected = (KVCache(model.config, 2, 8, device) for _ in range(2))
    with torch.inference_mode():
        for one in (cache, expected):
            model(prompt, one, torch.tensor([0, 5], device=device))
            one.fix()
        for token in prompt[:, :3].split(1, dim=1):
            got, plain = fused.forward(model, token, cache), model(token, expected)
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)
        assert cache.lengths.tolist() == expected.lengths.tolist() == [8, 5]
        cache.truncate(8)
        with pytest.raises(ValueError, match="holds 8 tokens and 8 are stored: 1 more, 9 in all"):
            fused.forward(model, prompt[:, :1], cache)


def test_several_tokens_of_each_row(device):
    """As a speculation is verified: all logits, after rows of unequal lengths."""
    model = tiny(device, tied_embeddings=True)
    prompt = torch.randint(101, (2, 5), device=device)
    guess = torch.randint(101, (2, 4), device=device)
    found = []
    for forward in (model, partial(fused.forward, model)):
        cache = KVCache(model.config, 2, 24, device)
        with torch.inference_mode():
            model(prompt, cache, torch.tensor([0, 2], device=device))
            found.append((forward(guess, cache), cache.keys_values[..., :7, :, :], cache.lengths))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    cache = KVCache(model.config, 2, 24, device)
    with torch.inference_mode():
        model(prompt, cache, torch.tensor([0, 2], device=device))
        last = fused.forward(model, guess, cache, last_only=True)
    torch.testing.assert_close(last, found[1][0][:, -1:], rtol=1e-4, atol=1e-4)


def test_paged_cache(device):
    """The same logits, whichever way the cache lies in memory."""
    model = tiny(device)
    prompt = torch.randint(101, (2, 7), device=device)
    plain, paged = (
        kind(model.config, 2, 24, device, **options)
        for kind, options in ((KVCache, {}), (PagedKVCache, {"page_size": 4}))
    )
    paged.allocate([7 + STEPS] * 2)
    forward = partial(fused.forward, model)
    if device == "cpu":  # pages are for kernels
        model.attention = partial(flash_versions.attention, version="fa2")
    expected, got = (continued(model, forward, cache, prompt) for cache in (plain, paged))
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [KVCache, partial(PagedKVCache, page_size=4)])
def test_no_length_of_a_prompt_has_kernels_of_its_own(monkeypatch, kind, family):
    """Triton says in which forms the kernels of a prompt and of a step are compiled."""
    model, backend = tiny("cpu", **FAMILIES[family]), make_backend(GPUTarget("cuda", 90, 32))
    model.attention, simulate = partial(flash_versions.attention, version="fa2"), launch.launch

    def note(kernel, grid, arguments, named):
        if kernel.module.startswith("transformer."):
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            forms[-1].add((kernel.fn.__name__, str(bind(*arguments, **named)[1:])))
        simulate(kernel, grid, arguments, named)

    monkeypatch.setattr(launch, "launch", note)
    forms = []
    for length, capacity in ((5, 25), (16, 32), (17, 44), (30, 64)):
        forms.append(set())
        cache = kind(model.config, 1, capacity)
        with torch.inference_mode():
            for tokens in (length, 1):
                logits = fused.forward(model, torch.zeros(1, tokens).long(), cache, last_only=True)
                choose(logits[:, -1], Draws(torch.zeros(1, 1).double()))
                cache.fix()
    assert len(forms[0]) > 6 and all(form == forms[0] for form in forms)


def test_weights_are_joined_and_not_copied():
    """Parameters become parts of a larger tensor once, and stay what they were; after a copy or in
    another dtype or order each has memory of its own again, and is joined anew.
    """
    model = tiny("cpu", qkv_bias=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    q, k, v = model.model.blocks[0].self_attn.qkv
    weight, bias = fused.joined((q, k, v))
    assert torch.equal(weight, torch.cat([q.weight, k.weight, v.weight]))
    assert bias is not None and torch.equal(bias, torch.cat([q.bias, k.bias, v.bias]))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again, _ = fused.joined((q, k, v))
    assert again.data_ptr() == weight.data_ptr() and again.shape == weight.shape
    with torch.no_grad():
        k.weight.fill_(7)  # as an optimiser's step would
    assert (weight[64:96] == 7).all()
    for other in (copy.deepcopy(model), model.double()):
        q, k, v = other.model.blocks[0].self_attn.qkv
        for layers in ((q, k, v), (q, v, k)):
            weight, _ = fused.joined(layers)
            assert torch.equal(weight, torch.cat([layer.weight for layer in layers]))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"norm_plus_one": True}, "Gemma's norms"),
        ({"activation": "gelu_tanh"}, "the activation gelu_tanh"),
        ({"logits_softcap": 30.0}, "softcap of the logits"),
        ({"layer_ropes": (Rope(), None)}, "without a rotary embedding"),
        ({"rope": Rope(partial_rotary_factor=0.5)}, "parts of heads"),
        ({"norms_after": True}, "(is|are) not fused"),
        ({"num_experts": 4, "experts_per_token": 2, "expert_size": 8}, "mixtures of experts"),
    ],
)
def test_what_is_not_fused_is_refused_by_name(changed, sentence):
    with pytest.raises(ValueError, match=f"kernels='fused' does not work .*{sentence}"):
        tiny("cpu", kernels="fused", **changed)


def test_what_does_not_fit_takes_the_ordinary_forward():
    """More tokens, pads, gradients, adapters: no fused forward."""
    model = tiny("cpu")
    cache, one = KVCache(model.config, 1, 32), torch.zeros(1, 1, dtype=torch.int64)
    assert not fused.fits(model, one, cache, None)  # a gradient is wanted
    with torch.no_grad():
        assert fused.fits(model, one, cache, None)
        assert not fused.fits(model, one.expand(1, fused.FEW_TOKENS + 1), cache, None)
        assert fused.fits(model, one.expand(fused.FEW_TOKENS + 1, 1), cache, None)
        assert not fused.fits(model, one, None, None)
        assert not fused.fits(model, one, cache, torch.zeros(1, dtype=torch.int64))
        model.model.blocks[1].mlp.up_proj = type("Adapted", (nn.Linear,), {})(48, 72)
        assert not fused.fits(model, one, cache, None)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_many_tokens(device, family):
    """A prefill, and a step of training, on the fused kernels: as the ordinary forward."""
    model = tiny(device, **FAMILIES[family])
    tokens, found = torch.randint(101, (2, 9), device=device), []
    for parts in (False, True):
        set_parts(model, parts)
        model.zero_grad()
        with torch.no_grad():
            logits = model(tokens)
        model(tokens).logsumexp(-1).sum().backward()
        found.append([logits, *(p.grad.clone() for p in model.parameters())])
    for expected, got in zip(*found, strict=True):
        atol = 2e-5 * expected.abs().max().item() + 1e-6
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=atol)


def test_folded_weights_follow_the_weights(device):
    """After a step of training, a norm's weight folded before it would be another model's."""
    model = tiny(device)
    tokens = torch.randint(101, (1, 9), device=device)
    for _ in range(2):
        with torch.no_grad():
            set_parts(model, False)
            expected = model(tokens)
            set_parts(model, True)
            atol = 2e-5 * expected.abs().max().item()
            torch.testing.assert_close(model(tokens), expected, rtol=0, atol=atol)
            model.model.blocks[0].input_layernorm.weight.mul_(2)
            model.model.blocks[1].mlp.up_proj.weight.neg_()


def test_the_switch(device):
    """`kernels` decides: torch never fuses, fused always, auto where there is a GPU."""
    with pytest.raises(ValueError, match="one of auto, torch, fused, exact, not 'fast'"):
        tiny("cpu", kernels="fast")
    for kernels, few in (("torch", False), ("auto", device == "cuda"), ("fused", True)):
        model = tiny(device, kernels=kernels)
        with torch.no_grad():
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
            model(tokens, KVCache(model.config, 1, 8, device))
        assert (model.products is not TORCH) == (kernels == "fused")
        joined = model.model.blocks[0].self_attn.q_proj.weight.untyped_storage().nbytes()
        assert (joined > 64 * 48 * 4) == few


def set_parts(model: Transformer, on: bool) -> None:
    """Let the parts of a model use the fused kernels, or not."""
    model.products = fused.FusedProducts() if on else TORCH
