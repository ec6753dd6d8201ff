"""Training data out of nothing: chats of the tasks, taught by a teacher, in padded batches.

The data is a pure function of a seed. It is cut into chunks, each generated from (seed, number) on
its own, so that any number of processes generates the same stream in the same order, and training
resumes at a chunk's number. Within a chunk, chats of about the same length share a batch: padding
then costs a few per cent instead of more than half.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from transformer.tasks import phrases
from transformer.tasks.beyond import number_of
from transformer.tasks.skills import TASKS
from transformer.tasks.task import REPLY, Problem, Task
from transformer.training import byte_tokenizer as bytes_

# What a model may be taught: shares of the tasks, in per cent for each.
MIXES = {
    "chat": {
        "add": 14, "subtract": 14, "signed": 4, "spelled": 9, "multiply": 6, "compare": 5,
        "sort": 12, "reverse": 5, "count": 5, "small talk": 7, "unknown": 5, "beyond": 14,
    },
    "countdown": {"countdown": 80, "add": 8, "subtract": 6, "multiply": 6},
}  # fmt: skip
CONVERSATIONS = 0.08  # share of chats with more than one question
FOLLOW_UPS = 0.6  # share of later questions that build on the answer before them
NO_THINKING = 0.03  # share of replies that begin with an empty thought that was put there
LENGTH_MULTIPLE = 16

_empty_thought = [bytes_.SPECIAL_TOKENS[tag] for tag in ("<think>", "</think>")]


@dataclass(frozen=True)
class Teacher:
    """Who demonstrates the replies; by default carefully.

    Attributes:
        hasty: probability of a blind guess instead of written columns.
        forget: probability of forgetting any one carry or borrowed ten.
        patience: probability of trying again, after each try of a search that failed.
    """

    hasty: float = 0.0
    forget: float = 0.0
    patience: float = 1.0

    def __post_init__(self):
        for name in ("hasty", "forget", "patience"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, not {getattr(self, name)}")

    def reply(self, rng: Random, problem: Problem) -> str:
        """Reply to a problem."""
        return problem.task.demonstrate(
            rng, *problem.arguments, hasty=self.hasty, forget=self.forget, patience=self.patience
        )


CAREFUL = Teacher()


def draw_problem(rng: Random, tasks: str) -> Problem:
    """A problem from one of the MIXES, none that is held out."""
    mix = MIXES[tasks]
    return TASKS[rng.choices([*mix], [*mix.values()])[0]].sample(rng)


def follow_up(rng: Random, number: int, held_out: bool = False) -> Problem:
    """A question about the last answer, such as "and plus 5?"."""
    while True:
        name = rng.choice(
            ("add", "subtract", "multiply") if 0 <= number < 100 else ("add", "subtract")
        )
        second = rng.randint(0, 9) if name == "multiply" else number_of(rng, rng.randint(1, 3))
        task, arguments = TASKS[name], tuple[Any, ...]((number, second))
        if number < 0:
            task, arguments = TASKS["signed"], (number, "+" if name == "add" else "-", second)
        if task.held_out(*arguments) == held_out:
            question = phrases.say(rng, phrases.FOLLOW_UP[name], b=second)
            return Problem(task, arguments, question)


class FollowUps(Task):
    """The second question of a conversation, about the right answer to a sum or a difference."""

    name = "follow-ups"

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a question with the conversation before it."""
        task = TASKS[rng.choice(("add", "add", "subtract"))]
        first = task.sample(rng)
        while len(first.task.answer(*first.arguments).lstrip("-")) > 4:
            first = task.sample(rng)
        reply = CAREFUL.reply(rng, first)
        history = (*first.messages, {"role": "assistant", "content": reply})
        number = int(first.task.answer(*first.arguments))
        return replace(follow_up(rng, number, held_out), history=history)


def addressed(rng: Random, problem: Problem) -> Problem:
    """The problem as it was put in training: sometimes under a system prompt."""
    return problem.under(phrases.system_prompt(rng) or None)


def stated_number(reply: str) -> int | None:
    """The number that a reply's answer states, if it is one of up to four digits."""
    match = REPLY.fullmatch(reply)
    return int(match[2]) if match and re.fullmatch(r"-?[0-9]{1,4}", match[2]) else None


def draw_chat(rng: Random, teacher: Teacher, tasks: str = "chat") -> tuple[list[int], list[bool]]:
    """A chat: its tokens, and which of them the model learns to say.

    A follow-up builds on the answer that was given, right or wrong.
    """
    tokens: list[int] = []
    learned: list[bool] = []

    def append(part: Sequence[int], is_learned: bool) -> None:
        tokens.extend(part)
        learned.extend([is_learned] * len(part))

    if system := phrases.system_prompt(rng):
        append(bytes_.encode_turn("system", system), False)
    turns = 1 if rng.random() > CONVERSATIONS else 2 + int(rng.expovariate(0.6))
    number = None
    for _ in range(turns):
        if number is not None and rng.random() < FOLLOW_UPS:
            problem = follow_up(rng, number)
        else:
            problem = draw_problem(rng, tasks)
        reply = teacher.reply(rng, problem)
        prompt = [*bytes_.encode_turn("user", problem.question), *bytes_.encode_prompt()]
        if rng.random() < NO_THINKING:
            prompt += _empty_thought
            spoken = reply.partition("</think>")[2] or reply
        else:
            spoken = reply
        said = [*bytes_.encode(spoken), bytes_.IM_END]
        if len(tokens) + len(prompt) + len(said) >= bytes_.MAX_POSITIONS:
            break
        append(prompt, False)
        append(said, True)
        append(b"\n", False)
        stated = stated_number(reply)
        number = number if stated is None else stated
    return tokens, learned


@dataclass(frozen=True)
class ChatBatch:
    """Chats side by side, padded on the right.

    Attributes:
        tokens: (rows, length) uint16.
        learned: (rows, length) bool, the tokens that count in the loss.
    """

    tokens: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """An endless list of chunks of batches.

    Attributes:
        teacher: who demonstrates.
        seed: any integer.
        batch_tokens: no batch has more tokens, padding included.
        tasks: which of the MIXES.
        chunk_batches: about how many batches make a chunk.
    """

    teacher: Teacher
    seed: int
    batch_tokens: int
    tasks: str = "chat"
    chunk_batches: int = 16

    def __post_init__(self):
        if self.tasks not in MIXES:
            raise ValueError(
                f"no mix of tasks is called {self.tasks}; there are {', '.join(MIXES)}"
            )
        if self.batch_tokens < bytes_.MAX_POSITIONS:
            raise ValueError(
                f"a batch must hold at least {bytes_.MAX_POSITIONS} tokens, the longest chat,"
                f" not {self.batch_tokens}"
            )

    def __getitem__(self, chunk: int) -> list[ChatBatch]:
        """Generate a chunk: the same batches for the same number, always."""
        rng = Random(f"{self.seed} {chunk}")
        chats, total = [], 0
        while total < self.chunk_batches * self.batch_tokens:
            chats.append(draw_chat(rng, self.teacher, self.tasks))
            total += len(chats[-1][0])
        chats.sort(key=lambda chat: -len(chat[0]))
        batches, start = [], 0
        while start < len(chats):
            length = -(-len(chats[start][0]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            rows = self.batch_tokens // length
            said, learned = zip(*chats[start : start + rows])
            tokens = pad_right(said, length, np.uint16, bytes_.PAD)
            batches.append(ChatBatch(tokens, pad_right(learned, length, bool)))
            start += rows
        rng.shuffle(batches)
        return batches


def pad_right(rows: Sequence[Any], width: int, dtype: type, pad: int = 0) -> np.ndarray:
    """Rows of numbers as an array (rows, width), filled up behind them."""
    padded: np.ndarray = np.full((len(rows), width), pad, dtype)
    for line, row in zip(padded, rows):
        line[: len(row)] = row
    return padded
