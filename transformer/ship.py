"""`python -m transformer.ship RUN FOLDER`: a finished GRPO run becomes a checkpoint with a card.

The card says how it was made, what it can do on held-out problems, skill by skill, and what it
answers. Its evaluation is that of the taught models, so that cards can be compared.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from transformer.generation.command import Parser, choose_device, refuse_below, run_training
from transformer.model.files import read_json, write_text
from transformer.model.weights import load_model
from transformer.rl.recipes import RECIPES, Settings, flag
from transformer.rl.run import CONFIG, FINAL, read_metrics
from transformer.train import SLOPPY
from transformer.training import model_card
from transformer.training.evaluate import WAYS, as_record, evaluate

LOG_EVERY = 20  # steps between two that the log keeps
START = "sloppy"  # what the run has to begin as


def command_of(settings: Settings) -> str:
    """The command that makes a run, as short as its recipe allows."""
    base, words = Settings(), ["python", "-m", "transformer.grpo"]
    if settings.task in RECIPES:
        base = Settings(**RECIPES[settings.task])
        words += ["--recipe", settings.task]
    for name, value in asdict(settings).items():
        if value == getattr(base, name):
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words += [flag(name), *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def read_run(run: Path) -> tuple[Settings, list[dict[str, Any]]]:
    """Settings and metrics of a run.

    Raises:
        ValueError: it is not finished, or did not begin as the model that the card tells of.
        OSError: there is no run.
    """
    lines = read_metrics(run)
    settings = Settings(**read_json(run / CONFIG))
    if not (run / FINAL / "config.json").exists():
        raise ValueError(f"{run} is not finished; the command that began it goes on with it")
    if settings.model != START:
        raise ValueError(
            f"{run} began as {settings.model}, but the card tells of {START}'s teacher"
        )
    return settings, lines


def ship(run: Path, folder: Path, problems: int, device: torch.device) -> None:
    """Write the checkpoint of a finished run with its card and its log; files of the same names are
    replaced. It is evaluated on so many held-out problems of each skill.

    Raises:
        ValueError, OSError: see `read_run`.
    """
    settings, lines = read_run(run)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # What is evaluated is what ships.
    model = model_card.ship(load_model(run / FINAL, dtype=torch.float32), folder, device, dtype)
    scores = {name: evaluate(model, problems, temperature=x, seed=1) for name, x in WAYS.items()}
    kept = [line for line in lines if line.get("step", 0) % LOG_EVERY == 0]
    kept += [
        {"evaluation": name, "problems": problems, "scores": as_record(found)}
        for name, found in scores.items()
    ]
    write_text(folder / "training.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
    made = model_card.TEXTS["reinforcing"].format(
        command=command_of(settings),
        seconds=f"{lines[-1]['seconds']:,.0f}",
        machine=model_card.machine(device),
        answers=int(sum(line.get("drawn", 0) for line in lines)),
    )
    origin = model_card.TEXTS["reinforced"].format(start=START, **vars(SLOPPY))
    model_card.write(folder, model, "chat", origin, made, scores, problems=problems)
    sys.stderr.write(model_card.table(scores) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Ship; the exit code is 2 for a wrong request."""

    def run() -> None:
        parser = Parser(prog="python -m transformer.ship", description=__doc__.split("\n")[0])
        parser.add_argument("run", type=Path, metavar="RUN", help="of transformer.grpo")
        parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the checkpoint")
        parser.add_argument("--problems", type=int, default=512, help="of each skill (512)")
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
        arguments = parser.parse_args(argv)
        refuse_below(arguments, problems=1)
        ship(arguments.run, arguments.folder, arguments.problems, choose_device(arguments.device))

    return run_training(run, "--problems")


if __name__ == "__main__":
    sys.exit(main())
