"""A run on data of one's own: its recipe, the loss on what is held out, the checkpoint."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transformer.generation.progress import Progress
from transformer.model.decoder import Transformer
from transformer.model.files import parse_json, read_text
from transformer.model.logprobs import token_logprobs
from transformer.model.weights import find_checkpoint, load_model, save_trained
from transformer.training.lora import add_adapters
from transformer.training.recompute import recompute_activations
from transformer.training.run import LOG, Forward, Recipe, Training, rows_of
from transformer.training.tuning.packing import PackedAttention, PackedBatch, Packing

HELD_OUT = "held out"  # how the log calls the loss on it
WORSE = 1.05  # a held-out loss so many times the lowest deserves a word


@dataclass(frozen=True, kw_only=True)
class Tuning(Recipe):
    """A checkpoint and the data that it is trained on.

    Attributes:
        data: its fingerprint.
        model: what is trained on, see `find_checkpoint`.
        lora_rank: of the adapters; 0 trains all weights.
        width: tokens of a packed row.
        packing: the data.
        held_out: what the loss is measured on; None: nothing.
        micro_tokens: how many tokens go through the model at a time.
        checkpointing: recompute activations in the backward pass.
    """

    data: str
    model: str
    lora_rank: int
    width: int
    packing: Packing = field(compare=False, repr=False)
    held_out: Packing | None = field(default=None, compare=False, repr=False)
    micro_tokens: int = field(default=8192, compare=False)
    checkpointing: bool = field(default=False, compare=False)

    framed = True
    clip = 1.0  # of the gradient of the mean loss per token

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

    def loss(self, model: Transformer, forward: Forward, batch: PackedBatch, rows: range) -> Tensor:
        """As in `Recipe`, from the wanted logits alone: a vocabulary may be large."""
        device = model.model.embed_tokens.weight.device
        tokens, learned = (x.to(device, non_blocking=True) for x in rows_of(batch, rows))
        assert isinstance(model.attention, PackedAttention)
        model.attention.lay([batch.lengths[i] for i in rows or (0,)], tokens.shape[1], device)
        wanted = learned.roll(-1, 1)  # the logits of a token are about the next one
        wanted[:, -1] = False
        logits = forward(tokens, wanted=wanted)
        logprobs, _ = token_logprobs(logits[None], tokens[:, 1:][learned[:, 1:]][None])
        return -logprobs.sum()

    def weighed(self, batch: PackedBatch) -> float:
        """The learned tokens of the batch: what is minimised is their mean."""
        return int(batch.learned[:, 1:].sum())

    def measure(self, training: Training, progress: Progress) -> None:
        """Record and show the mean loss per token on what is held out, if anything is.

        Raises:
            ValueError: it is not finite.
        """
        if self.held_out is None:
            return
        model = training.plain(training.dtype)
        if not training.world.main:  # the others wait for it at the next step
            return
        loss, count = 0.0, 0.0
        with torch.no_grad():
            for batch in self.held_out[0]:
                loss += self.loss(model, model, batch, range(len(batch.tokens))).item()
                count += self.weighed(batch)
        mean = loss / count
        if not math.isfinite(mean):
            helps = (
                "a smaller --lr helps"
                if training.step
                else f"the weights of {self.model} are broken"
            )
            raise ValueError(f"the held-out loss is {mean} at step {training.step}; {helps}")
        training.record(evaluation=HELD_OUT, loss=round(mean, 5), tokens=count)
        perplexity = math.exp(min(mean, 99.0))
        progress.say(f"held out: loss {mean:.4f}, perplexity {perplexity:.2f}")

    def publish(self, training: Training, progress: Progress) -> None:
        """Write the checkpoint: the files of the one that was trained on, with other weights of the
        same dtype.
        """
        whole, folder = training.plain(torch.float32), training.folder
        if not training.world.main:
            return
        source = find_checkpoint(self.model)
        dtype = load_model(source).model.embed_tokens.weight.dtype
        save_trained(whole, source, folder, dtype)
        progress.say(f"{_course(training)}ask it: python -m transformer.generate --model {folder}")


def _course(training: Training) -> str:
    """How the held-out loss went, as a line of text; "" if none was measured."""
    path = training.folder / LOG
    records = [parse_json(line, str(path)) for line in read_text(path).splitlines()]
    losses = {x["step"]: x["loss"] for x in records if x.get("evaluation") == HELD_OUT}
    if not losses:
        return ""
    first, last = losses[min(losses)], losses[max(losses)]
    best = min(losses, key=losses.__getitem__)
    said = f"held-out loss: {first:.4f} before, {last:.4f} now"
    if last > WORSE * losses[best]:
        said += (
            f", {losses[best]:.4f} at step {best}: it rose again; fewer steps, a smaller --lr"
            " or more data may help"
        )
    return said + "\n"
