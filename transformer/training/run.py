"""A training run: the recipe that decides its outcome, and its state in memory and on disk.

The state holds all that the next step depends on. The data needs no more than a position, since it
is a function of the seed; nothing else is random. A run that is taken up again therefore ends in
the same bits as one that was never interrupted, where the arithmetic repeats itself: on one CPU.
"""

import itertools
import json
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import flash_versions
from transformer.generation.sampling import LARGEST
from transformer.model.decoder import Config, Transformer
from transformer.model.files import writing
from transformer.training import byte_tokenizer
from transformer.training.corpus import ChatBatch, Corpus, Teacher
from transformer.training.lora import merged_weights
from transformer.training.parallel import (
    ALONE,
    World,
    clip_gradients,
    forget_state,
    has_state,
    read_state,
    refuse_another,
    restore_training,
    shard,
    training_state,
    undamaged,
    write_state,
)
from transformer.training.trackers import Tracker

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


class Schedule:
    """What every recipe of a run has: how long, how fast, from which model, with which data."""

    seed: int
    steps: int
    batch_tokens: int
    learning_rate: float
    attention: str

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        if not 0 < self.learning_rate <= LARGEST:
            raise ValueError(f"--lr must be above 0, at most {LARGEST:g}, got {self.learning_rate}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed must be a whole number of 64 bits, got {self.seed}")

    def make_model(self, device: torch.device, dtype: torch.dtype) -> Transformer:
        """The model before the first step, its trained weights in fp32.

        Args:
            device: where it goes.
            dtype: of the arithmetic, and of weights that are not trained.
        """
        raise NotImplementedError

    def corpus(self) -> Any:
        """The data, `corpus[0]`, `corpus[1]`, ...: batches; ValueError if it cannot be made."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What a state file must agree with to be taken up again."""
        raise NotImplementedError

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine to nothing."""
        warm_up = min(WARM_UP, self.steps // 5)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / (self.steps - warm_up)
        return self.learning_rate * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Recipe(Schedule):
    """What decides the outcome: two runs with equal recipes on one machine are the same run."""

    teacher: Teacher
    seed: int
    steps: int
    batch_tokens: int
    learning_rate: float
    tasks: str = "chat"
    model: Config = MODEL
    attention: str = "sdpa"

    def make_model(self, device: torch.device, dtype: torch.dtype) -> Transformer:
        """A model with random weights."""
        attention = partial(flash_versions.attention, version=self.attention)
        return Transformer(self.model, attention).to(device)

    def corpus(self) -> Corpus:
        """The data; ValueError if it cannot be made."""
        return Corpus(self.teacher, self.seed, self.batch_tokens, self.tasks)

    def identity(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


class Training:
    """A run in a folder: model, optimiser and position in the data, on disk and in memory.

    On several processes every rank has one, learns from its rows of each batch, and holds its part
    of the weights; all of them call the same methods in the same order.

    Args:
        recipe: what decides the outcome.
        folder: where the checkpoint grows; an unfinished run in it is taken up again.
        device: where to train.
        world: of whose ranks this is one.

    Raises:
        ValueError: the folder holds a finished run, an unfinished one with another recipe, or a
            damaged one.
    """

    def __init__(
        self, recipe: Schedule, folder: Path, device: torch.device, world: World = ALONE
    ) -> None:
        self.recipe, self.folder, self.device, self.world = recipe, folder, device, world
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(recipe.seed)
        self.model = recipe.make_model(device, self.dtype)
        shard(self.model, world, self.dtype)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=device.type == "cuda",
        )
        self.step = 0
        self.position = (0, 0)  # chunk of the corpus, batch of the chunk
        self.seconds = 0.0
        self.log_size = 0
        self.tracker = Tracker()  # a command puts another in its place
        self._resume()

    def batches(self, workers: int) -> Iterator[ChatBatch]:
        """The training data from here on, generated ahead by processes; advances `position`."""
        first, done = self.position
        loader: DataLoader = DataLoader(
            self.recipe.corpus(),
            batch_size=None,
            sampler=itertools.count(first),
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=_end_with_parent,
        )
        for chunk, batches in enumerate(loader, first):
            for index, batch in enumerate(batches):
                if chunk > first or index >= done:
                    self.position = chunk, index + 1
                    yield batch

    def learn(self, batch: ChatBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step; return the summed loss of this rank's rows and the norm of the gradient.

        Every learned token weighs the same, in whichever batch it is: the sum is divided by a
        constant, not by the batch's own count.
        """
        tokens, targets = (
            x.to(self.device, non_blocking=True) for x in row_tensors(batch, self.world)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        loss, norm = self.update(tokens, targets)
        self.step += 1
        return loss, norm

    def update(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The arithmetic of a step, all of it on the device; returns what `learn` does.

        Args:
            tokens: (rows, length) of this rank.
            targets: (rows, length - 1), what follows each token but the last; IGNORED where it is
                not learned.
        """
        world = self.world
        if world.size == 1:
            weights = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
            logits = torch.func.functional_call(self.model, weights, (tokens,))
        else:
            logits = self.model(tokens)  # FSDP rounds by itself
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        (loss * world.size / self.recipe.batch_tokens).backward()
        norm = clip_gradients([*self.model.parameters()], CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm

    def record(self, **fields: Any) -> None:
        """Append a line to the log, and tell the tracker."""
        if not self.world.main:
            return
        kind = fields.get("evaluation")
        self.tracker.log(self.step, fields if kind is None else {kind: fields})
        line = json.dumps({"step": self.step, **fields}) + "\n"
        path = self.folder / LOG
        with writing(path), path.open("a") as file:
            file.write(line)
        self.log_size += len(line)

    def plain(self, dtype: torch.dtype) -> Transformer:
        """The model as it is now, whole and in a dtype, to be used before the next step: its memory
        may be that of the weights. All ranks call this together.
        """
        with torch.device("meta"):
            model = Transformer(self.model.config, self.model.attention)
        weights = {name: weight.to(dtype) for name, weight in merged_weights(self.model)}
        model.load_state_dict(weights, assign=True)
        return model

    def save(self) -> None:
        """Write the state of the run, replacing the one before it at once."""
        state = {
            **training_state(self.model, self.optimizer, self.world),
            "recipe": self.recipe.identity(),
            "step": self.step,
            "position": self.position,
            "seconds": self.seconds,
            "log_size": self.log_size,
        }
        write_state(self.folder / STATE, state, self.world)

    def finish(self) -> None:
        """The state is needed no more."""
        forget_state(self.folder / STATE)

    def _resume(self) -> None:
        path = self.folder / STATE
        with self.world.together():
            if not has_state(path):
                self._begin()
                return
            state = self._read(path)
        with undamaged(state.get("shards", path)):
            self._restore(state)
        if self.world.main:
            os.truncate(self.folder / LOG, self.log_size)

    def _begin(self) -> None:
        if self.world.main:
            forget_state(self.folder / STATE)  # parts, if a process was killed while it did so
        if (self.folder / "config.json").exists():
            raise ValueError(f"{self.folder} already holds a checkpoint; use another --out")
        if self.world.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LOG).unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, Any]:
        ours = self.recipe.identity()
        with undamaged(path):
            state = read_state(path, self.device) or {}
            theirs = {**state["recipe"], "seed": state["recipe"]["seed"]}
        refuse_another(f"{self.folder} holds an unfinished run", ours, theirs)
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        restore_training(self.model, self.optimizer, state)
        chunk, batch = state["position"]
        self.step, self.position = int(state["step"]), (int(chunk), int(batch))
        self.seconds, self.log_size = float(state["seconds"]), int(state["log_size"])


def _end_with_parent(worker: int) -> None:
    """Let a process that generates data end as soon as the one that trains has been killed: by
    itself it would wait for ever to hand over its batches.
    """
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _unchanged(batches: list[ChatBatch]) -> list[ChatBatch]:
    return batches


def row_tensors(batch: ChatBatch, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows of a batch: tokens (rows, length), and what follows each but the last; IGNORED
    if it is not learned. A rank without a row gets one of which nothing is learned.
    """
    tokens = torch.from_numpy(batch.tokens.astype("int64"))
    learned = torch.from_numpy(batch.learned)
    mine = world.share(len(tokens)) or range(1)
    if not world.share(len(tokens)):
        learned = torch.zeros_like(learned)
    rows = slice(mine.start, mine.stop)
    return tokens[rows], tokens.masked_fill(~learned, IGNORED)[rows, 1:]
