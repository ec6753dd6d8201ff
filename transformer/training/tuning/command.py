"""What `python -m transformer.train` does with `--data` or `--task`."""

import argparse
from collections.abc import Sequence

import torch

from transformer.model.decoder import Transformer, choose_attention
from transformer.model.weights import find_checkpoint, load_config
from transformer.tasks.task import Task
from transformer.training.tuning.chats import Chat, demonstrations, read_chats, split, with_system
from transformer.training.tuning.documents import Document, Encoder, fingerprint, fitted
from transformer.training.tuning.packing import Packing
from transformer.training.tuning.run import Tuning

AS_GIVEN = ("model", "seed", "batch_tokens", "lora_rank", "micro_tokens", "checkpointing")
SHOWN = 3  # chats that are named in a note
SMALL = 10_000_000  # parameters: a smaller model learns at a higher rate
LEAST_WIDTH = 1024  # of a row, if the model's context has it


def plan(arguments: argparse.Namespace, device: torch.device, task: Task | None) -> Tuning:
    """Read the data and decide what the checked arguments leave open; `task` is that of --task.

    Raises:
        OSError, ValueError: data or a checkpoint that cannot be used, in a sentence.
    """
    trained, held_out = _chats(arguments, task)  # first: bad lines are told at once
    folder = find_checkpoint(arguments.model)
    config, encoder = load_config(folder), Encoder(folder)
    encoder.tokenizer.refuse_another(folder, config.vocab_size)
    sides = [[x for chat in chats for x in encoder.encode(chat)] for chats in (trained, held_out)]
    width = _width(arguments.context, config.trained_positions, [*sides[0], *sides[1]])
    (trained_on, dropped), (measured_on, more_dropped) = (
        fitted(side, width, arguments.drop_long, what) if side else ([], [])
        for side, what in zip(sides, ("chat to train on", "held-out chat"), strict=True)
    )
    packing = Packing(trained_on, arguments.seed, width, arguments.batch_tokens)
    steps = packing.steps(arguments.epochs) if arguments.steps is None else arguments.steps
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention, notes = choose_attention(arguments.attention, config, device, dtype, simulated=False)
    with torch.device("meta"):
        size = sum(p.numel() for p in Transformer(config).parameters())
    rate = (1e-3 if size < SMALL else 2e-5) * (10 if arguments.lora_rank else 1)
    rate = rate if arguments.lr is None else arguments.lr
    an_epoch = packing.steps(1)
    tokens = sum(len(x.tokens) for x in trained_on)
    learned = sum(int(x.learned.sum()) for x in trained_on)
    said = (
        f"{_count(trained_on)} chats to learn from, {tokens:,} tokens, {learned:,} of them learned;"
        f" {_count(measured_on)} held out; {an_epoch} steps an epoch, {steps} in all;"
        f" learning rate {rate:g}"
    )
    left_out = _left_out([*dropped, *more_dropped], [*trained_on, *measured_on], width)
    held_out_rows = Packing(measured_on, None, width, arguments.micro_tokens)
    return Tuning(
        **{name: getattr(arguments, name) for name in AS_GIVEN},
        data=fingerprint([*trained_on, *measured_on]),
        steps=steps,
        learning_rate=rate,
        width=width,
        attention=attention,
        packing=packing,
        held_out=held_out_rows if measured_on else None,
        eval_every=an_epoch if arguments.eval_every is None else arguments.eval_every,
        log_every=max(1, min(20, steps // 20)),
        notes=[said, *left_out, *notes, *_without_end(trained_on, encoder)],
    )


def _chats(arguments: argparse.Namespace, task: Task | None) -> tuple[list[Chat], list[Chat]]:
    """What is trained on, and what is held out."""
    if task is not None:
        seed, count = arguments.seed, arguments.examples
        held_out = demonstrations(task, max(1, count // 16), seed, held_out=True)
        sides = demonstrations(task, count, seed), held_out
    elif arguments.eval_data is not None:
        sides = read_chats(arguments.data), read_chats(arguments.eval_data)
    else:
        sides = split(read_chats(arguments.data))
    trained, measured = (with_system(side, arguments.system) for side in sides)
    return trained, measured


def _width(context: int | None, most: int, documents: Sequence[Document]) -> int:
    """Tokens of a row: as many as are asked for, or as the longest conversation needs."""
    if context is not None:
        if context > most:
            raise ValueError(f"--context {context} is more than the model's context of {most}")
        return context
    lengths = [len(x.tokens) for x in documents if not x.learned[1:].all()]
    return min(most, max(LEAST_WIDTH, *lengths, 0))


def _count(documents: Sequence[Document]) -> int:
    """The number of chats that they come from."""
    return len({x.name for x in documents})


def _left_out(dropped: Sequence[Document], kept: Sequence[Document], width: int) -> list[str]:
    """A note about the chats that --drop-long leaves out, if it does."""
    names = [*dict.fromkeys(x.name for x in dropped)]
    if not names:
        return []
    chats = "1 chat is" if len(names) == 1 else f"{len(names)} chats are"
    cut = len({*names} & {x.name for x in kept})
    some = f" (of {cut} only the last turns)" if cut else ""
    shown = "; ".join(names[:SHOWN]) + ("; ..." if len(names) > SHOWN else "")
    return [f"{chats} longer than {width} tokens and left out{some}: {shown}"]


def _without_end(documents: Sequence[Document], encoder: Encoder) -> list[str]:
    """A note if the model would not learn to stop."""
    last = [int(x.tokens[x.learned][-1]) for x in documents]
    if any(token in encoder.eos for token in last):
        return []
    return [
        f"no chat ends in a token by which {encoder.folder} ends an answer, so the model does not"
        " learn to stop"
    ]
