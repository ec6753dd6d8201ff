"""The filters against transformers' logits processors, bit for bit, and the draw against theory."""

import math
import os

import pytest
import torch

from transformer.generation.sampling import (
    Sampling,
    draw_from,
    process_logits,
    row_generators,
    sample,
    uniform_numbers,
)
from transformer.model.kernels.decode.sample import draw

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def hf_processors(sampling: Sampling):
    """The list that `generate` itself would build, in its order."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = GenerationConfig(
        do_sample=not sampling.greedy,
        temperature=sampling.temperature or 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
    )
    config._eos_token_tensor = None
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
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
        draw(rows.to(device), numbers.to(device))[0].cpu(),
    ):
        assert set(tokens.tolist()) == set(expected[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_equals_transformers_with_a_penalty(penalty):
    logits = logits_with_ties()
    prompt = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter(1, prompt, True)
    # The filters that follow the temperature must not matter when nothing is drawn.
    sampling = Sampling(temperature=0, top_k=3, top_p=0.5, min_p=0.5, repetition_penalty=penalty)
    expected = hf_processors(sampling)(prompt, logits.clone()).argmax(-1)
    assert torch.equal(sample(logits, sampling, seen, None)[0], expected)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.8, min_p=0.05)],
    ids=["plain", "temperature", "top-k", "top-p and min-p"],
)
def test_draws_follow_the_distribution(sampling):
    """Chi-square of 20 000 draws at p > 1e-4; the same test notices a temperature of 1.15."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    probabilities = process_logits(logits, sampling, None)[0].double().softmax(-1)
    counts = draw_counts(logits, sampling)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    assert chi_square_p_value(counts[possible], expected) > 1e-4

    wrong = (logits / 1.15).double().softmax(-1)[0] * counts.sum()
    assert chi_square_p_value(counts, wrong) < 1e-4


def chi_square_p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees_of_freedom = torch.tensor(len(observed) - 1.0, dtype=torch.float64)
    return torch.special.gammaincc(degrees_of_freedom / 2, statistic / 2).item()


def draw_counts(logits, sampling, rows=200, steps=100):
    numbers = uniform_numbers(row_generators(0, rows), steps)
    batch = logits.expand(rows, -1)
    counts = torch.zeros(logits.shape[-1], dtype=torch.float64)
    for uniform in numbers.unbind(1):
        counts += sample(batch, sampling, None, uniform)[0].bincount(minlength=len(counts))
    return counts


def test_numbers_do_not_depend_on_how_many_are_drawn_at_once():
    at_once = uniform_numbers(row_generators(3, 4), 100)
    generators = row_generators(3, 4)
    assert torch.cat([uniform_numbers(generators, n) for n in (1, 50, 49)], 1).equal(at_once)
    assert at_once.min() >= 0 and at_once.max() < 1 and len(at_once.unique()) == 400


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53], ids=["lowest", "highest"])
def test_extreme_random_numbers_never_reach_a_dropped_token(uniform):
    logits = torch.full((1, 9), -math.inf)
    logits[0, [2, 3, 5]] = torch.tensor([0.1, 0.2, 0.3])
    expected = 2 if uniform == 0 else 5
    uniform = torch.tensor([uniform], dtype=torch.float64)
    assert draw_from(logits.softmax(-1), uniform).item() == expected


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
