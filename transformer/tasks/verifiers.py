"""Rewards for answers to problems from a file: numbers, exact texts, functions of one's own, sums.

    number                       1 if the completion's answer is the problem's number, else 0
    exact                        1 if it is the problem's text, else 0
    mine:short                   what the function `short` of mine.py returns
    number + 0.2 * mine:short    a weighted sum; a negative weight punishes

A function gets the completion and the problem, the object of its line in the file, and returns a
number:

    def short(completion, problem):
        return float(len(completion) < 200)

One with a parameter `cut_off` is also told whether the limit, and not the model, ended the
completion.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from transformer.tasks.named import find_named
from transformer.tasks.numbers import FACTORS, as_number, last_number

Reward = Callable[..., float]  # (completion, problem), perhaps cut_off

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
BOXED = re.compile(r"\\boxed\s*\{")
# What Markdown and LaTeX put around an answer; a full stop may follow.
MARKUP = [
    re.compile(pattern + r"\.?", re.DOTALL)
    for pattern in (
        r"```\w*\s((?:(?!```).)+)```",
        r"\*\*\*([^*]+)\*\*\*",
        r"\*\*((?:(?!\*\*).)+)\*\*",
        r"\*([^*]+)\*",
        r"__?([^_a-zA-Z]+)__?",  # not __init__
        r"`([^`]+)`",
        r"\$\$((?:\\.|[^$\\])+)\$\$",
        r"\$((?:\\.|[^$\\])+)\$",
        r"\\\(((?:(?!\\\)).)+)\\\)",
        r"\\\[((?:(?!\\\]).)+)\\\]",
        r"\\(?:f?box|text(?:bf|it|rm)?|math(?:bf|it|rm))\{((?:[^{}]|\{[^{}]*\})+)\}",
    )
]
# Behind a number, in words or as LaTeX has it: apples, km/h, \text{ cm}^2. Not words of a number.
COUNTS = "|".join([*FACTORS, "k", "dozen", "plus", "minus", "times", "or", "not", "is"])
UNIT = re.compile(
    rf"(?<=\d)(?:\s+(?!(?i:{COUNTS})s?\b)[A-Za-z][A-Za-z /]*"
    r"|\W*\\(?:text|mathrm|mbox)\{[^{}\d]*\})"
    r"(?:\^\{?\d\}?|[²³])?\.?$"
)
TERM = re.compile(r"(?:([-+]?[\d.]+(?:e-?\d+)?)\s*\*\s*)?([\w.]+(?::\w+)?)")


def final_answer(completion: str) -> str | None:
    """The answer that a completion states, in `<answer>` tags, in `\\boxed{}` or behind `####`: the
    last if it states several, None if it states none. What is in a thought does not count, nor does
    the markup around the answer.
    """
    answer, inner = None, _marked(spoken(completion))
    while inner is not None:  # one mark may be in another
        answer, inner = inner, _marked(inner)
    return None if answer is None else unwrapped(answer)


def stated(text: str) -> str:
    """The final answer, or all that is said if there is none, without the markup around it."""
    answer = final_answer(text)
    return unwrapped(spoken(text)) if answer is None else answer


def unwrapped(text: str) -> str:
    r"""A text without the markup around all of it, as in `**72**` or `$\text{72}$`, and without
    what LaTeX needs in it: `\$`, `\%`, `1{,}000`.
    """
    text, before = text.strip(), None
    while text != before:
        before = text
        for markup in MARKUP:
            if found := markup.fullmatch(text):
                text = found[1].strip()
    return re.sub(r"\\([$%])", r"\1", text).replace("{,}", ",")


def _marked(text: str) -> str | None:
    if found := TAGGED.findall(text):
        return found[-1]
    if (boxed := _boxed(text)) is not None:
        return boxed
    _, hashes, after = text.rpartition("####")
    return after.partition("\n")[0] if hashes else None


def spoken(completion: str) -> str:
    """A completion without its thought; nothing is left if the thought does not end."""
    before, end, after = completion.rpartition("</think>")
    if end:
        return after
    return "" if "<think>" in completion else completion


def _boxed(text: str) -> str | None:
    """What is in the last `\\boxed{}`, whose braces may hold others."""
    starts, depth = [found.end() for found in BOXED.finditer(text)], 1
    for place in range(starts[-1], len(text)) if starts else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[starts[-1] : place]
    return None


def number(completion: str, problem: Mapping[str, Any], cut_off: bool = False) -> float:
    """1 if the final answer is the problem's number: 12, 12.0 and $12 are one, see `numbers`, and a
    unit may follow. Where a completion states no final answer, the last number in it counts. One
    that was cut off is never right.
    """
    answer = final_answer(completion)
    value = last_number(spoken(completion)) if answer is None else as_number(answer)
    if answer is not None and value is None:
        value = as_number(UNIT.sub("", answer))
    right = value is not None and value == as_number(stated(problem["answer"]))
    return float(right and not cut_off)


def exact(completion: str, problem: Mapping[str, Any], cut_off: bool = False) -> float:
    """1 if the final answer, or all that is said if there is none, is the problem's text, but for
    white space and the markup around both. A completion that was cut off is never right.
    """
    said = stated(completion).split()
    return float(bool(said) and said == stated(problem["answer"]).split() and not cut_off)


class RewardError(ValueError):
    """A reward that cannot be used: its name and what it did."""


def as_reward(name: str, value: Any) -> float:
    """What a reward returned as a float: a number, or an array or a tensor of one.

    Raises:
        RewardError: it is something else, or not finite.
    """
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = float(plain) if isinstance(plain, Real) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several elements, or too large
        number = math.nan
    if not math.isfinite(number):
        shown = " ".join(repr(value).split())
        raise RewardError(
            f"{name} returned {shown:.80} ({type(value).__name__}), which is no finite number"
        )
    return number


VERIFIERS: Mapping[str, Reward] = {"number": number, "exact": exact}


@dataclass(frozen=True)
class Term:
    """A reward and its weight in the sum."""

    name: str
    weight: float
    reward: Reward

    def value(self, completion: str, problem: Mapping[str, Any], cut_off: bool = False) -> float:
        """What the reward gives, without the weight. It gets a copy of the problem, which it may
        change.

        Raises:
            RewardError: that is no finite number.
        """
        more = {"cut_off": cut_off} if _takes_cut_off(self.reward) else {}
        return as_reward(self.name, self.reward(completion, dict(problem), **more))

    def __str__(self) -> str:
        return self.name if self.weight == 1 else f"{self.weight!r} * {self.name}"


def _takes_cut_off(reward: Reward) -> bool:
    try:
        return "cut_off" in inspect.signature(reward).parameters
    except ValueError:  # some that are built in have no signature
        return False


def parse_reward(text: str) -> tuple[Term, ...]:
    """The terms of a reward such as `number + 0.2 * mine:short`.

    Raises:
        ValueError: it is no such sum, or a name in it is no reward.
    """
    terms = list[Term]()
    for part in text.split("+"):
        match = TERM.fullmatch(part.strip())
        try:
            weight = float(match[1] or 1) if match else math.nan
        except ValueError:
            weight = math.nan
        if match is None or not math.isfinite(weight):
            raise ValueError(
                f"--reward {text!r}: {part.strip()!r} is no reward; such as number, 0.5 * exact and"
                " mine:function are, with + between them"
            )
        terms.append(Term(match[2], weight, _find(match[2])))
    names = [term.name for term in terms]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--reward {text!r} names {min(twice)} twice")
    return tuple(terms)


def _find(name: str) -> Reward:
    found = find_named(name, VERIFIERS, "reward", "module:function")
    if not callable(found):
        raise ValueError(f"{name} is no function but {found!r:.80}")
    return found
