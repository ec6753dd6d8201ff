"""A training run: the recipe that decides its outcome, and its state in memory and on disk.

The state holds all that the next step depends on. The data needs no more than a position, since it
is a function of the seed; nothing else is random. A run that is taken up again therefore ends in
the same bits as one that was never interrupted, where the arithmetic repeats itself: on one CPU.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import flash_versions
from transformer import byte_tokenizer
from transformer.command import out_of_memory
from transformer.corpus import Batch, Corpus, Teacher
from transformer.files import replacing
from transformer.model import Config, Transformer

MODEL = Config(
    vocab_size=byte_tokenizer.VOCAB_SIZE,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    max_positions=byte_tokenizer.MAX_POSITIONS,
    tied_embeddings=True,
    qk_norm=True,
)
WARM_UP = 200
CLIP = 0.4  # of the gradient of the loss per token; about 0.4 of the tokens count in it
IGNORED = -100
STATE = "training_state.pt"
LOG = "training.jsonl"


@dataclass(frozen=True)
class Recipe:
    """What decides the outcome: two runs with equal recipes on one machine are the same run."""

    teacher: Teacher
    seed: int
    steps: int
    batch_tokens: int
    learning_rate: float
    tasks: str = "chat"
    model: Config = MODEL

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--lr must be a positive number, got {self.learning_rate}")

    def corpus(self) -> Corpus:
        """The data; ValueError if it cannot be made."""
        return Corpus(self.teacher, self.seed, self.batch_tokens, self.tasks)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine to nothing."""
        warm_up = min(WARM_UP, self.steps // 5)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / (self.steps - warm_up)
        return self.learning_rate * (1 + math.cos(math.pi * progress)) / 2


class Training:
    """A run in a folder: model, optimiser and position in the data, on disk and in memory.

    Args:
        recipe: what decides the outcome.
        folder: where the checkpoint grows; an unfinished run in it is taken up again.
        device: where to train.

    Raises:
        ValueError: the folder holds a finished run, an unfinished one with another recipe, or a
            damaged one.
    """

    def __init__(self, recipe: Recipe, folder: Path, device: torch.device):
        self.recipe, self.folder, self.device = recipe, folder, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(recipe.seed)
        attention = partial(flash_versions.attention, version="sdpa")
        self.model = Transformer(recipe.model, attention).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=device.type == "cuda",
        )
        self.step = 0
        self.position = (0, 0)  # chunk of the corpus, batch of the chunk
        self.seconds = 0.0
        self.log_size = 0
        self._resume()

    def batches(self, workers: int) -> Iterator[Batch]:
        """The training data from here on, generated ahead by processes; advances `position`."""
        first, done = self.position
        loader: DataLoader = DataLoader(
            self.recipe.corpus(),  # type: ignore[arg-type]
            batch_size=None,
            sampler=itertools.count(first),
            num_workers=workers,
            collate_fn=_unchanged,
        )
        for chunk, batches in enumerate(loader, first):
            for index, batch in enumerate(batches):
                if chunk > first or index >= done:
                    self.position = chunk, index + 1
                    yield batch

    def learn(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step; return the summed loss of the batch and the norm of the gradient.

        Every learned token weighs the same, in whichever batch it is: the sum is divided by a
        constant, not by the batch's own count.
        """
        tokens, targets = (x.to(self.device, non_blocking=True) for x in _tensors(batch))
        weights = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        logits = torch.func.functional_call(self.model, weights, (tokens,))
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        (loss / self.recipe.batch_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach(), norm

    def record(self, **fields: Any) -> None:
        """Append a line to the log."""
        line = json.dumps({"step": self.step, **fields}) + "\n"
        with open(self.folder / LOG, "a") as file:
            file.write(line)
        self.log_size += len(line)

    def save(self) -> None:
        """Write the state of the run, replacing the one before it at once."""
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "position": self.position,
            "seconds": self.seconds,
            "log_size": self.log_size,
        }
        with replacing(self.folder / STATE) as file:
            torch.save(state, file)

    def _resume(self) -> None:
        path = self.folder / STATE
        if not path.exists():
            if (self.folder / "config.json").exists():
                raise ValueError(f"{self.folder} already holds a checkpoint; use another --out")
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LOG).unlink(missing_ok=True)
            return
        ours = asdict(self.recipe)
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            theirs = {name: state["recipe"][name] for name in ours}
            if theirs == ours:
                self._restore(state)
        except OSError:
            raise
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            if out_of_memory(error):
                raise
            raise ValueError(f"{path} is damaged; delete it to start again") from error
        if others := [name for name in ours if theirs[name] != ours[name]]:
            raise ValueError(
                f"{self.folder} holds an unfinished run with another {others[0]}"
                f" ({theirs[others[0]]}, now {ours[others[0]]}); repeat its command or use"
                " another --out"
            )
        os.truncate(self.folder / LOG, self.log_size)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        chunk, batch = state["position"]
        self.step, self.position = int(state["step"]), (int(chunk), int(batch))
        self.seconds, self.log_size = float(state["seconds"]), int(state["log_size"])


def _unchanged(batches: list[Batch]) -> list[Batch]:
    return batches


def _tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, length), and what follows each but the last; IGNORED if it is not learned."""
    tokens = torch.from_numpy(batch.tokens.astype("int64"))
    learned = torch.from_numpy(batch.learned)
    return tokens, tokens.masked_fill(~learned, IGNORED)[:, 1:]
