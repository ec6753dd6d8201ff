"""Decoding: several tokens between two looks of the host, a cache of fixed shape, a CUDA graph."""

from functools import partial

import pytest
import torch

import flash_versions
from tests.helpers.models.tiny_model import CONFIG, CONTEXT, END, PROMPTS, assert_same_answers
from transformer.generation import batch
from transformer.generation.engine import GREEDY, EngineOptions, generate, pad_left
from transformer.generation.sampling import Sampling, row_generators
from transformer.model.cache import KVCache
from transformer.model.weights import load_model

LONG = list(range(CONTEXT - 6))  # leaves room for six tokens
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(),
    "penalised": Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3),
}


def answers(model, tokenizer, prompts=PROMPTS, sampling=GREEDY, max_tokens=40, **options):
    """Completions of each prompt, twice."""
    options = {"samples": 2, "eos": (END,), "logprobs": True} | options
    if not sampling.greedy:
        options["generators"] = row_generators(3, options["samples"] * len(prompts))
    return generate(model, tokenizer, prompts, max_tokens=max_tokens, sampling=sampling, **options)


@pytest.mark.parametrize("steps", [3, 100])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_how_often_the_host_looks_changes_nothing(monkeypatch, model, tokenizer, sampling, steps):
    prompts = [*PROMPTS, LONG]
    expected, counted = answers(model, tokenizer, prompts, sampling)
    monkeypatch.setattr(batch, "steps_at_a_time", lambda device: steps)
    found, statistics = answers(model, tokenizer, prompts, sampling)
    assert len({len(completion.tokens) for completion in expected}) > 1
    assert_same_answers(found, expected)
    assert statistics.generated_tokens == counted.generated_tokens


def test_a_fixed_cache_gives_the_same_logits(model):
    """Whatever the lengths; and what a full row does after its end disturbs nobody."""
    tokens, padding = pad_left([*PROMPTS, LONG])
    free, fixed = (KVCache(CONFIG, len(tokens), CONTEXT) for _ in range(2))
    step = torch.tensor([[65], [66], [67], [68], [69]])
    with torch.no_grad():
        for cache in (free, fixed):
            model(tokens, cache, padding, last_only=True)
        fixed.fix()
        for number in range(10):
            found = model(step, fixed, last_only=True)
            if number == 6:  # the long row is full
                free.truncate(free.longest - 6)
            expected = model(step, free, last_only=True)
            rows = slice(None) if number < 6 else slice(0, 4)
            torch.testing.assert_close(found[rows], expected[rows], rtol=1e-5, atol=1e-5)
            assert found.isfinite().all()
    assert fixed.lengths.tolist()[-1] == CONTEXT
    fixed.truncate(2)
    assert not fixed.fixed and fixed.longest == 2 and fixed.lengths.tolist() == [2] * 5


@pytest.mark.parametrize("fixed", [False, True], ids=["free", "fixed"])
def test_kept_rows_go_on_as_if_the_others_were_there(model, fixed):
    tokens, padding = pad_left(PROMPTS)
    all_rows, some = (KVCache(model.config, len(tokens), CONTEXT) for _ in range(2))
    kept = torch.tensor([0, 2, 3])
    steps = torch.randint(0, 256, (2, len(tokens), 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for cache in (all_rows, some):
            model(tokens, cache, padding, last_only=True)
            if fixed:
                cache.fix()
        size = some.nbytes
        some.keep(kept)
        for step in steps:
            expected = model(step, all_rows, last_only=True)[kept]
            found = model(step[kept], some, last_only=True)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(some.lengths, all_rows.lengths[kept]) and some.nbytes == size


# On a GPU


@pytest.fixture(scope="module")
def on_gpu(folder):
    """Load the checkpoint there, with a version of attention."""
    return lambda version, dtype=torch.float32: load_model(
        folder, partial(flash_versions.attention, version=version), torch.device("cuda"), dtype
    )


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("version", ["sdpa", "fa2", "fa3"])
def test_a_graph_says_what_launches_say(on_gpu, tokenizer, version, sampling):
    model, prompts = on_gpu(version), [*PROMPTS, LONG]
    expected, _ = answers(
        model, tokenizer, prompts, sampling, engine=EngineOptions(cuda_graph=False)
    )
    found, _ = answers(model, tokenizer, prompts, sampling)
    assert len({len(completion.tokens) for completion in expected}) > 1
    assert_same_answers(found, expected, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["fa2", "fa3"])
def test_a_step_is_replayed_and_not_launched(on_gpu, tokenizer, version):
    """The model is called for the prompt, for a step, and for the capture of one."""
    model, calls = on_gpu(version, torch.bfloat16), []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(tuple(inputs[0].shape)))
    completions, _ = answers(model, tokenizer, max_tokens=100, sampling=Sampling())
    assert max(len(completion.tokens) for completion in completions) > 50
    assert calls == [(4, 20), (8, 1), (8, 1)]
