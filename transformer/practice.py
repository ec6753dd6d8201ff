"""Tasks that mix other tasks: all that the shipped models were taught, to be reinforced at once."""

from dataclasses import replace
from random import Random

from transformer import corpus, phrases
from transformer.task import Problem, Task
from transformer.tasks import TASKS, Add, Columns, Sort, Subtract


def addressed(rng: Random, problem: Problem) -> Problem:
    """The problem as it was put in training: sometimes under a system prompt."""
    system = phrases.system_prompt(rng)
    if not system:
        return problem
    return replace(problem, history=({"role": "system", "content": system}, *problem.history))


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
        return addressed(rng, problem)


class Below(Subtract):
    """Differences below zero, every second one of numbers that begin alike.

    Which number is the larger one has to be seen before the first column is written. In the
    training data one difference in eight is below zero; it is what goes wrong last.
    """

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers, the smaller one first."""
        a, b = sorted(Columns.arguments(self, rng))
        if rng.random() < 0.5:
            last = 10 ** rng.randint(1, max(1, len(str(b)) - 1))
            a, b = sorted((b, b - b % last + rng.randrange(last)))
        return a, b


class Above(Below):
    """The same numbers, the larger one first."""

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers."""
        a, b = super().arguments(rng)
        return b, a


class LongSort(Sort):
    """Four or five numbers of two or three digits."""

    def arguments(self, rng: Random) -> tuple:
        """Draw the numbers and an order."""
        top = rng.choice((99, 999))
        numbers = tuple(rng.randint(0, top) for _ in range(rng.choice((4, 5, 5))))
        return ("descending" if rng.random() < 0.4 else "ascending"), numbers


# What is practised, in per cent.
PRACTICE: dict[Task, int] = {
    Mix(): 45,
    Below(4): 9,
    Below(3): 6,
    Below(): 6,
    Above(): 3,
    Subtract(4): 8,
    Subtract(3): 2,
    Add(): 2,
    FollowUps(): 9,
    LongSort(): 5,
    TASKS["multiply"]: 1,
    TASKS["reverse"]: 1,
    TASKS["small talk"]: 1,
    TASKS["unknown"]: 2,
}


class Practice(Task):
    """`Mix` with more of what a model of a sloppy teacher gets wrong; it is judged by `Mix`."""

    name = "practice"

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a problem of one of the tasks."""
        tasks, shares = tuple(PRACTICE), tuple(PRACTICE.values())
        task = tasks[0] if held_out else rng.choices(tasks, shares)[0]
        problem = task.sample(rng, held_out)
        return problem if isinstance(task, Mix) else addressed(rng, problem)
