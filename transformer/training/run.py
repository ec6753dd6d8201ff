"""A training run: the recipe that decides its outcome, a step, and the state on disk.

A model that is taught from nothing and one that learns from data of one's own take the same steps:
a recipe has the model, the data and the loss (`teaching`, `tuning`). The state holds all that the
next step depends on. The data needs no more than a position, since it is a function of the seed;
nothing else is random. A run that is taken up again therefore ends in the same bits as one that was
never interrupted, where the arithmetic repeats itself: on one CPU.
"""

import itertools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from transformer.generation.command import refuse_below
from transformer.generation.progress import Progress
from transformer.generation.sampling import LARGEST
from transformer.model.decoder import Config, Transformer
from transformer.model.files import writing
from transformer.training.corpus import ChatBatch, Teacher
from transformer.training.lora import merged_weights
from transformer.training.parallel import (
    ALONE,
    World,
    clip_gradients,
    exchange_gradients,
    forward_in,
    read_state,
    refuse_another,
    restore_training,
    shard,
    training_state,
    undamaged,
    write_state,
)
from transformer.training.trackers import Tracker

WARM_UP = 200
STATE = "training_state.pt"
LOG = "training.jsonl"

Forward = Callable[..., Tensor]  # (tokens, options of `Transformer.forward`) -> logits


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run. What is compared of it decides the outcome: two runs with equal recipes on one machine
    are the same run.

    Attributes:
        batch_tokens: of a step, padding included.
        clip: the largest norm of the gradient.
        eval_every: steps between two measurements; 0 for none.
        framed: whether it is also measured before the first step and after the last.
        workers: processes that generate data; 0 generates it in between.
        log_every: steps per line.
        notes: what the reader should know before the first step, in sentences.
    """

    seed: int
    steps: int
    batch_tokens: int
    learning_rate: float
    attention: str = "sdpa"
    clip: ClassVar[float]
    framed: ClassVar[bool] = False
    eval_every: int = field(default=0, compare=False)
    workers: int = field(default=0, compare=False)
    log_every: int = field(default=20, compare=False)
    notes: Sequence[str] = field(default=(), compare=False, repr=False)

    def __post_init__(self):
        refuse_below(self, steps=1)
        if not 0 < self.learning_rate <= LARGEST:
            raise ValueError(f"--lr must be above 0, at most {LARGEST:g}, got {self.learning_rate}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed must be a whole number of 64 bits, got {self.seed}")

    @property
    def micro_tokens(self) -> int:
        """How many of them go through the model at a time."""
        return self.batch_tokens

    def make_model(self, device: torch.device, dtype: torch.dtype) -> Transformer:
        """The model before the first step, its trained weights in fp32, others in the dtype of the
        arithmetic.
        """
        raise NotImplementedError

    def corpus(self) -> Any:
        """The data, `corpus[0]`, `corpus[1]`, ...: batches; ValueError if it cannot be made."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What a state file must agree with to be taken up again."""
        values = {x.name: getattr(self, x.name) for x in fields(self) if x.compare}
        return {
            name: asdict(x) if isinstance(x, Teacher | Config) else x for name, x in values.items()
        }

    def loss(self, model: Transformer, forward: Forward, batch: Any, rows: range) -> Tensor:
        """The summed loss of some rows of a batch; of none, a 0 that has a gradient all the same.
        `forward` is that of the model, perhaps with rounded weights.
        """
        raise NotImplementedError

    def weighed(self, batch: Any) -> float:
        """What the summed loss of a whole batch is divided by."""
        raise NotImplementedError

    def measure(self, training: "Training", progress: Progress) -> None:
        """Evaluate the model, record and show the result; all ranks call this together."""
        raise NotImplementedError

    def publish(self, training: "Training", progress: Progress) -> None:
        """Write the checkpoint, and say what there is to say; all ranks call this together."""
        raise NotImplementedError

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine to nothing."""
        warm_up = min(WARM_UP, self.steps // 5)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / (self.steps - warm_up)
        return self.learning_rate * (1 + math.cos(math.pi * progress)) / 2


class Training:
    """A run in a folder: model, optimiser and position in the data, on disk and in memory.

    On several processes every rank has one, learns from its rows of each batch, and holds its part
    of the weights; all of them call the same methods in the same order.

    Args:
        recipe: what decides the outcome.
        folder: where the checkpoint grows; an unfinished run in it is taken up again.

    Raises:
        ValueError: the folder holds a finished run, an unfinished one with another recipe, or a
            damaged one.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, device: torch.device, world: World = ALONE
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

    def batches(self) -> Iterator[ChatBatch]:
        """The training data from here on, generated ahead by processes; advances `position`."""
        first, done = self.position
        loader: DataLoader = DataLoader(
            self.recipe.corpus(),
            batch_size=None,
            sampler=itertools.count(first),
            num_workers=self.recipe.workers,
            collate_fn=iter,
            worker_init_fn=_end_with_parent,
        )
        for chunk, batches in enumerate(loader, first):
            for index, batch in enumerate(batches):
                if chunk > first or index >= done:
                    self.position = chunk, index + 1
                    yield batch

    def learn(self, batch: ChatBatch) -> tuple[Tensor, Tensor]:
        """Take one step; return the summed loss of this rank's rows and the norm of the gradient.

        What is minimised is the loss of the whole batch, however it is split into micro-batches and
        over processes.
        """
        recipe, losses, parts = self.recipe, list[Tensor](), self._parts(batch)
        forward = partial(forward_in, self.dtype, self.model, self.world)
        for number, rows in enumerate(parts, start=1):
            exchange_gradients(self.model, number == len(parts))
            loss = recipe.loss(self.model, forward, batch, rows)
            (loss * self.world.size / recipe.weighed(batch)).backward()
            losses.append(loss.detach())
        norm = clip_gradients([p for p in self.model.parameters() if p.requires_grad], recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return sum(losses[1:], losses[0]), norm

    def _parts(self, batch: ChatBatch) -> list[range]:
        """This rank's rows in micro-batches. Every rank goes through the model as often as others:
        some get a part without a row.
        """
        rows, width = batch.tokens.shape
        size = max(1, self.recipe.micro_tokens // width)
        mine, most = self.world.share(rows), -(-rows // self.world.size)
        starts = range(mine.start, mine.start + most, size)
        return [range(at, max(at, min(at + size, mine.stop))) for at in starts]

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

    def _resume(self) -> None:
        path = self.folder / STATE
        with self.world.together():
            with undamaged(path):
                state = read_state(path)
            if state is None:
                self._begin()
                return
            with undamaged(path):
                theirs = {**state["recipe"], "seed": state["recipe"]["seed"]}
            refuse_another(f"{self.folder} holds an unfinished run", self.recipe.identity(), theirs)
        with undamaged(path):
            restore_training(self.model, self.optimizer, state)
            chunk, batch = state["position"]
            self.step, self.position = int(state["step"]), (int(chunk), int(batch))
            self.seconds, self.log_size = float(state["seconds"]), int(state["log_size"])
        if self.world.main:
            with (self.folder / LOG).open("a") as log:  # which has no line yet, perhaps
                log.truncate(self.log_size)

    def _begin(self) -> None:
        if (self.folder / "config.json").exists():
            raise ValueError(f"{self.folder} already holds a checkpoint; use another --out")
        if self.world.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LOG).unlink(missing_ok=True)


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


def rows_of(batch: ChatBatch, rows: range) -> tuple[Tensor, Tensor]:
    """Some rows of a batch: tokens (rows, length) int64, and which are learned, (rows, length)
    bool. In the place of none there is one of which nothing is learned.
    """
    which = slice(rows.start, rows.stop) if rows else slice(1)
    learned = torch.from_numpy(batch.learned[which])
    tokens = torch.from_numpy(batch.tokens[which].astype("int64"))
    return tokens, learned if rows else torch.zeros_like(learned)
