"""`python -m transformer.train`: train the shipped model from nothing, or any model on your data.

    python -m transformer.train --out my-model                          the shipped model's skills
    python -m transformer.train --data chats.jsonl --out my-model       your chats or texts
    python -m transformer.train --task mine:Task --out my-model         your task's demonstrations

Without data of one's own the model learns what a teacher demonstrates (see `corpus`), in minutes on
one GPU, by the usual recipe: AdamW, linear warm-up, cosine decay, clipped gradients, and the loss
on the assistant's tokens only, the end of the turn among them. On a GPU the arithmetic is bf16, as
it will be in use; the weights that the optimiser changes are fp32. With data, the model is one that
is there already, by default the shipped one; see `tuning`.

An interrupted run goes on from its last saved state when the same command is given again. Progress
goes to standard error, the record of it to DIR/training.jsonl.

On four GPUs: `torchrun --nproc-per-node 4 -m transformer.train ...`. The batches are the same, and
each GPU takes its rows of them.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from transformer.generation.command import Parser, attention_name, flag, refuse_below, run_training
from transformer.generation.progress import Progress
from transformer.model.files import only_writer
from transformer.rl.recipes import find_task
from transformer.training import teaching, trackers
from transformer.training.corpus import MIXES
from transformer.training.parallel import alike, connected, own_device
from transformer.training.run import STATE, Training
from transformer.training.teaching import PATIENCE, SLOPPY
from transformer.training.trackers import TRACKERS, open_tracker
from transformer.training.tuning import command as tuning

UNFIT = object()  # the default of an option where it is none
NUMBER, REAL, SWITCH = {"type": int}, {"type": float}, {"action": "store_true"}
FILE, NAMED = {"type": Path, "metavar": "FILE"}, {"type": attention_name}
OWN = "with --data or --task"
# Option -> its default for the built-in skills, that for data of one's own, what --help says of it,
# and how it is read. The parser has no defaults, so that it is seen which options are given.
OPTIONS: Mapping[str, tuple[Any, Any, str, Mapping[str, Any]]] = {
    "teacher": ("careful", UNFIT, "({})", {"choices": ("careful", "sloppy")}),
    "hasty": (None, UNFIT, f"sloppy: share of blind guesses ({SLOPPY.hasty})", REAL),
    "forget": (None, UNFIT, f"sloppy: share of forgotten carries ({SLOPPY.forget})", REAL),
    "tasks": ("chat", UNFIT, "what to teach ({})", {"choices": tuple(MIXES)}),
    "patience": (None, UNFIT, f"countdown: share of failures tried again ({PATIENCE})", REAL),
    "workers": (None, UNFIT, "processes that generate data (one per core but one)", NUMBER),
    "eval_problems": (512, UNFIT, "of each skill, in the last evaluation ({})", NUMBER),
    "steps": (6000, None, f"of the optimiser ({{}}; {OWN} see --epochs)", NUMBER),
    "batch_tokens": (65536, 4096, f"per step, padding included ({{}}; {OWN} {{}})", NUMBER),
    "lr": (3e-3, None, f"peak of the learning rate ({{}}; {OWN} 1e-3 or 2e-5)", REAL),
    "attention": ("sdpa", "auto", f"a version, or mine.py ({{}}; {OWN} {{}})", NAMED),
    "save_every": (500, 100, f"steps between two saved states ({{}}; {OWN} {{}})", NUMBER),
    "eval_every": (1000, None, f"steps between evaluations, or 0 ({{}}; {OWN} an epoch)", NUMBER),
    "model": (UNFIT, "reinforced", "what is trained: a folder, or a name of the hub ({1})", {}),
    "eval_data": (UNFIT, None, "held-out chats (one in 16 of --data)", FILE),
    "system": (UNFIT, None, "system prompt for chats that have none", {"metavar": "TEXT"}),
    "examples": (UNFIT, 2048, "of --task ({1})", NUMBER),
    "epochs": (UNFIT, 3, "times through the data, unless --steps says ({1})", NUMBER),
    "context": (UNFIT, None, "tokens of a row (what the longest chat needs)", NUMBER),
    "drop_long": (UNFIT, False, "leave out chats that are longer than a row", SWITCH),
    "lora_rank": (UNFIT, 0, "train adapters of this rank only (0: all weights)", NUMBER),
    "micro_tokens": (UNFIT, 8192, "tokens in memory at a time ({1})", NUMBER),
    "checkpointing": (UNFIT, False, "recompute activations in the backward pass", SWITCH),
}


def train(training: Training, save_every: int, progress: Progress) -> None:
    """Run to the last step, with a saved state every `save_every` steps.

    Raises:
        ValueError: the loss is no longer finite.
    """
    recipe, batches = training.recipe, training.batches()
    steps, eval_every = recipe.steps, recipe.eval_every
    progress.start(steps)
    before, started = training.seconds, time.perf_counter()
    loss, learned, seen, since = torch.zeros((), device=training.device), 0, 0, started
    world = training.world
    while training.step < steps:
        batch = next(batches)
        batch_loss, norm = training.learn(batch)
        loss += batch_loss
        learned += int(batch.learned[:, 1:].sum())
        seen += batch.tokens.size
        now = time.perf_counter()
        training.seconds = before + now - started
        shown = None
        if training.step % recipe.log_every == 0 or training.step == steps:
            mean = world.reduce(loss).item() / learned
            with world.together():
                if not math.isfinite(mean):
                    raise ValueError(
                        f"the loss is {mean} at step {training.step}; a smaller --lr helps"
                    )
            now = time.perf_counter()
            fields = {
                "loss": round(mean, 5),
                "learning_rate": round(recipe.rate_at(training.step - 1), 8),
                "gradient_norm": round(norm.item(), 5),
                "tokens_per_second": round(seen / (now - since)),
                "seconds": round(training.seconds, 1),
            }
            training.record(**fields)
            shown = {
                "loss": f"{mean:.4f}",
                "lr": f"{fields['learning_rate']:.2e}",
                "|grad|": f"{fields['gradient_norm']:.3f}",
                "tokens/s": f"{fields['tokens_per_second']:,}",
            }
            loss.zero_()
            learned, seen, since = 0, 0, now
        progress.step(training.step, shown, training.seconds)
        if eval_every and training.step % eval_every == 0 and training.step < steps:
            recipe.measure(training, progress)
            since = time.perf_counter()
            started += since - now  # what is measured between steps is not counted
        if training.step % save_every == 0 or training.step == steps:
            training.save()
    progress.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ValueError for options that are wrong or contradict each other."""
    parser = Parser(prog="python -m transformer.train", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the checkpoint's folder")
    add("--seed", type=int, default=0, help="of the weights and the data (0)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add("--report-to", choices=TRACKERS, default="none", help="a tracker of experiments (none)")
    add("--quiet", action="store_true", help="say nothing but errors")
    own = parser.add_argument_group("data of your own (docs/use/your_data.md)")
    own.add_argument("--data", type=Path, metavar="FILE", help="chats or texts, .jsonl or .txt")
    own.add_argument("--task", help="demonstrations of a task, or of module:Class")
    for name, (skills, data, help, how) in OPTIONS.items():
        group = own if skills is UNFIT else parser
        help = help.format(skills, data)
        group.add_argument(flag(name), default=argparse.SUPPRESS, help=help, **how)
    arguments = parser.parse_args(argv)
    complete(arguments)
    least = {"examples": 1, "epochs": 1, "context": 2, "lora_rank": 0, "micro_tokens": 1}
    least |= {"workers": 0, "save_every": 1, "eval_every": 0, "eval_problems": 1}
    refuse_below(arguments, **least, batch_tokens=1)
    return arguments


def complete(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together by a ValueError, and fill in what was not given."""
    given, own = {*vars(arguments)}, is_own(arguments)
    if arguments.data is not None and arguments.task is not None:
        raise ValueError("--data and --task are two kinds of data; a run has one")
    ours, theirs = ("--data", "examples") if arguments.task is None else ("--task", "eval_data")
    for name, (skills, data, *_) in OPTIONS.items():
        default = data if own else skills
        if name not in given:
            setattr(arguments, name, None if default is UNFIT else default)
        elif default is UNFIT and own:
            raise ValueError(f"{flag(name)} is for the built-in skills; leave it out with {ours}")
        elif default is UNFIT:
            raise ValueError(f"{flag(name)} needs --data or --task")
    if theirs in given:
        raise ValueError(f"{flag(theirs)} does not go with {ours}")
    if {"steps", "epochs"} <= given:
        raise ValueError("--steps and --epochs both say how long to train; one is enough")
    if arguments.teacher == "careful" and (arguments.hasty, arguments.forget) != (None, None):
        raise ValueError("--hasty and --forget need --teacher sloppy")
    if arguments.tasks != "countdown" and arguments.patience is not None:
        raise ValueError("--patience needs --tasks countdown")


def is_own(arguments: argparse.Namespace) -> bool:
    """Whether the arguments ask for data of one's own."""
    return arguments.data is not None or arguments.task is not None


def _run(argv: Sequence[str]) -> None:
    with alike():
        arguments = parse(argv)
        device = own_device(arguments.device)
        own = is_own(arguments)
        task = None if arguments.task is None else find_task(arguments.task)
        recipe = tuning.plan(arguments, device, task) if own else teaching.plan(arguments, argv)
    with connected(device) as world, ExitStack() as stack:
        with world.together():
            trackers.package(arguments.report_to)
            if world.main:
                stack.enter_context(only_writer(arguments.out))
        training = Training(recipe, arguments.out, device, world)
        progress = Progress(arguments.quiet or not world.main)
        stack.callback(progress.close)
        with world.together():
            if world.main:
                settings = recipe.identity()
                training.tracker = open_tracker(arguments.report_to, training.folder, settings)
                stack.callback(training.tracker.close)
        if training.step:
            progress.say(f"continuing at step {training.step}")
        for note in recipe.notes:
            progress.say(note)
        framed = recipe.framed and recipe.eval_every
        if framed and not training.step:
            recipe.measure(training, progress)
        train(training, arguments.save_every, progress)
        if framed:
            recipe.measure(training, progress)
        recipe.publish(training, progress)
        if world.main:
            (training.folder / STATE).unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code is that of `run_training`."""
    return run_training(lambda: _run(sys.argv[1:] if argv is None else argv), "--batch-tokens")


if __name__ == "__main__":
    sys.exit(main())
