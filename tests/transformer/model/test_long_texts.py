"""Rotary embeddings that depend on the length of a text: one length for a whole answer."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.models.family_checkpoints import (
    LONGROPE_BEGINS,
    Numbers,
    attention,
    greedy_answers,
    make_checkpoint,
)
from tests.transformer.model.test_model import CONFIG, make_model
from transformer.generation.engine import GREEDY, Kept, generate
from transformer.model.cache import KVCache
from transformer.model.rope import Rope
from transformer.model.weights import load_model
from transformer.rl.rollout import roll_out

BEGINS = 16
CONTEXT = 48
TYPES = {
    "longrope": {"short_factor": (1.0,) * 4, "long_factor": (1.0, 2.0, 4.0, 8.0)},
    "dynamic": {},
}


@pytest.fixture(params=TYPES)
def model(request):
    """Half of each head turns, by the length beyond BEGINS tokens."""
    rope = Rope(
        type=request.param,
        factor=3.0,
        original_max_position_embeddings=BEGINS,
        partial_rotary_factor=0.5,
        **TYPES[request.param],
    )
    return make_model(replace(CONFIG, max_positions=CONTEXT, rope=rope), attention)


def make_tokens(length, batch=1):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("length", [BEGINS, BEGINS + 1, CONTEXT])
def test_steps_equal_the_whole_text(model, length):
    """In a cache for a text of that length, as `generate` makes it."""
    tokens = make_tokens(length, batch=2)
    cache = KVCache(model.config, 2, length, dtype=torch.float64)
    logits = [model(part, cache) for part in tokens.split([length - 9, 1, 5, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens), rtol=0, atol=1e-11)


def test_a_conversation_that_grows_too_long_is_read_again(model):
    """Keys that were turned for a short text are of no use in a long one."""
    kept, prompt, options = Kept(), make_tokens(5)[0].tolist(), {"max_tokens": 3, "logprobs": True}
    reused = []
    for length in (BEGINS - 8, BEGINS - 3, CONTEXT - 8, CONTEXT - 4):
        prompt += make_tokens(length - len(prompt))[0].tolist()
        [answer], _ = generate(model, Numbers(), [prompt], kept=kept, **options)
        [alone], _ = generate(model, Numbers(), [prompt], **options)
        assert answer.tokens == alone.tokens
        assert answer.logprobs == pytest.approx(alone.logprobs, rel=1e-6)
        reused.append(kept.tokens[: len(prompt)] == prompt and len(kept.tokens) >= len(prompt))
        prompt = [*prompt, *answer.tokens]
    assert all(reused)


def test_rollouts_of_texts_that_are_too_long_are_refused(model):
    class Policy:
        def encode(self, problem):
            return [1] * 10

    with pytest.raises(ValueError, match="beyond 16 tokens .* of 10 tokens leaves 6 for max_toke"):
        roll_out(Policy(), model, ["a problem"], 2, max_tokens=7, sampling=GREEDY)


@pytest.mark.parametrize("name", ["phi 3, longrope", "phi 4 mini"])
def test_long_answers_are_those_of_transformers(tmp_path, name):
    """A prompt is beyond the original context, or the whole answer within it."""
    pytest.importorskip("transformers")
    theirs = make_checkpoint(name, tmp_path)
    ours = load_model(tmp_path, attention)
    for length in (LONGROPE_BEGINS + 6, LONGROPE_BEGINS - 16):
        prompts = make_tokens(length).tolist()
        [answer], _ = generate(ours, Numbers(), prompts, max_tokens=16)
        assert [answer.tokens] == greedy_answers(theirs, prompts, 16, eos_token_id=None)
        assert len(set(answer.tokens)) > 4
