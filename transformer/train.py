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
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

import flash_versions
from transformer.generation.command import Parser, attention_name, run_training
from transformer.generation.progress import Progress
from transformer.model.decoder import Transformer
from transformer.model.files import only_writer, write_text
from transformer.model.weights import load_model, save_model
from transformer.rl.recipes import find_task
from transformer.training import byte_tokenizer, model_card, trackers
from transformer.training.corpus import MIXES, Teacher
from transformer.training.evaluate import TAUGHT, Score, as_record, evaluate
from transformer.training.parallel import alike, connected, own_device
from transformer.training.run import Recipe, Schedule, Training
from transformer.training.trackers import TRACKERS, open_tracker
from transformer.training.tuning import command as tuning
from transformer.training.tuning.run import Tuning

# The sloppy teacher gets about 27 % of the sums of three digits right.
SLOPPY = Teacher(hasty=0.35, forget=0.5)
# With this patience a teacher solves about 35 % of the countdown problems.
PATIENCE = 0.75

Run = TypeVar("Run", bound=Training)


def train(
    training: Training,
    *,
    workers: int,
    log_every: int = 20,
    save_every: int = 500,
    eval_every: int = 1000,
    eval_problems: int = 64,
    measure: Callable[[], object] | None = None,
    progress: Progress | None = None,
) -> None:
    """Run to the last step.

    Args:
        training: where to begin.
        workers: processes that generate data; 0 generates it in between.
        log_every: steps per line.
        save_every: steps between two saved states.
        eval_every: steps between two evaluations; 0 for none.
        eval_problems: held-out problems of each skill in an evaluation.
        measure: evaluates instead; all ranks call it together.
        progress: shows how far it is; None: nothing does.

    Raises:
        ValueError: the loss is no longer finite.
    """
    steps, batches = training.recipe.steps, training.batches(workers)
    progress = progress or Progress(quiet=True)
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
        if training.step % log_every == 0 or training.step == steps:
            mean = world.sum(loss).item() / learned
            with world.together():
                if not math.isfinite(mean):
                    raise ValueError(
                        f"the loss is {mean} at step {training.step}; a smaller --lr helps"
                    )
            now = time.perf_counter()
            fields = {
                "loss": round(mean, 5),
                "learning_rate": round(training.recipe.rate_at(training.step - 1), 8),
                "gradient_norm": round(norm.item(), 5),
                "tokens_per_second": round(seen / (now - since)),
                "seconds": round(training.seconds, 1),
            }
            training.record(**fields)
            shown = _shown(fields)
            loss.zero_()
            learned, seen, since = 0, 0, now
        progress.step(training.step, shown, training.seconds)
        if eval_every and training.step % eval_every == 0 and training.step < steps:
            if measure is not None:
                measure()
            elif (model := training.plain(training.dtype)) and world.main:
                score(training, model, eval_problems, 0, progress)  # others wait at the next step
            since = time.perf_counter()
            started += since - now  # what is measured between steps is not counted
        if training.step % save_every == 0 or training.step == steps:
            training.save()
    progress.close()


def score(
    training: Training, model: Transformer, problems: int, seed: int, progress: Progress
) -> dict[str, dict[str, Score]]:
    """Scores of greedy and of sampled replies by skill; they are also recorded and shown."""
    scores, recipe = {}, training.recipe
    assert isinstance(recipe, Recipe)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        scores[name] = evaluate(
            model, problems, temperature=temperature, seed=seed, skills=TAUGHT[recipe.tasks]
        )
        training.record(evaluation=name, problems=problems, scores=as_record(scores[name]))
    progress.say(model_card.table(scores))
    return scores


def publish(
    training: Training, command: str, problems: int, device: torch.device, progress: Progress
) -> None:
    """Write the checkpoint and what is known about it; the state of the run is then deleted.

    What is evaluated is what ships: the weights as they lie in the folder, rounded to bf16.
    """
    whole, recipe = training.plain(torch.float32), training.recipe
    if not training.world.main:
        return
    assert isinstance(recipe, Recipe)
    save_model(whole, training.folder)
    for name, content in byte_tokenizer.files().items():
        write_text(training.folder / name, content)
    attention = partial(flash_versions.attention, version="sdpa")
    model = load_model(training.folder, attention, device, training.dtype)
    scores = score(training, model, problems, 1, progress)
    made = model_card.TEACHING.format(
        command=command,
        seconds=training.seconds,
        machine=model_card.machine(model.model.embed_tokens.weight.device),
        tokens=training.step * training.recipe.batch_tokens,
    )
    card = model_card.describe(
        training.folder.resolve().name,
        model,
        recipe.tasks,
        model_card.character(recipe.teacher),
        made,
        scores,
        problems=problems,
    )
    write_text(training.folder / "README.md", card)
    training.finish()


def _shown(fields: Mapping[str, float]) -> dict[str, str]:
    """Measurements in few characters."""
    return {
        "loss": f"{fields['loss']:.4f}",
        "lr": f"{fields['learning_rate']:.2e}",
        "|grad|": f"{fields['gradient_norm']:.3f}",
        "tokens/s": f"{fields['tokens_per_second']:,}",
    }


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
    for name, least in (("workers", 0), ("save_every", 1), ("eval_every", 0), ("eval_problems", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    return arguments


def _run(argv: Sequence[str]) -> None:
    with alike():
        arguments = parse(argv)
        if tuning.is_own(arguments):
            device = own_device(arguments.device)
            task = None if arguments.task is None else find_task(arguments.task)
            planned = tuning.plan(arguments, task, device)
    if tuning.is_own(arguments):
        _tune(arguments, planned, device)
        return
    with alike():
        recipe = _recipe(arguments)
        recipe.corpus()  # refuses what it cannot do, before any work
        device = own_device(arguments.device)
    workers = arguments.workers
    if workers is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(16, max(1, (os.cpu_count() or 2) // here - 1))
    with _begun(Training, recipe, arguments, device) as (training, progress):
        train(
            training,
            workers=workers,
            save_every=arguments.save_every,
            eval_every=arguments.eval_every,
            eval_problems=min(64, arguments.eval_problems),
            progress=progress,
        )
        command = shlex.join(["python", "-m", "transformer.train", *argv])
        publish(training, command, arguments.eval_problems, device, progress)


def _tune(arguments: argparse.Namespace, planned: tuning.Plan, device: torch.device) -> None:
    """Train on data of one's own."""
    with _begun(Tuning, planned.recipe, arguments, device) as (training, progress):
        for note in planned.notes:
            progress.say(note)
        measure = partial(training.measure, progress)
        if planned.eval_every and not training.step:
            measure()
        train(
            training,
            workers=0,
            log_every=max(1, min(20, planned.recipe.steps // 20)),
            save_every=arguments.save_every,
            eval_every=planned.eval_every,
            measure=measure,
            progress=progress,
        )
        if planned.eval_every:
            measure()
        training.publish()
        if training.world.main:
            progress.say(tuning.ending(arguments.out, training.held_out_losses()))


@contextmanager
def _begun(
    kind: type[Run], recipe: Schedule, arguments: argparse.Namespace, device: torch.device
) -> Iterator[tuple[Run, Progress]]:
    """A run, which has its folder for itself and a tracker, and its progress; ranks but the first
    say and send nothing.
    """
    with connected(device) as world, ExitStack() as stack:
        with world.together():
            trackers.check(arguments.report_to)
            if world.main:
                stack.enter_context(only_writer(arguments.out))
        training = kind(recipe, arguments.out, device, world)
        progress = Progress(arguments.quiet or not world.main)
        stack.callback(progress.close)
        with world.together():
            if world.main:
                settings = recipe.identity()
                training.tracker = open_tracker(arguments.report_to, training.folder, settings)
                stack.callback(training.tracker.close)
        if training.step:
            progress.say(f"continuing at step {training.step}")
        yield training, progress


def _recipe(arguments: argparse.Namespace) -> Recipe:
    teacher = SLOPPY if arguments.teacher == "sloppy" else Teacher()
    if arguments.tasks == "countdown":
        teacher = replace(teacher, patience=PATIENCE)
    dials = {name: getattr(arguments, name) for name in ("hasty", "forget", "patience")}
    given = {name: value for name, value in dials.items() if value is not None}
    if arguments.attention.endswith(".py"):
        flash_versions.load_version(arguments.attention)
    return Recipe(
        replace(teacher, **given),
        arguments.seed,
        arguments.steps,
        arguments.batch_tokens,
        arguments.lr,
        arguments.tasks,
        attention=arguments.attention,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code is that of `run_training`."""
    return run_training(lambda: _run(sys.argv[1:] if argv is None else argv), "--batch-tokens")


if __name__ == "__main__":
    sys.exit(main())
