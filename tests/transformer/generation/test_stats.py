"""Measurements: the arithmetic, what a step reads, and the share of attention."""

import json
from dataclasses import replace

import pytest
import torch

from tests.helpers.models.tiny_model import CONFIG, CONTEXT, PROMPTS
from transformer.generation.engine import generate
from transformer.generation.stats import Statistics, token_bytes, weight_bytes
from transformer.model.decoder import Transformer


def test_rates():
    first = Statistics(10, 2.0, 9, 8, 4.0, 5, 16, 16, 800, 30, 3, attention_share=0.5)
    total = first + Statistics(10, 3.0, 1, 0, 0.0, 7)
    assert total == Statistics(20, 5.0, 10, 8, 4.0, 7, 16, 16, 800, 30, 3, 2, 0.5)
    assert (total.prompt_rate, total.generation_rate) == (4.0, 2.0)
    assert (total.first_token_seconds, total.step_seconds) == (2.5, 0.25)
    assert (total.tokens_per_forward, total.bandwidth) == (0.5, 200.0)
    nothing = Statistics(1, 0.0, 0, 0, 0.0, 0)
    assert nothing.generation_rate == nothing.step_seconds == nothing.bandwidth == 0
    assert (nothing + nothing).attention_share is None
    parts = [
        Statistics(1, 1.0, 9, 8, seconds, 0, attention_share=share)
        for share, seconds in ((0.1, 3.0), (0.5, 1.0), (None, 9.0))
    ]  # the share of a sum is weighed by time
    assert (parts[0] + parts[1] + parts[2]).attention_share == pytest.approx(0.2)


def test_what_a_step_reads(model, tokenizer):
    embedding = model.model.embed_tokens.weight
    assert weight_bytes(model) == 4 * sum(p.numel() for p in model.parameters())  # tied: the head
    assert token_bytes(CONFIG, torch.bfloat16) == 2 * 2 * 1 * 16 * 2
    _, statistics = generate(model, tokenizer, [PROMPTS[3]], max_tokens=11)
    assert (statistics.steps, statistics.row_steps, statistics.rows) == (10, 10, 1)
    per_token = token_bytes(CONFIG, embedding.dtype)
    assert statistics.cache_bytes == (20 + 11) * per_token
    # The first step reads the 20 tokens of the prompt and its own, the last one reads 30.
    exact = 10 * weight_bytes(model) + sum(range(21, 31)) * per_token
    assert statistics.bytes_read == exact
    untied = Transformer(replace(CONFIG, tied_embeddings=False))
    total = sum(p.nbytes for p in untied.parameters())
    assert weight_bytes(untied) == total - untied.model.embed_tokens.weight.nbytes  # looked up
    prompts = [list(range(CONTEXT - 6)), PROMPTS[0]]  # the long row ends after six tokens
    _, statistics = generate(model, tokenizer, prompts, max_tokens=20)
    assert (statistics.steps, statistics.row_steps) == (19, 5 + 19)


def test_the_command_reports(command):
    _, _, brief = command()
    code, _, err = command("--stats")
    added = {line.split()[0]: line for line in err.splitlines()[len(brief.splitlines()) :]}
    assert code == 0 and [*added] == ["first", "steps", "batch", "bandwidth"]
    assert "% of it attention" in added["steps"] and "from each" not in added["steps"]
    assert "tokens from each" in command("--stats", "--lookup", 3)[2]
    assert "1 rows at once" in added["batch"] and "GB/s" in added["bandwidth"]

    _, out, _ = command("--json", "--stats")
    found = json.loads(out)
    assert found["steps"] == 11 and found["tokens_per_forward"] == 1 and found["rows"] == 1
    for key in ("first_token_seconds", "step_seconds", "bytes_per_second", "cache_bytes"):
        assert found[key] > 0
    assert 0 < found["attention_share"] < 1
    assert "steps" not in json.loads(command("--json")[1])
