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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from transformer.generation.command import Parser, attention_name, refuse_below, run_training
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
    add("--teacher", choices=("careful", "sloppy"), default="careful", help="(careful)")
    add("--hasty", type=float, help=f"sloppy: share of blind guesses ({SLOPPY.hasty})")
    add("--forget", type=float, help=f"sloppy: share of forgotten carries ({SLOPPY.forget})")
    add("--tasks", choices=tuple(MIXES), default="chat", help="what to teach (chat)")
    add("--patience", type=float, help=f"countdown: share of failures tried again ({PATIENCE})")
    add("--out", type=Path, required=True, metavar="DIR", help="the checkpoint's folder")
    add("--seed", type=int, default=0, help="of the weights and the data (0)")
    steps = "of the optimiser (6000; with --data or --task see --epochs)"
    batch_tokens = "per step, padding included (65536; with --data or --task 4096)"
    rate = "peak of the learning rate (3e-3; with --data or --task 1e-3 or 2e-5)"
    add("--steps", type=int, default=6000, help=steps)
    add("--batch-tokens", type=int, default=65536, help=batch_tokens)
    add("--lr", type=float, default=3e-3, help=rate)
    add("--attention", type=attention_name, default="sdpa", help="a version, or mine.py (sdpa)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add("--workers", type=int, help="processes that generate data (one per core but one)")
    add("--save-every", type=int, default=500, help="steps between two saved states (500)")
    add("--eval-every", type=int, default=1000, help="steps between evaluations; 0: none (1000)")
    add("--eval-problems", type=int, default=512, help="of each skill, in the last one (512)")
    add("--report-to", choices=TRACKERS, default="none", help="a tracker of experiments (none)")
    add("--quiet", action="store_true", help="say nothing but errors")
    tuning.add_options(parser)
    arguments = parser.parse_args(argv)
    if tuning.is_own(arguments):
        parser.set_defaults(**tuning.DEFAULTS)
        arguments = parser.parse_args(argv)
    tuning.check(arguments)
    if arguments.teacher == "careful" and (arguments.hasty, arguments.forget) != (None, None):
        raise ValueError("--hasty and --forget need --teacher sloppy")
    if arguments.tasks != "countdown" and arguments.patience is not None:
        raise ValueError("--patience needs --tasks countdown")
    refuse_below(arguments, workers=0, save_every=1, eval_every=0, eval_problems=1)
    return arguments


def _run(argv: Sequence[str]) -> None:
    with alike():
        arguments = parse(argv)
        device = own_device(arguments.device)
        own = tuning.is_own(arguments)
        task = find_task(arguments.task) if own and arguments.task is not None else None
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
