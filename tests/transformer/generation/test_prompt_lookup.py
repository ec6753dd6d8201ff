"""Prompt-lookup decoding: the same tokens as without, from fewer forwards."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.helpers.models.tiny_model import CONFIG, CONTEXT, END, PROMPTS, assert_same_answers, sdpa
from transformer.generation.engine import EngineOptions, generate
from transformer.generation.prompt_lookup import PromptLookupDecoding
from transformer.generation.sampling import Sampling
from transformer.model.cache import KVCache
from transformer.model.decoder import Transformer


def answers(model, tokenizer, lookup, prompts, *, engine=None, **options):
    options = {"max_tokens": 60, "eos": (END,), "logprobs": True} | options
    engine = EngineOptions(prompt_lookup=lookup, **(engine or {}))
    return generate(model, tokenizer, prompts, engine=engine, **options)


def test_a_stop_string_ends_an_answer_inside_a_draft(model, tokenizer):
    [free], _ = answers(model, tokenizer, 0, [PROMPTS[1]])
    for start in (5, 26):
        shown = []
        options = {
            "stop_strings": [free.text[start : start + 2]],
            "on_text": lambda _, text, shown=shown: shown.append(text),
        }
        found, _ = answers(model, tokenizer, 4, [PROMPTS[1]], **options)
        assert "".join(shown) == found[0].text
        assert_same_answers(found, answers(model, tokenizer, 0, [PROMPTS[1]], **options)[0])


class Counting(Transformer):
    """A model that counts from 0 to 6 and begins again, whatever came before."""

    def forward(self, tokens, cache=None, padding=None, last_only=False):
        cache.reserve(tokens.shape[1], padding)
        tokens = tokens[:, -1:] if last_only else tokens
        return F.one_hot((tokens + 1) % 7, self.config.vocab_size).float()


def test_a_repeating_text_takes_few_forwards(tokenizer):
    """Once it has counted to 6, with 5 forwards, all drafts agree: 6 tokens from each."""
    model = Counting(CONFIG, attention=sdpa)
    [completion], statistics = answers(model, tokenizer, 5, [[0]], max_tokens=80)
    assert completion.tokens == [i % 7 for i in range(1, 81)]
    assert statistics.steps == 5 + -(-(80 - 6) // 6)


def test_a_row_drafts_from_its_own_text_only(tokenizer):
    """Also in a place that another row had before, whose text was longer."""
    model, prompts = Counting(CONFIG, attention=sdpa), [[*range(7)] * 8, [3]]
    options = {"max_tokens": 40, "engine": {"page_size": 4}}
    alone = [answers(model, tokenizer, 5, [prompt], **options)[1] for prompt in prompts]
    _, together = answers(model, tokenizer, 5, prompts, at_once=1, **options)
    assert together.row_steps == sum(statistics.row_steps for statistics in alone)
    assert alone[0].row_steps < alone[1].row_steps


def drafts_of(texts, count):
    """What `PromptLookupDecoding` drafts for rows that end as given."""
    rows = [SimpleNamespace(prompt=text[:-1]) for text in texts]
    logits = torch.zeros(len(texts), CONFIG.vocab_size)
    for row, text in enumerate(texts):
        logits[row, text[-1]] = 9
    how = SimpleNamespace(banned=(), sampling=Sampling(temperature=0), logprobs=False)
    nothing = {"at_once": 1, "numbers": None, "seen": None, "cuda_graph": False}
    cache = KVCache(CONFIG, len(texts), CONTEXT)
    decoding = PromptLookupDecoding(None, cache, logits, rows, how, drafts=count, **nothing)
    return decoding._draft(count).tolist()


def test_drafts_follow_the_latest_of_the_longest_matches():
    assert drafts_of([[1, 2, 3, 9, 2, 3, 7, 1, 2, 3]], 3) == [[9, 2, 3]]  # longest, not latest
    assert drafts_of([[2, 3, 9, 2, 3, 7, 5, 2, 3]], 3) == [[7, 5, 2]]  # the later one
    assert drafts_of([[5, 6, 5, 6]], 5) == [[5, 6, 5, 6, 5]]  # over and over
    assert drafts_of([[4, 1, 2, 3], [1, 2, 7, 1, 2]], 2)[1] == [7, 1]  # each row its own
