"""Tasks that mix other tasks: all that the shipped models were taught, to be practised at once."""

from random import Random

from transformer.tasks.skills import TASKS, Add, Subtract
from transformer.tasks.task import Problem, Task
from transformer.training import corpus


class FollowUps(Task):
    """The second question of a conversation, about the answer to the first."""

    name = "follow-ups"

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a sum, its right answer and a question about that."""
        return corpus.second_question(rng, held_out)


class Mix(Task):
    """All that the shipped models were taught, as it was: in the shares of the training data, some
    under a system prompt, some as the second question of a conversation.
    """

    name = "mix"

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a problem of one of the tasks."""
        if rng.random() < corpus.CONVERSATIONS:
            problem = FollowUps().sample(rng, held_out)
        else:
            problem = corpus.draw_problem(rng, "chat")
            problem = problem.task.sample(rng, held_out=True) if held_out else problem
        return corpus.addressed(rng, problem)


class Doubtful(Subtract):
    """Differences of which it is often doubtful whether they are below zero. That has to be known
    before the first column, and who seldom meets such a case bets on the usual order.
    """

    below = 1 / 5  # share of them with an answer below zero

    def arguments(self, rng: Random) -> tuple[int, int]:
        """Draw two numbers of `digits` digits, every second pair near each other."""
        assert self.digits is not None
        least = 10 ** (self.digits - 1)
        a, b = (rng.randint(least, 10 * least - 1) for _ in range(2))
        if rng.random() < 0.5:
            b = max(least, self.near(rng, a, 10 ** rng.randint(1, self.digits - 1)))
        return (min(a, b), max(a, b)) if rng.random() < self.below else (max(a, b), min(a, b))

    def near(self, rng: Random, number: int, size: int) -> int:
        """Draw a number near another."""
        raise NotImplementedError


class Alike(Doubtful):
    """Near are numbers with the same first digits: 479 and 464."""

    def near(self, rng: Random, number: int, size: int) -> int:
        """Draw the last digits anew."""
        return number - number % size + rng.randrange(size)


class Close(Doubtful):
    """Near are numbers with a small difference: 479 and 464, but also 479 and 509."""

    def near(self, rng: Random, number: int, size: int) -> int:
        """Draw the difference."""
        return number - rng.randrange(size)


# What is practised, in shares: first,
OTHERS: dict[Task, int] = {
    Add(): 5,
    TASKS["multiply"]: 7,
    FollowUps(): 16,
    TASKS["sort"]: 5,
    TASKS["reverse"]: 5,
    TASKS["count"]: 4,
    TASKS["small talk"]: 5,
    TASKS["unknown"]: 4,
}
PRACTICE: dict[Task, int] = {
    Mix(): 100,
    Alike(4): 30,
    Alike(3): 15,
    Subtract(4): 10,
    Subtract(3): 8,
    Subtract(): 8,
    **OTHERS,
}
# and afterwards.
FINISH: dict[Task, int] = {
    Mix(): 100,
    Close(4): 45,
    Close(3): 40,
    Subtract(): 8,
    **OTHERS,
    TASKS["count"]: 5,
    TASKS["unknown"]: 5,
}


class Practice(Task):
    """`Mix` with more of what a model of a sloppy teacher gets wrong; it is judged by `Mix`."""

    name = "practice"
    shares = PRACTICE

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a problem of one of the tasks."""
        tasks, shares = tuple(self.shares), tuple(self.shares.values())
        task = tasks[0] if held_out else rng.choices(tasks, shares)[0]
        problem = task.sample(rng, held_out)
        return problem if isinstance(task, Mix) else corpus.addressed(rng, problem)


class Finish(Practice):
    """The same with what is wrong after that: more close numbers."""

    name = "finish"
    shares = FINISH
