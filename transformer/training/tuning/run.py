"""A run on data of one's own: its recipe, a step, the loss on what is held out, the checkpoint.

All that makes a run safe is that of `Training`: the state on disk, the log, several processes.
"""

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer.generation.progress import Progress
from transformer.model.decoder import Transformer
from transformer.model.files import parse_json, read_json, read_text, write_text
from transformer.model.weights import find_checkpoint, load_model, save_model
from transformer.training.logprobs import token_logprobs
from transformer.training.lora import add_adapters
from transformer.training.parallel import clip_gradients, exchange_gradients
from transformer.training.recompute import recompute_activations
from transformer.training.run import LOG, Schedule, Training
from transformer.training.tuning.packing import PackedAttention, PackedBatch, Packing

CLIP = 1.0  # of the gradient of the mean loss per token
HELD_OUT = "held out"  # how the log calls the loss on it
TEXT_FILES = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")
NOT_COPIED = ("config.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class TuningRecipe(Schedule):
    """What decides the outcome: two runs with equal recipes on one machine are the same run.

    Attributes:
        data: its fingerprint.
        model: what is trained on, see `find_checkpoint`.
        seed: of the order of the data and of the adapters.
        lora_rank: of the adapters; 0 trains all weights.
        width: tokens of a packed row.
        packing: the data.
        held_out: what the loss is measured on; None: nothing.
        micro_tokens: how many tokens go through the model at a time.
        checkpointing: recompute activations in the backward pass.
    """

    data: str
    model: str
    seed: int
    steps: int
    batch_tokens: int
    learning_rate: float
    lora_rank: int
    width: int
    attention: str
    packing: Packing = field(repr=False)
    held_out: Packing | None = field(default=None, repr=False)
    micro_tokens: int = 8192
    checkpointing: bool = False

    def make_model(self, device: torch.device, dtype: torch.dtype) -> Transformer:
        """The checkpoint's model, or that with adapters, over packed rows."""
        attention = PackedAttention(self.attention)
        model = load_model(find_checkpoint(self.model), attention, device, torch.float32)
        if self.lora_rank:
            add_adapters(model, self.lora_rank, self.seed, dtype)
        if self.checkpointing:
            recompute_activations(model)
        return model

    def corpus(self) -> Packing:
        """The data."""
        return self.packing

    def identity(self) -> dict[str, Any]:
        """All but the data itself, and what only decides how much memory a step takes."""
        left_out = ("packing", "held_out", "micro_tokens", "checkpointing")
        return {x.name: getattr(self, x.name) for x in fields(self) if x.name not in left_out}


class Tuning(Training):
    """A run in a folder; see `Training`."""

    recipe: TuningRecipe

    @cached_property
    def source(self) -> Path:
        """The folder of the checkpoint that is trained on."""
        return find_checkpoint(self.recipe.model)

    def learn(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Take one step; return the summed loss of this rank's rows and the norm of the gradient.

        What is minimised is the mean over the learned tokens of the whole batch, however it is
        split into micro-batches and over processes.
        """
        world, count = self.world, int(batch.learned[:, 1:].sum())
        total = torch.zeros((), device=self.device)
        parts = self._parts(batch)
        for number, rows in enumerate(parts, start=1):
            exchange_gradients(self.model, number == len(parts))
            loss = self._loss(batch, rows)
            (loss * world.size / count).backward()
            total += loss.detach()
        norm = clip_gradients([p for p in self.model.parameters() if p.requires_grad], CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total, norm

    def _parts(self, batch: PackedBatch) -> list[range]:
        """This rank's rows in micro-batches. Every rank goes through the model as often as others:
        some get a part without a row.
        """
        rows, width = batch.tokens.shape
        size = max(1, self.recipe.micro_tokens // width)
        mine, most = self.world.share(rows), -(-rows // self.world.size)
        starts = range(mine.start, mine.start + most, size)
        return [range(at, max(at, min(at + size, mine.stop))) for at in starts]

    def _loss(self, batch: PackedBatch, rows: range) -> Tensor:
        """The summed loss of some rows, by the arithmetic in which the model will be used."""
        model = self.model
        if self.dtype == torch.float32 or self.world.size > 1:  # FSDP rounds by itself
            return summed_loss(model, model, batch, rows)
        weights = {name: p.to(self.dtype) for name, p in model.named_parameters()}

        def forward(tokens: Tensor, **options: Any) -> Tensor:
            return torch.func.functional_call(model, weights, (tokens,), options)

        return summed_loss(model, forward, batch, rows)

    def measure(self, progress: Progress) -> None:
        """Record and show the mean loss per token on what is held out, if anything is.

        Raises:
            ValueError: it is not finite.
        """
        if self.recipe.held_out is None:
            return
        model = self.plain(self.dtype)
        if not self.world.main:  # the others wait for it at the next step
            return
        loss, count = 0.0, 0
        with torch.no_grad():
            for batch in self.recipe.held_out[0]:
                loss += summed_loss(model, model, batch, range(len(batch.tokens))).item()
                count += int(batch.learned[:, 1:].sum())
        mean = loss / count
        if not math.isfinite(mean):
            raise ValueError(
                f"the held-out loss is {mean} at step {self.step}; a smaller --lr helps"
            )
        self.record(evaluation=HELD_OUT, loss=round(mean, 5), tokens=count)
        perplexity = math.exp(min(mean, 99.0))
        progress.say(f"held out: loss {mean:.4f}, perplexity {perplexity:.2f}")

    def held_out_losses(self) -> dict[int, float]:
        """What was measured so far, by step."""
        lines = read_text(self.folder / LOG).splitlines()
        records = [parse_json(line, str(self.folder / LOG)) for line in lines]
        return {x["step"]: x["loss"] for x in records if x.get("evaluation") == HELD_OUT}

    def publish(self) -> None:
        """Write the checkpoint: the files of the one that was trained on, with other weights of the
        same dtype. The state of the run is then deleted.
        """
        whole = self.plain(torch.float32)
        if not self.world.main:
            return
        dtype = load_model(self.source).model.embed_tokens.weight.dtype
        for path in (x for pattern in TEXT_FILES for x in self.source.glob(pattern)):
            if path.name not in NOT_COPIED:
                write_text(self.folder / path.name, read_text(path))
        save_model(whole, self.folder, dtype, read_json(self.source / "config.json"))
        self.finish()


def summed_loss(model: Transformer, forward: Any, batch: PackedBatch, rows: range) -> Tensor:
    """The summed loss of some rows of a batch; of none, a 0 that has a gradient all the same.

    Args:
        model: whose attention is packed.
        forward: of the model, perhaps with other weights.
        batch: packed rows.
        rows: which of them.
    """
    device = model.model.embed_tokens.weight.device
    which = rows or range(1)
    tokens = torch.from_numpy(batch.tokens[which.start : which.stop]).long().to(device)
    learned = torch.from_numpy(batch.learned[which.start : which.stop]).to(device)
    if not rows:
        learned = torch.zeros_like(learned)
    assert isinstance(model.attention, PackedAttention)
    model.attention.lay([batch.lengths[i] for i in which], tokens.shape[1], device)
    wanted = learned.roll(-1, 1)  # the logits of a token are about the next one
    wanted[:, -1] = False
    logits = forward(tokens, wanted=wanted)
    logprobs, _ = token_logprobs(logits[None], tokens[:, 1:][learned[:, 1:]][None])
    return -logprobs.sum()
