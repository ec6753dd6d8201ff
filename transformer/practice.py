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


class Close(Subtract):
    """Differences of numbers that begin alike, either of them first.

    Which one is larger has to be seen before the first column is written, and here that takes more
    than a look at the first digits: it is what goes wrong last.
    """

    def arguments(self, rng: Random) -> tuple:
        """Draw a number, and another one for its last digits."""
        a = max(Columns.arguments(self, rng))
        last = 10 ** rng.randint(1, max(1, len(str(a)) - 1))
        numbers = [a, a - a % last + rng.randrange(last)]
        rng.shuffle(numbers)
        return tuple(numbers)


class LongSort(Sort):
    """Four or five numbers of two or three digits."""

    def arguments(self, rng: Random) -> tuple:
        """Draw the numbers and an order."""
        top = rng.choice((99, 999))
        numbers = tuple(rng.randint(0, top) for _ in range(rng.choice((4, 5, 5))))
        return ("descending" if rng.random() < 0.4 else "ascending"), numbers


# What is practised, in per cent.
PRACTICE: dict[Task, int] = {
    Mix(): 50,
    Subtract(4): 10,
    Subtract(3): 3,
    Subtract(): 4,
    Close(4): 8,
    Close(): 6,
    Add(): 2,
    FollowUps(): 8,
    LongSort(): 3,
    TASKS["multiply"]: 3,
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
