"""Fixtures of the generation tests: a tiny model with random weights, and the command on it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_versions
from transformer.generate import DEFAULT_QUESTION, main
from transformer.generation.chat import Tokenizer
from transformer.generation.engine import generate
from transformer.model.decoder import Config, Transformer
from transformer.model.weights import load_model, save_model
from transformer.training import byte_tokenizer

CONTEXT = 128
CONFIG = Config(
    vocab_size=byte_tokenizer.VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=2, num_kv_heads=1, head_dim=16, max_positions=CONTEXT, tied_embeddings=True,
    qk_norm=True,
)  # fmt: skip
PROMPTS = [[72, 105], [87, 104, 97, 116, 32, 105, 115, 63], [256], list(range(40, 60))]
END = byte_tokenizer.IM_END


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint with random weights, large enough that greedy text does not settle at once."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(1)
    model = Transformer(CONFIG, attention=sdpa)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    save_model(model, folder, torch.float32)
    for name, text in byte_tokenizer.files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def sdpa(q, k, v, **options):
    return flash_versions.attention(q, k, v, version="sdpa", **options)


@pytest.fixture(scope="module")
def model(folder) -> Transformer:
    return load_model(folder, attention=sdpa)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def command(folder, capsys):
    """Run the command in this process with the tiny model; returns (code, stdout, stderr)."""

    def run(*arguments, model: str | Path | None = folder, attention: str = "sdpa"):
        options = [] if model is None else ["--model", str(model)]
        options += ["--device", "cpu", "--attention", attention, "-m", "12"]
        code = main([*options, *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def expected_answer(model, tokenizer, prompt=DEFAULT_QUESTION, max_tokens=12, system=None):
    """What the command must print for a prompt, through the byte tokenizer's own encoder."""
    turns = [] if system is None else [("system", system)]
    turns.append(("user", prompt))
    tokens = [token for turn in turns for token in byte_tokenizer.encode_turn(*turn)]
    tokens += byte_tokenizer.encode_prompt()
    [completion], _ = generate(model, tokenizer, [tokens], max_tokens=max_tokens, eos=(END,))
    return completion.text


def assert_same_answers(found, expected, tolerance=1e-5):
    """The same tokens, texts and ends; log-probabilities but for the order of sums."""
    for ours, theirs in zip(found, expected, strict=True):
        assert replace(ours, logprobs=None) == replace(theirs, logprobs=None)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=tolerance)
