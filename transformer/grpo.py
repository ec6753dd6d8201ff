"""`python -m transformer.grpo`: reinforcement learning with rewards that can be checked.

    python -m transformer.grpo --recipe sums        learns three-digit sums, in a minute on a laptop
    python -m transformer.grpo --data mine.jsonl    learns from a file (docs/use/your_data.md)
    python -m transformer.grpo plot runs/sums ...   draws and compares runs
    torchrun --nproc-per-node 4 -m transformer.grpo --recipe sums       the same, on four GPUs

The model that learns was taught by a sloppy teacher. It is asked problems, answers each several
times, and a verifier says which answers are right: those become more likely than the others of
their group. That is in rl/: loss.py has the formulas, rollout.py and sampler.py the sampling,
learner.py an update, trainer.py a step. This file has the options and what is written.

An interrupted run goes on from its last saved state when the same command is given again. Progress
goes to standard error, the record of it to RUN/metrics.jsonl.
"""

import argparse
import math
import shutil
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from flash_versions.files import temporary_of
from transformer import missing
from transformer.generation.command import Parser, flag, refuse_below, run_training
from transformer.generation.progress import Progress
from transformer.model.files import only_writer
from transformer.model.weights import save_trained
from transformer.rl import curves
from transformer.rl.groups import describe
from transformer.rl.recipes import RECIPES, Settings
from transformer.rl.run import BEST, FINAL, METRICS, ROLLOUTS, SAMPLES, STATE, Run
from transformer.rl.trainer import Trainer, resolved
from transformer.training import trackers
from transformer.training.parallel import World, alike, connected, own_device, undamaged
from transformer.training.trackers import TRACKERS, Tracker, open_tracker

COLLAPSE = 0.20  # of the range of the held-out rewards; of 0 and 1 that is 20 points
SHOWN = 3  # completions of an evaluation that are kept
MANY = 0.5  # a share that deserves a word


def train(
    trainer: Trainer,
    run: Run,
    *,
    save_every: int = 10,
    say: Callable[[str], None] = lambda line: None,
    watch: Callable[[int, dict[str, float]], None] = lambda step, measured: None,
) -> None:
    """Run a trainer to the last step, from where the run's folder says.

    Args:
        save_every: steps between two saved states.
        say: is told in words what a reader of the metrics might miss.
        watch: is given the metrics of each step and evaluation.

    Raises:
        ValueError: a reward that cannot be used, or a policy that fell apart.
    """
    settings = trainer.settings
    with trainer.world.together():
        state = run.load()
    best, extent, seconds = 0.0, 0.0, 0.0
    if state is not None:
        with undamaged(run.folder / STATE, f"delete {run.folder}"):
            trainer.restore(state)
            best, extent, seconds = (float(state[x]) for x in ("best", "extent", "seconds"))
        say(f"continuing at step {trainer.step}")
    else:
        best, extent = evaluate(trainer, run, -math.inf, seconds, watch)
    del state  # its file is to be replaced
    started = time.perf_counter() - seconds
    quiet = 0
    while trainer.step < settings.steps:
        groups = trainer.roll_out()
        if settings.save_rollouts is not None:
            run.log(ROLLOUTS, *trainer.records(groups))
        learning = time.perf_counter()
        measured = trainer.learn(groups.rollouts)
        measured |= describe(groups.rollouts, settings.group, trainer.world)
        now = time.perf_counter()
        seconds = now - started
        tokens = trainer.world.total(sum(len(r.completion.tokens) for r in groups.rollouts))
        measured |= {
            "drawn": groups.drawn,
            "replayed": groups.replayed,
            "rollout_seconds": groups.seconds,
            "learn_seconds": now - learning,
            "tokens_per_second": tokens / (groups.seconds + now - learning),
            "seconds": seconds,
        }
        digits = {name: float(f"{value:.6g}") for name, value in measured.items()}
        run.log(METRICS, {"step": trainer.step, **digits})
        watch(trainer.step, measured)
        quiet = remark(measured, quiet, say)
        last = trainer.step == settings.steps
        if last or (settings.eval_every and trainer.step % settings.eval_every == 0):
            reward, found = evaluate(trainer, run, best, seconds, watch)
            started += time.perf_counter() - now  # evaluations are not counted
            extent = max(extent, found)
            with trainer.world.together():
                if settings.stop_on_collapse and reward < best - COLLAPSE * extent:
                    raise ValueError(
                        f"the held-out reward fell from {best:.3g} to {reward:.3g}: the policy is"
                        f" collapsing, which a smaller {flag('lr')} than {settings.lr:g} prevents;"
                        f" the best checkpoint is in {run.folder / BEST}"
                    )
            best = max(best, reward)
        if last or trainer.step % save_every == 0:
            run.save({**trainer.state(), "best": best, "extent": extent, "seconds": seconds})
    if not settings.eval_every and trainer.world.main:  # else the last evaluation drew it
        draw_curve(run)
    publish(trainer, run, FINAL)
    run.finish()


def evaluate(
    trainer: Trainer,
    run: Run,
    best: float,
    seconds: float,
    watch: Callable[[int, dict[str, float]], None],
) -> tuple[float, float]:
    """Measure on held-out problems, keep the checkpoint if it is the best so far, redraw the curve;
    returns the mean reward of sampled answers and the range of their rewards.
    """
    if not trainer.settings.eval_every:
        return 0.0, 0.0
    scores, greedy = trainer.evaluate()
    run.log(METRICS, {"evaluation": trainer.step, "seconds": round(seconds, 2), **scores})
    samples = (
        {
            "step": trainer.step,
            "question": rollout.problem.question,
            "completion": rollout.completion.text,
            "reward": rollout.reward,
            "finish_reason": rollout.completion.finish_reason,
        }
        for rollout in greedy[:SHOWN]
    )
    run.log(SAMPLES, *samples)
    watch(trainer.step, scores)
    if scores["reward"] >= best:
        publish(trainer, run, BEST)
    if trainer.world.main:
        draw_curve(run)
    return scores["reward"], scores["reward_range"]


def draw_curve(run: Run) -> None:
    """Draw a run's curve; without matplotlib, which `_run_in` notes once, the run goes on."""
    if not missing("plot", "matplotlib"):
        curves.draw([run.folder], run.folder / "curve.png")


def publish(trainer: Trainer, run: Run, name: str) -> None:
    """Write a checkpoint into the run's folder; a half-written one never has its name."""
    model = trainer.result()
    if not trainer.world.main:
        return
    folder = (run.folder / name).resolve()  # a link to it stays one
    temporary = temporary_of(folder)
    try:
        save_trained(model, trainer.folder, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remark(measured: dict[str, float], quiet: int, say: Callable[[str], None]) -> int:
    """Say what needs a word, at most every ten steps; returns the steps for which to be quiet."""
    if quiet:
        return quiet - 1
    if measured.get("truncated", 0.0) > MANY:
        say(
            f"{measured['truncated']:.0%} of the completions hit the limit and earn no more than"
            f" the worst of their group that ended: if those in {SAMPLES} are unfinished, a larger"
            f" {flag('max_tokens')} helps"
        )
        return 10
    if measured["learned"] == 0:
        say(
            "all groups have equal rewards, so there was nothing to learn from: the problems are"
            f" too hard or too easy (the mean reward is {measured.get('reward', 0.0):.2g}), or a"
            f" higher {flag('temperature')} is needed"
        )
        return 10
    return 0


class Display:
    """The progress of a run, and its tracker."""

    KEYS = {"reward": ".2f", "length": ".0f", "entropy": ".3f", "skipped": ".0%", "kl": ".3f"}

    def __init__(self, progress: Progress, tracker: Tracker) -> None:
        self._held_out = ""
        self._progress, self._tracker = progress, tracker

    def watch(self, step: int, measured: dict[str, float]) -> None:
        """Show the metrics of a step or of an evaluation."""
        held_out = "greedy" in measured  # its names are also those of a step
        self._tracker.log(step, {"held out": measured} if held_out else measured)
        if held_out:
            shares = [x for x in measured if x not in ("length", "reward", "reward_range")]
            parts = [f"{name} {measured[name]:.1%}" for name in shares]
            self._held_out = f"{measured['sampled']:.0%}"
            if measured["reward"] != measured["sampled"]:  # the task has a reward of its own
                self._held_out = f"{measured['reward']:.3g}"
                parts.append(f"reward {self._held_out}")
            self._progress.say(f"step {step:>4}  held-out: {'  '.join(parts)}")
            return
        shown = {k: f"{measured[k]:{form}}" for k, form in self.KEYS.items() if k in measured}
        clipped = measured.get("clipped_low", 0.0) + measured.get("clipped_high", 0.0)
        shown["clipped"] = f"{clipped:.1%}"
        shown["tokens/s"] = f"{measured['tokens_per_second']:,.0f}"
        if self._held_out:
            shown["held-out"] = self._held_out
        self._progress.step(step, shown, measured["seconds"])


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; ValueError for options that are wrong."""
    parser = Parser(
        prog="python -m transformer.grpo",
        description=__doc__.split("\n")[0],
        epilog="python -m transformer.grpo plot RUN ... draws and compares runs",
    )
    add = parser.add_argument
    add("--recipe", choices=tuple(RECIPES), help="settings that were found to work")
    add("--out", type=Path, metavar="RUN", help="the run's folder (runs/RECIPE)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add("--save-every", type=int, default=10, help="steps between two saved states (10)")
    add("--report-to", choices=TRACKERS, default="none", help="a tracker of experiments (none)")
    add("--quiet", action="store_true", help="say nothing but errors")
    for one in (one for one in fields(Settings) if one.metadata):
        add(flag(one.name), default=argparse.SUPPRESS, **option(one))
    arguments = parser.parse_args(argv)
    refuse_below(arguments, save_every=1)
    names = {one.name for one in fields(Settings)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    given = RECIPES.get(arguments.recipe, {}) | given
    if given.get("data") is not None:
        if "task" in given:
            raise ValueError(
                f"--data and the task {given['task']} are two kinds of problems; a run has one"
            )
        given["task"] = Path(given["data"]).stem  # what the run's folder is called
    return arguments, Settings(**given)


def option(one: Field) -> dict[str, Any]:
    """How argparse reads a setting."""
    help = f"{one.metadata['help']} ({one.default})"
    if one.type is bool:
        return {"action": argparse.BooleanOptionalAction, "help": help}
    if get_origin(one.type) is Literal:
        return {"choices": get_args(one.type), "help": help}
    kind: Any = one.type
    if isinstance(kind, types.UnionType):  # with None, the default
        kind = get_args(kind)[0]
    if get_origin(kind) is list:
        return {"type": get_args(kind)[0], "nargs": "+", "help": help}
    return {"type": kind, "help": help}


def _run(argv: Sequence[str]) -> None:
    if argv[:1] == ["plot"]:
        curves.main(argv[1:])
        return
    with alike():
        arguments, settings = parse(argv)
        device = own_device(arguments.device)
    with connected(device) as world, ExitStack() as stack:
        _run_in(world, arguments, settings, stack)


def _run_in(
    world: World, arguments: argparse.Namespace, settings: Settings, stack: ExitStack
) -> None:
    progress = Progress(arguments.quiet or not world.main)
    with world.together():
        settings = resolved(settings, world.device, world, progress.say)
        folder = arguments.out or Path("runs") / (arguments.recipe or settings.task)
        trackers.package(arguments.report_to)
        if world.main:
            stack.enter_context(only_writer(folder))
        run = Run(folder, settings, world)
    if run.finished:
        progress.say(f"{run.folder} is finished: {run.folder / 'curve.png'}")
        return
    with world.together():
        trainer, tracker = Trainer(settings, world.device, world), Tracker()
        if world.main:
            tracker = open_tracker(arguments.report_to, run.folder, asdict(settings))
            stack.callback(tracker.close)
    undrawn = missing("plot", "matplotlib")
    if undrawn:
        progress.say(f"note: the run will have no curve.png: {undrawn}")
    stack.callback(progress.close)
    progress.start(settings.steps)
    watch = Display(progress, tracker).watch
    train(trainer, run, save_every=arguments.save_every, say=progress.say, watch=watch)
    progress.close()
    if not undrawn:
        progress.say(f"the curve: {run.folder / 'curve.png'}")
    progress.say(f"ask it: python -m transformer.generate --model {run.folder / FINAL}")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code is that of `run_training`."""
    return run_training(lambda: _run(sys.argv[1:] if argv is None else argv), flag("micro_batch"))


if __name__ == "__main__":
    sys.exit(main())
