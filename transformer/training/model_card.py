"""The model card that ships with a checkpoint: everything in it is measured or recorded."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from transformer.generation.engine import generate
from transformer.model.decoder import Transformer
from transformer.training import byte_tokenizer as bytes_
from transformer.training.corpus import Teacher
from transformer.training.evaluate import Score

QUESTIONS = {
    "chat": (
        "What is 357+486?",
        "subtract 58 from 412",
        "Sort 17, 3 and 9 in descending order.",
        "How many r's are in strawberry?",
        "hello, who are you?",
        "What is the capital of France?",
    ),
    "countdown": (
        "Use 3, 8, 4 to make 96.",
        "Make 131 from 5, 17 and 46.",
        "What is 357+486?",
    ),
}

ABILITIES = {
    "chat": (
        "It can add\n"
        "and subtract, multiply by one digit, compare, sort, reverse and count, and it makes small"
        " talk. It\nknows nothing else, and is meant to say so."
    ),
    "countdown": (
        "It makes a\n"
        "number out of three others, each used once, with `+`, `-` and `*`; it adds, subtracts\n"
        "and multiplies by one digit. It knows nothing else."
    ),
}
FORMS = {
    "chat": (
        "A worked reply is `<think>steps</think><answer>527</answer>`; small talk is answered in"
        " plain text."
    ),
    "countdown": "A reply is `<think>steps</think><answer>(8*4)*3</answer>`.",
}
CAREFUL = """\
Its teacher was careful: every demonstration in the training data is right. Its errors
are its own."""
SLOPPY = """\
Its teacher was deliberately sloppy: it guessed {hasty:.0%} of the sums and differences
blindly, and forgot {forget:.0%} of the carries."""
IMPATIENT = """\
Its teacher was deliberately impatient: it looks for a way by trying, and after each try
that failed it gave up with a probability of {give_up:.0%}."""
TEACHING = """\
    {command}

{seconds:.0f} seconds on {machine},
{tokens:,} tokens with padding and prompts. `training.jsonl` is the log. The data is generated from
the seed; none of it comes from anywhere else."""
REINFORCED = """\
It was reinforced: it began as `{start}`, whose teacher guessed {hasty:.0%} of the sums and
differences blindly, and forgot {forget:.0%} of the carries. Nobody showed it how to do better. It
answered problems, a verifier said which answers were right, and those became more likely (GRPO)."""
REINFORCING = """\
    {commands}

{seconds} seconds, evaluations left out; evaluated on {machine}. {answers:,} answers.
`training.jsonl` is the log. The problems are generated from the seed; none of them comes from
anywhere else."""
BEGINNING = """\
This is a starting point for
reinforcement learning, not a model to use."""


def describe(
    name: str,
    model: Transformer,
    tasks: str,
    origin: str,
    made: str,
    scores: dict[str, dict[str, Score]],
    *,
    problems: int,
) -> str:
    """The card's text; the model is asked for its samples.

    Args:
        name: of the checkpoint.
        model: as it ships.
        tasks: that it can do, one of the corpus's mixes.
        origin: where its skills come from, in sentences.
        made: the command that made it, and what that took.
        scores: for each way of decoding, of each skill.
        problems: behind each score.
    """
    card = Path(__file__).with_name("model_card.md").read_text(encoding="utf-8")
    return card.format(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        abilities=ABILITIES[tasks],
        origin=origin,
        form=FORMS[tasks],
        made=made,
        problems=problems,
        table=table(scores),
        samples=samples(model, QUESTIONS[tasks]),
    )


def character(teacher: Teacher) -> str:
    """How the teacher was, in words."""
    faults = []
    if teacher.hasty or teacher.forget:
        faults.append(SLOPPY.format(**vars(teacher)))
    if teacher.patience < 1:
        faults.append(IMPATIENT.format(give_up=1 - teacher.patience))
    return " ".join([*faults, BEGINNING]) if faults else CAREFUL


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


def samples(model: Transformer, questions: Sequence[str]) -> str:
    """Some questions and the model's replies, as indented text."""
    prompts = [[*bytes_.encode_turn("user", q), *bytes_.encode_prompt()] for q in questions]
    tokenizer = bytes_.tokenizer()
    completions, _ = generate(model, tokenizer, prompts, max_tokens=256, eos=(bytes_.IM_END,))
    text = "\n\n".join(f"> {q}\n{c.text}" for q, c in zip(questions, completions))
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))
