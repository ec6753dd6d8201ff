"""Problems from a file: a prompt and an answer in each line.

    {"prompt": "What is 3+4?", "answer": "7"}
    {"question": "Ada has 3 ...", "answer": "She has 3+4 = 7.\\n#### 7"}         as in GSM8K
    {"prompt": [{"role": "system", ...}, {"role": "user", ...}], "answer": 7}

A prompt is a text or a conversation that ends with the user's message. Of an answer with `####`
what follows counts, and to a verifier `$\\boxed{7}$` is 7. Further keys are for reward functions.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import md5, sha256
from random import Random
from typing import Any, TypeVar

from transformer.tasks.numbers import as_number
from transformer.tasks.task import Marks, Message, Problem, Task
from transformer.tasks.verifiers import VERIFIERS, parse_reward, spoken, stated

Item = TypeVar("Item")

HELD_OUT = 16  # one problem in so many is kept for evaluation
FORMAT = '{"prompt": "...", "answer": "..."}'


@dataclass(frozen=True)
class Line:
    """A problem of a file.

    Attributes:
        name: of the line, for messages.
        messages: the prompt; the last is the question.
        fields: all keys of the line, with the plain `prompt` and, if there is one, `answer`.
    """

    name: str
    messages: tuple[Message, ...]
    fields: Mapping[str, Any]


def read_line(name: str, line: Mapping[str, Any]) -> Line:
    """A line of a file.

    Raises:
        ValueError: it is no problem, by the line's name.
    """
    if ("prompt" in line) == ("question" in line):
        raise ValueError(f"{name} must be {FORMAT}; it has the keys {', '.join(line) or 'none'}")
    prompt = line["prompt"] if "prompt" in line else line["question"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f'{name}: the prompt must be a text or a list of {{"role", "content"}}')
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError(f"{name}: the prompt must end with what the user asks")
    fields = {**line, "prompt": messages[-1]["content"]}
    if "answer" in line:
        fields["answer"] = _answer(name, line["answer"])
    return Line(name, tuple(messages), fields)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def _answer(name: str, answer: Any) -> str:
    unreal = isinstance(answer, float) and not math.isfinite(answer)  # as JSON of pandas has it
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or unreal:
        raise ValueError(f"{name}: the answer must be a text or a number, not {answer!r:.40}")
    text = str(answer).rpartition("####")[2].strip()
    if not text:
        raise ValueError(f"{name}: the answer is empty")
    return text


class Problems(Task):
    """A task whose problems are lines of a file.

    One different prompt in sixteen is held out, at least one, chosen by its hash; or all of another
    file.

    Args:
        name: of the file, for messages.
        lines: names and objects of the lines, see `files.read_jsonl`.
        held_out: those of a file for evaluation; None: a share of the lines.
        reward: see `verifiers`; None: `number` if all answers are numbers, else `exact`.

    Attributes:
        lines: all of them, those that are held out last.
        terms: of the reward.
        texts: those of the lines whose answer is no number.

    Raises:
        ValueError: a line that is no problem, an answer that the reward cannot judge, fewer than
            two different prompts.
    """

    name = "problems"

    def __init__(
        self,
        name: str,
        lines: Iterable[tuple[str, Mapping[str, Any]]],
        held_out: Iterable[tuple[str, Mapping[str, Any]]] | None = None,
        reward: str | None = None,
    ) -> None:
        trained = [read_line(*line) for line in lines]
        if held_out is None:
            trained, kept = split_by_hash(trained, lambda line: line.messages)
            if not kept:
                raise ValueError(
                    f"{name} has {len(trained[:1])} different problems; two are the least, of which"
                    " one is held out"
                )
        else:
            kept = [read_line(*line) for line in held_out]
        if not trained or not kept:
            raise ValueError(f"{name} has no problems; a line is {FORMAT}")
        self.lines, self._trained = [*trained, *kept], len(trained)
        answers = [str(line.fields.get("answer", "")) for line in self.lines]
        numbers = [as_number(stated(answer)) for answer in answers]
        self.texts = [x for x, value in zip(self.lines, numbers, strict=True) if value is None]
        self.terms = parse_reward(reward or ("exact" if self.texts else "number"))
        self._check_answers()
        self._judged: tuple[Any, dict[str, float]] = (None, {})

    def _check_answers(self) -> None:
        for line in self.lines:
            for term in self.terms:
                if term.name not in VERIFIERS:
                    continue
                if "answer" not in line.fields:
                    raise ValueError(f'{line.name} has no "answer", which {term.name} needs')
                answer = line.fields["answer"]
                if term.name == "number" and as_number(stated(answer)) is None:
                    raise ValueError(
                        f"{line.name}: the answer {answer!r:.40} is no number; --reward exact"
                        " compares texts"
                    )
                if term.value(answer, line.fields) != 1:
                    raise ValueError(
                        f"{line.name}: a reply that repeats the answer {answer!r:.40} does not earn"
                        f" the reward {term.name}; write the bare answer, as 72"
                    )

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a line from one side of the split."""
        first, last = (self._trained, len(self.lines)) if held_out else (0, self._trained)
        return self.problem(rng.randrange(first, last))

    def draw(self, rng: Random, count: int, held_out: bool = False) -> list[Problem]:
        """Draw lines, held-out ones not more than once each."""
        kept = range(self._trained, len(self.lines))
        if not held_out:
            return super().draw(rng, count)
        return [self.problem(number) for number in rng.sample(kept, min(count, len(kept)))]

    def problem(self, number: int) -> Problem:
        """The problem of a line."""
        *history, question = self.lines[number].messages
        return Problem(self, (number,), question["content"], tuple(history))

    def held_out(self, number: int) -> bool:
        """Say whether a line is kept for evaluation."""
        return number >= self._trained

    def answer(self, number: int) -> str:
        """Give the answer as the file has it."""
        return self.lines[number].fields["answer"]

    def parts(self, completion: str, cut_off: bool, number: int) -> dict[str, float]:
        """Score a completion by each reward, without the weights."""
        asked = completion, cut_off, number
        if self._judged[0] != asked:  # a reward may take long: it is asked once
            problem = self.lines[number].fields
            found = {term.name: term.value(completion, problem, cut_off) for term in self.terms}
            self._judged = asked, found
        return self._judged[1]

    def reward(self, completion: str, number: int) -> float:
        """Score a completion: the weighted sum."""
        return self._sum(self.parts(completion, False, number))

    def reward_cut_off(self, completion: str, number: int) -> float:
        """Score a completion that the limit cut off: the weighted sum, too."""
        return self._sum(self.parts(completion, True, number))

    def _sum(self, found: Mapping[str, float]) -> float:
        return sum(term.weight * found[term.name] for term in self.terms)

    def marks(self, completion: str, number: int) -> Marks:
        """Judge a completion: it is right if a verifier says so, or, where only functions of one's
        own judge, as far as their sum goes from 0 to 1. Its form is right if it says something.
        """
        found = self.parts(completion, False, number)
        verdicts = [found[term.name] for term in self.terms if term.name in VERIFIERS]
        answer = max(verdicts) if verdicts else self._sum(found)
        form = float(bool(spoken(completion).strip()))  # besides a thought
        return Marks(answer=min(1.0, max(0.0, answer)), form=form)

    def fingerprint(self) -> str:
        """Tells data apart: the beginning of a hash of all lines and of the split."""
        content = repr([(line.messages, line.fields) for line in self.lines]), self._trained
        return sha256(repr(content).encode(errors="replace")).hexdigest()[:12]


def split_by_hash(
    items: Sequence[Item], content: Callable[[Item], Any]
) -> tuple[list[Item], list[Item]]:
    """What is trained on, and what is held out: one different item in sixteen, at least one.

    The hash of its content chooses an item, so its place in the file does not matter, and one that
    comes twice is on one side both times. A single one is trained on, and nothing held out.
    """
    hashes = [
        md5(repr(content(item)).encode(errors="replace"), usedforsecurity=False).digest()
        for item in items
    ]
    different = sorted(set(hashes))
    kept = set(different[: max(1, len(different) // HELD_OUT)] if len(different) > 1 else [])
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item, digest in zip(items, hashes):
        sides[digest in kept].append(item)
    return sides
