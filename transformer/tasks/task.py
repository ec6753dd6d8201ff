"""What a task is: problems with answers that can be checked.

A `Task` draws problems, words their questions, knows the truth, and shows how to work it out. A new
one takes about ten lines:

    class Double(Task):
        name = "double"

        def arguments(self, rng):
            return (rng.randint(0, 999),)

        def question(self, rng, number):
            return say(rng, ("double {n}", "what is twice {n}"), n=number)

        def answer(self, number):
            return str(2 * number)

A reply has one form, which `Problem.reward` insists on: `<think>steps</think><answer>527</answer>`,
and nothing before or after it. `Problem.marks` says apart whether the answer and the form are
right. The form alone earns nothing: a model that is paid for it learns to write empty tags.

One problem in sixteen is held out: training never sees it, in whatever words. The hash is taken of
the problem, not of the text: 12+7, "seven plus 12", and "plus 7?" after an answer of 12 are one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import md5
from random import Random
from typing import Any, ClassVar, NamedTuple

Message = dict[str, str]
Slip = Callable[[], bool]
DRAWS = 10_000  # a side of the split from which so many draws find nothing has no problems
REPLY = re.compile(r"<think>([^<]*)</think><answer>(?P<answer>[^<]{1,40})</answer>")


class Marks(NamedTuple):
    """The parts of a reward, each 0 or 1.

    Attributes:
        answer: whether the answer is right, in the right form.
        form: whether the form is right.
    """

    answer: float
    form: float


def worked(steps: str, answer: str) -> str:
    """A reply in the right form."""
    return f"<think>{steps}</think><answer>{answer}</answer>"


class Task:
    """A kind of problem; see the module's docstring for an example of one.

    Attributes:
        name: what it is called.
        form: what a whole reply has to match; its group `answer` is judged.
    """

    name: ClassVar[str]
    form: ClassVar[re.Pattern[str]] = REPLY

    def arguments(self, rng: Random) -> tuple:
        """Draw a problem: the arguments of all the methods below."""
        raise NotImplementedError

    def question(self, rng: Random, *arguments: Any) -> str:
        """Put the problem into words."""
        raise NotImplementedError

    def answer(self, *arguments: Any) -> str:
        """Give the right answer."""
        raise NotImplementedError

    def right(self, answer: str, *arguments: Any) -> bool:
        """Judge the text of an answer: by default, only the one right text will do."""
        return answer == self.answer(*arguments)

    def work(self, slip: Slip, *arguments: Any) -> tuple[str, str]:
        """Show how to get there: the steps for `<think>`, and the answer they lead to.

        Wherever something must be kept in mind, `slip()` is asked whether it is forgotten.
        """
        return "", self.answer(*arguments)

    def guess(self, rng: Random, *arguments: Any) -> str | None:
        """Answer blindly, as a hasty teacher does; None where nobody would."""
        return None

    def key(self, *arguments: Any) -> tuple:
        """Name the problem, the same for all its disguises: its hash decides what is held out."""
        return arguments

    def demonstrate(
        self,
        rng: Random,
        *arguments: Any,
        hasty: float = 0.0,
        forget: float = 0.0,
        patience: float = 1.0,
    ) -> str:
        """Reply as a teacher does: carefully, or with these probabilities hasty and forgetful.

        Only a search takes patience; see `countdown`.
        """
        guess = self.guess(rng, *arguments) if rng.random() < hasty else None
        if guess is None:
            steps, answer = self.work(lambda: rng.random() < forget, *arguments)
        else:
            steps, answer = "easy", guess
        return worked(steps, answer)

    def marks(self, completion: str, *arguments: Any) -> Marks:
        """Judge a whole reply, part by part."""
        match = self.form.fullmatch(completion)
        if match is None:
            return Marks(answer=0.0, form=0.0)
        return Marks(answer=float(self.right(match["answer"], *arguments)), form=1.0)

    def reward(self, completion: str, *arguments: Any) -> float:
        """Score a whole reply, for training to maximise: by default the answer's mark alone."""
        return self.marks(completion, *arguments).answer

    def reward_cut_off(self, completion: str, *arguments: Any) -> float:
        """Score the text of a reply that the limit cut off: by default as `reward` does, but the
        answer's mark alone earns nothing. `rollout.roll_out` caps the score.
        """
        own = type(self).reward is not Task.reward
        return self.reward(completion, *arguments) if own else 0.0

    def parts(self, completion: str, cut_off: bool, *arguments: Any) -> dict[str, float]:
        """Score a reply by each of several rewards, which are then measured apart."""
        return {}

    def held_out(self, *arguments: Any) -> bool:
        """Say whether the problem is one of the sixteenth kept for evaluation."""
        text = repr((self.name, *self.key(*arguments)))
        return md5(text.encode(), usedforsecurity=False).digest()[0] < 16

    def sample(self, rng: Random, held_out: bool = False) -> "Problem":
        """Draw a problem from one side of the split.

        Raises:
            ValueError: there is none, as with a handful of problems of which none is held out.
        """
        for _ in range(DRAWS):
            arguments = self.arguments(rng)
            if self.held_out(*arguments) == held_out:
                return Problem(self, arguments, self.question(rng, *arguments))
        kind, use = ("", "evaluation") if held_out else ("not ", "training")
        raise ValueError(
            f"task {self.name!r} has no problem for {use}: of {DRAWS} that it drew, none is"
            f" {kind}held out. One problem in sixteen is, by chance: draw from more problems, or"
            " choose with a method held_out(self, *arguments)"
        )

    def draw(self, rng: Random, count: int, held_out: bool = False) -> "list[Problem]":
        """Draw problems from one side of the split."""
        return [self.sample(rng, held_out) for _ in range(count)]


@dataclass(frozen=True)
class Problem:
    """A question put in a conversation, and its judge."""

    task: Task
    arguments: tuple
    question: str
    history: tuple[Message, ...] = ()

    @property
    def messages(self) -> list[Message]:
        """The conversation, up to and including the question."""
        return [*self.history, {"role": "user", "content": self.question}]

    def under(self, system: str | None) -> "Problem":
        """The problem under a system prompt, if there is one and it has none of its own."""
        if system is None or any(message["role"] == "system" for message in self.history):
            return self
        return replace(self, history=({"role": "system", "content": system}, *self.history))

    @property
    def held_out(self) -> bool:
        """Whether training must not see it."""
        return self.task.held_out(*self.arguments)

    def marks(self, completion: str) -> Marks:
        """Judge the reply's text without its end-of-turn token, part by part."""
        return self.task.marks(completion, *self.arguments)

    def parts(self, completion: str, cut_off: bool = False) -> dict[str, float]:
        """Score the reply's text by each of several rewards, if the task has several."""
        return self.task.parts(completion, cut_off, *self.arguments)

    def reward(self, completion: str, cut_off: bool = False) -> float:
        """Score the reply's text without its end-of-turn token: 1 if right, else 0.

        All of the text counts: a reply that goes on after the answer, answers twice, leaves a tag
        open or did not end by itself (`cut_off`) gets nothing.
        """
        score = self.task.reward_cut_off if cut_off else self.task.reward
        return score(completion, *self.arguments)
