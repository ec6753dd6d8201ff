"""What `python -m transformer.train` does with `--data` or `--task`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from transformer.generation.command import flag, refuse_below
from transformer.model.decoder import Transformer, choose_attention
from transformer.model.weights import find_checkpoint, load_config
from transformer.tasks.task import Task
from transformer.training.tuning.chats import Chat, demonstrations, read_chats, split, with_system
from transformer.training.tuning.documents import Document, Encoder, fingerprint, fitted
from transformer.training.tuning.packing import Packing
from transformer.training.tuning.run import Tuning

# Options that mean another thing, or nothing, for data of one's own, with their defaults there.
DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("teacher", "hasty", "forget", "tasks", "patience", "workers", "steps", "lr")),
    **dict.fromkeys(("eval_every", "eval_problems")),
    "batch_tokens": 4096,
    "attention": "auto",
    "save_every": 100,
}
FOR_SKILLS = ("teacher", "hasty", "forget", "tasks", "patience", "workers", "eval_problems")
NUMBER, SWITCH = {"type": int}, {"action": "store_true"}
# Their defaults stand here and not in the parser, so that it is seen whether they are given.
OWN: Mapping[str, tuple[Any, str, Mapping[str, Any]]] = {
    "model": ("reinforced", "what to train on: a folder, or a name of the hub ({})", {}),
    "eval_data": (None, "held-out chats (one in 16 of --data)", {"type": Path, "metavar": "FILE"}),
    "system": (None, "system prompt for chats that have none", {"metavar": "TEXT"}),
    "examples": (2048, "of --task ({})", NUMBER),
    "epochs": (3, "times through the data, unless --steps says ({})", NUMBER),
    "context": (None, "tokens of a row (what the longest chat needs)", NUMBER),
    "drop_long": (False, "leave out chats that are longer than a row", SWITCH),
    "lora_rank": (0, "train adapters of this rank only (0: all weights)", NUMBER),
    "micro_tokens": (8192, "tokens in memory at a time ({})", NUMBER),
    "checkpointing": (False, "recompute activations in the backward pass", SWITCH),
}
AS_GIVEN = ("model", "seed", "batch_tokens", "lora_rank", "micro_tokens", "checkpointing")
FILE_ONLY, TASK_ONLY = ("eval_data",), ("examples",)
SHOWN = 3  # chats that are named in a note
SMALL = 10_000_000  # parameters: a smaller model learns at a higher rate
LEAST_WIDTH = 1024  # of a row, if the model's context has it


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options for data of one's own."""
    group = parser.add_argument_group("data of your own (docs/use/your_data.md)")
    group.add_argument("--data", type=Path, metavar="FILE", help="chats or texts, .jsonl or .txt")
    what = "demonstrations of a task, or of module:Class"
    group.add_argument("--task", metavar="TASK", help=what)
    for name, (default, help, how) in OWN.items():
        group.add_argument(flag(name), default=argparse.SUPPRESS, help=help.format(default), **how)


def is_own(arguments: argparse.Namespace) -> bool:
    """Whether the arguments ask for data of one's own."""
    return arguments.data is not None or arguments.task is not None


def check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together by a ValueError, and fill in what was not given."""
    given = [name for name in OWN if hasattr(arguments, name)]
    if not is_own(arguments):
        if given:
            raise ValueError(f"{flag(given[0])} needs --data or --task")
        return
    if arguments.data is not None and arguments.task is not None:
        raise ValueError("--data and --task are two kinds of data; a run has one")
    ours, theirs = ("--data", TASK_ONLY) if arguments.data is not None else ("--task", FILE_ONLY)
    if unfit := [x for x in FOR_SKILLS if getattr(arguments, x) is not None]:
        raise ValueError(f"{flag(unfit[0])} is for the built-in skills; leave it out with {ours}")
    if unfit := [x for x in given if x in theirs]:
        raise ValueError(f"{flag(unfit[0])} does not go with {ours}")
    if arguments.steps is not None and "epochs" in given:
        raise ValueError("--steps and --epochs both say how long to train; one is enough")
    for name, (default, *_) in OWN.items():
        if name not in given:
            setattr(arguments, name, default)
    least = {"examples": 1, "epochs": 1, "context": 2, "lora_rank": 0, "micro_tokens": 1}
    refuse_below(arguments, **least, batch_tokens=1)


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
