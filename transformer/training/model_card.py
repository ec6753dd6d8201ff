"""The model card that ships with a checkpoint: everything in it is measured or recorded."""

import os
import platform
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import flash_versions
from transformer.model.decoder import Transformer
from transformer.model.files import write_text
from transformer.model.weights import load_model, save_model
from transformer.tasks.skills import TASKS
from transformer.tasks.task import Problem
from transformer.training import byte_tokenizer as bytes_
from transformer.training.corpus import Teacher
from transformer.training.evaluate import Score, replies

QUESTIONS = {
    "chat": (
        Problem(TASKS["add"], (357, 486), "What is 357+486?"),
        Problem(TASKS["subtract"], (412, 58), "subtract 58 from 412"),
        Problem(TASKS["sort"], ("descending", (17, 3, 9)), "Sort 17, 3 and 9 in descending order."),
        Problem(TASKS["count"], ("strawberry", "r"), "How many r's are in strawberry?"),
        Problem(TASKS["small talk"], ("identity",), "hello, who are you?"),
        Problem(TASKS["unknown"], ("unknown",), "What is the capital of France?"),
    ),
    "countdown": (
        Problem(TASKS["countdown"], ((3, 8, 4), 96), "Use 3, 8, 4 to make 96."),
        Problem(TASKS["countdown"], ((5, 17, 46), 131), "Make 131 from 5, 17 and 46."),
        Problem(TASKS["add"], (357, 486), "What is 357+486?"),
    ),
}

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def ship(model: Transformer, folder: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Write a checkpoint with the byte tokenizer, rounded to bf16; the model as it lies there."""
    save_model(model, folder)
    for name, content in bytes_.files().items():
        write_text(folder / name, content)
    attention = partial(flash_versions.attention, version="sdpa")
    return load_model(folder, attention, device, dtype)


def write(
    folder: Path,
    model: Transformer,
    tasks: str,
    origin: str,
    made: str,
    scores: dict[str, dict[str, Score]],
    *,
    problems: int,
) -> None:
    """Write the card of a checkpoint, with samples that the model makes now.

    Args:
        tasks: that it can do, one of the corpus's mixes.
        origin: where its skills come from, in sentences.
        made: the command that made it, and what that took.
        scores: for each way of decoding, of each skill.
        problems: behind each score.
    """
    card = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    card = card.format(
        name=folder.resolve().name,
        parameters=sum(p.numel() for p in model.parameters()),
        abilities=TEXTS["abilities"][tasks],
        origin=origin,
        form=TEXTS["forms"][tasks],
        made=made,
        problems=problems,
        table=table(scores),
        samples=samples(model, QUESTIONS[tasks]),
    )
    write_text(folder / "README.md", card)


def character(teacher: Teacher) -> str:
    """How the teacher was, in words."""
    faults = []
    if teacher.hasty or teacher.forget:
        faults.append(TEXTS["sloppy"].format(**vars(teacher)))
    if teacher.patience < 1:
        faults.append(TEXTS["impatient"].format(give_up=1 - teacher.patience))
    return " ".join([*faults, TEXTS["beginning"]]) if faults else TEXTS["careful"]


def machine(device: torch.device) -> str:
    """Where this runs, in words."""
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    else:
        chip = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return f"{chip}, torch {torch.__version__}"


def table(scores: dict[str, dict[str, Score]]) -> str:
    """A Markdown table: a row per skill, for each way of decoding the share that is right."""
    names = list(scores)
    lines = [
        "| skill | " + " | ".join(f"{name} | form" for name in names) + " |",
        "|---|" + "--:|--:|" * len(names),
    ]
    for skill in scores[names[0]]:
        cells = [f"{100 * x:.1f} %" for n in names for x in vars(scores[n][skill]).values()]
        lines.append(f"| {skill} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def samples(model: Transformer, problems: Sequence[Problem]) -> str:
    """The model's greedy reply to some problems, each with its task's verdict, as indented text."""
    text = "\n\n".join(
        f"> {problem.question}\n{reply or '...'}\n({verdict(problem, reply)})"
        for problem, reply in zip(problems, replies(model, problems))
    )
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))


def verdict(problem: Problem, reply: str | None) -> str:
    """Whether a reply is right, and what would be."""
    if reply is not None and problem.reward(reply):
        return "right"
    return f"wrong; this would be right: {problem.task.answer(*problem.arguments)}"
