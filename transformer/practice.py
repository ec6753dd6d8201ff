"""Tasks that mix other tasks: all that the shipped models were taught, to be practised at once."""

from random import Random

from transformer import corpus
from transformer.task import Problem, Task
from transformer.tasks import TASKS, Add, Subtract


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


# What is practised, in shares.
PRACTICE: dict[Task, int] = {
    Mix(): 100,
    Subtract(4): 30,
    Subtract(3): 14,
    Subtract(): 14,
    Add(): 5,
    TASKS["multiply"]: 7,
    FollowUps(): 16,
    TASKS["sort"]: 5,
    TASKS["small talk"]: 5,
    TASKS["unknown"]: 4,
}


class Practice(Task):
    """`Mix` with more of what a model of a sloppy teacher gets wrong; it is judged by `Mix`."""

    name = "practice"

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a problem of one of the tasks."""
        tasks, shares = tuple(PRACTICE), tuple(PRACTICE.values())
        task = tasks[0] if held_out else rng.choices(tasks, shares)[0]
        problem = task.sample(rng, held_out)
        return problem if isinstance(task, Mix) else corpus.addressed(rng, problem)
