"""The filters against transformers' logits processors, bit for bit, and the draw against theory."""

import math
import os
from dataclasses import asdict
from hashlib import sha256

import pytest
import torch

from transformer.generation.sampling import (
    Sampling,
    process_logits,
    row_generators,
    sample,
    uniform_numbers,
)
from transformer.model.kernels.decode.sample import Draws, choose

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def hf_processors(sampling: Sampling):
    """The list that `generate` itself would build, in its order."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    filters = asdict(sampling) | {"temperature": sampling.temperature or 1.0}
    config = GenerationConfig(do_sample=not sampling.greedy, **filters)
    config._eos_token_tensor = None
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **counts))
    return model._get_logits_processor(config, input_ids_seq_length=6, device="cpu")


def logits_with_ties(vocabulary: int = 50) -> torch.Tensor:
    """Four rows: random, few distinct values (many ties), all equal, one token far ahead."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, vocabulary, generator=generator)
    rows[1] = (rows[1] * 1.5).round()
    rows[2] = 0.25
    rows[3, 7] = 30.0
    return rows


SETTINGS = [
    Sampling(temperature, top_k, top_p, min_p, penalty)
    for temperature in (1.0, 0.7)
    for top_k in (0, 1, 20, 10**6)
    for top_p in (1.0, 0.9, 1e-9)
    for min_p in (0.0, 0.1, 1.0)
    for penalty in (1.0, 1.3)
]


def test_filters_equal_transformers_bit_for_bit():
    logits = logits_with_ties()
    prompt = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, prompt, True)
    dropped = 0
    for sampling in SETTINGS:
        expected = hf_processors(sampling)(prompt, logits.clone())
        actual = process_logits(logits, sampling, seen)
        assert torch.equal(actual, expected), sampling
        dropped += int(actual.isinf().sum())
    assert dropped > 5_000, "the filters never bit"


@pytest.mark.parametrize("top_p, kept", [(0.5, 1), (0.75, 2), (0.875, 3), (0.5001, 2)])
def test_top_p_where_the_mass_is_hit_exactly(device, top_p, kept):
    """Halves, quarters and eighths have no rounding: the tail of mass 1 - top_p goes, as in
    transformers, and no kernel draws from it.
    """
    logits = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    assert logits.softmax(-1).tolist() == [[0.125, 0.5, 0.125, 0.25]]
    sampling = Sampling(top_p=top_p)
    expected = hf_processors(sampling)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
    found = process_logits(logits, sampling, None)
    assert torch.equal(found, expected) and found.isfinite().sum() == kept
    numbers = torch.linspace(0, 1 - 2**-53, 65, dtype=torch.float64)
    rows = found.expand(65, -1).contiguous()
    for tokens in (
        sample(logits.expand(65, -1), sampling, None, numbers)[0],
        choose(rows.to(device), Draws(numbers.to(device)[:, None]))[0].cpu(),
    ):
        assert set(tokens.tolist()) == set(expected[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, top_k=5)], ids=str)
def test_draws_invert_the_cumulative_distribution(sampling):
    """The number lies between the cumulative probabilities before and after the drawn token."""
    logits = torch.randn(400, 12, generator=torch.Generator().manual_seed(3))
    numbers = uniform_numbers(row_generators(0, 400), 1)[:, 0]
    tokens, scores = sample(logits, sampling, None, numbers)
    exact = process_logits(logits, sampling, None).double().softmax(-1)
    after, own = (x.gather(1, tokens[:, None])[:, 0] for x in (exact.cumsum(-1), exact))
    assert (numbers < after + 1e-6).all() and (numbers >= after - own - 1e-6).all()
    torch.testing.assert_close(scores.double(), own.log(), rtol=0, atol=1e-5)


def test_numbers_depend_on_the_seed_and_the_row_only():
    at_once = uniform_numbers(row_generators(3, 4), 100)
    generators = row_generators(3, 4)
    assert torch.cat([uniform_numbers(generators, n) for n in (1, 50, 49)], 1).equal(at_once)
    assert at_once.min() >= 0 and at_once.max() < 1 and len(at_once.unique()) == 400
    assert uniform_numbers(row_generators(3, 2, first=2), 100).equal(at_once[2:])
    others = [uniform_numbers(row_generators(seed, 8), 1) for seed in range(8)]
    assert len(torch.cat(others).unique()) == 64  # row 1 of seed 0 is not row 0 of seed 1
    own = torch.Generator().manual_seed(int(sha256(b"3:2").hexdigest()[:16], 16) >> 1)
    assert uniform_numbers([own], 100).equal(at_once[2:3])


REFUSED = {
    "temperature": (math.nan, -0.1, math.inf, 9e-5),
    "top_k": (-1, 2.5),
    "top_p": (0.0, 1.01),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0.0, math.nan, 9e-4, 1001),
}


@pytest.mark.parametrize("field, value", [(x, value) for x in REFUSED for value in REFUSED[x]])
def test_bad_settings_are_refused_in_one_sentence(field, value):
    with pytest.raises(ValueError, match=rf"^{field} must .*, got {value}$"):
        Sampling(**{field: value})


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)], ids=["drawn", "greedy"])
@pytest.mark.parametrize(
    "logprobs, dtype", [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
def test_scores_tell_finite_logits_from_others(sampling, logprobs, dtype):
    """Some tokens may be impossible, but not all, and none may be NaN or infinitely likely."""
    logits = torch.randn(6, 40, dtype=dtype)
    logits[1, 3] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    logits[4, 7:] = -math.inf
    uniform = torch.full((6,), 0.5, dtype=torch.float64)
    tokens, scores = sample(logits, sampling, None, uniform, logprobs)
    assert scores.isfinite().tolist() == [True, False, False, False, True, True]
    assert scores.dtype == torch.float32 and 0 <= tokens.min() <= tokens.max() < 40
