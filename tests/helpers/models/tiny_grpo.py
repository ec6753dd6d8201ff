"""What the GRPO tests share: a tiny policy that likes what it must not say, and tasks for it."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random

import pytest
import torch

from tests.helpers.models.tiny_model import CONFIG as TINY
from tests.helpers.models.tiny_model import sdpa
from transformer.model.decoder import Transformer
from transformer.model.weights import CHECKPOINTS, save_model
from transformer.rl.recipes import Settings
from transformer.rl.trainer import Trainer, resolved
from transformer.tasks.task import Marks, Task
from transformer.training import byte_tokenizer

CPU = torch.device("cpu")
SLOPPY = CHECKPOINTS / "sloppy"
LETTERS = range(ord("a"), ord("f"))
CONFIG = replace(TINY, tied_embeddings=False)


def distance(actual: torch.Tensor, expected) -> float:
    """The largest difference, relative to the largest expected value or 1."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    largest = max(1.0, float(expected.abs().max()))
    return float((actual.double() - expected).abs().max()) / largest


class Count(Task):
    """Say many a's. Questions are few and of different lengths, so equal ones are drawn often."""

    name = "count"

    def arguments(self, rng: Random) -> tuple:
        return rng.randint(0, 9), rng.randint(0, 999)

    def question(self, rng: Random, length: int, number: int) -> str:
        return "?" * (1 + length)

    def marks(self, completion: str, *arguments) -> Marks:
        return Marks(answer=float("a" in completion), form=float(completion.isalpha()))

    def reward(self, completion: str, *arguments) -> float:
        return float(completion.count("a"))


class Seldom(Count):
    """One question in three earns nothing."""

    name = "seldom"

    def reward(self, completion: str, length: int, number: int) -> float:
        return float(completion.count("a")) if number % 3 else 0.0


class Fewer(Count):
    """Say few a's: no answer is right, and rewards are below zero."""

    name = "fewer"

    def marks(self, completion: str, *arguments) -> Marks:
        return Marks(answer=0.0, form=0.0)

    def reward(self, completion: str, *arguments) -> float:
        return -1.0 - completion.count("a")


class Raises(Count):
    name = "raises"

    def reward(self, completion: str, *arguments) -> float:
        raise KeyError("no such word")


def other(name: str, **methods) -> type[Count]:
    """`Count` with another method."""
    return type(name, (Count,), {"name": name.lower(), **methods})


Nan = other("Nan", reward=lambda self, completion, *arguments: math.nan)
Nothing = other("Nothing", reward=lambda self, completion, *arguments: None)
Long = other("Long", question=lambda self, rng, length, number: "?" * 200)


class Hungry(Count):
    """The memory is full."""

    name = "hungry"

    def arguments(self, rng: Random) -> tuple:
        raise torch.OutOfMemoryError("CUDA out of memory")


class Nameless(Task):
    """A task that nobody named."""


class Picky(Count):
    """Cannot be made without an argument."""

    def __init__(self, number: int):
        self.number = number


@pytest.fixture(scope="session")
def tempted(tmp_path_factory) -> Path:
    """A checkpoint that, if nobody stops it, says the pad or a reserved token every second time,
    else one of five letters, and ends after eight tokens on average.
    """
    folder = tmp_path_factory.mktemp("tempted")
    torch.manual_seed(1)
    model = Transformer(CONFIG, attention=sdpa)
    wishes = dict.fromkeys(LETTERS, 7 / 8 / 5) | {byte_tokenizer.IM_END: 1 / 8}
    wishes |= {byte_tokenizer.PAD: 0.5, byte_tokenizer.VOCAB_SIZE - 1: 0.5}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        # The first number of a hidden state is large and the same everywhere: a bias.
        model.model.embed_tokens.weight[:, 0] = 4.0
        constant = model.model(torch.zeros(1, 1, dtype=torch.int64), sdpa, None)[0, 0, 0]
        model.lm_head.weight[:, 0] = -9.0 / constant
        for token, share in wishes.items():
            model.lm_head.weight[token, 0] = math.log(share) / constant
    save_model(model, folder, torch.float32)
    for name, text in byte_tokenizer.files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


TINY = {
    "task": "tests.helpers.models.tiny_grpo:Count", "prompts": 4, "group": 4, "max_tokens": 12,
    "lr": 3e-3, "clip_gradient": 1e6, "eval_problems": 4, "eval_samples": 2,
}  # fmt: skip


def evaluated(reward: float, extent: float = 1.0) -> dict[str, float]:
    """Scores of an evaluation as `Sampler.evaluate` gives them."""
    shares = {"greedy": 0.0, "sampled": min(1.0, max(0.0, reward)), "form": 0.0}
    return {**shares, "length": 1.0, "reward": reward, "reward_range": extent}


def make_trainer(folder: Path, **changes) -> Trainer:
    """A trainer of the tiny policy."""
    settings = Settings(**{"model": str(folder), **TINY, **changes})
    return Trainer(resolved(settings, CPU), CPU)


def options(folder: Path, **changes) -> list[str]:
    """The same settings as a command line."""
    given = {"model": folder, "device": "cpu", **TINY, **changes}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


@pytest.fixture
def grpo_command(capsys):
    """Run the command in this process; returns (exit code, standard error)."""
    from transformer import grpo  # draws, so it takes long to import

    def run(*arguments):
        code = grpo.main(list(map(str, arguments)))
        captured = capsys.readouterr()
        assert captured.out == ""
        return code, captured.err

    return run


@pytest.fixture(scope="session")
def finished_run(tempted, tmp_path_factory) -> Path:
    """The folder of a finished run of three steps."""
    from transformer import grpo

    folder = tmp_path_factory.mktemp("runs") / "finished"
    arguments = options(tempted, steps=3, eval_every=2)
    assert grpo.main([*arguments, "--out", str(folder), "--save-every", "2"]) == 0
    return folder


def run_command(argv: list[str]) -> None:
    """The command in a process of its own."""
    from transformer import grpo

    sys.exit(grpo.main(argv))


@pytest.fixture(scope="session")
def processes() -> Iterator:
    """Where processes begin that have imported everything already."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.models.tiny_grpo", "transformer.grpo"])
    yield context
