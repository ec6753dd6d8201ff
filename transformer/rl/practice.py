"""Tasks that mix other tasks: all that `transformer.train` teaches, to be practised at once."""

from random import Random

from transformer.tasks.skills import TASKS, Add, Subtract
from transformer.tasks.task import Problem, Task
from transformer.training import corpus


class Mix(Task):
    """All that `transformer.train` teaches, in the shares of the training data: some problems under
    a system prompt, some as the second question of a conversation.
    """

    name = "mix"

    def sample(self, rng: Random, held_out: bool = False) -> Problem:
        """Draw a problem of one of the tasks."""
        if rng.random() < corpus.CONVERSATIONS:
            problem = corpus.FollowUps().sample(rng, held_out)
        else:
            problem = corpus.draw_problem(rng, "chat")
            problem = problem.task.sample(rng, held_out=True) if held_out else problem
        return corpus.addressed(rng, problem)


# What is practised, in shares.
PRACTICE: dict[Task, int] = {
    Mix(): 100,
    Subtract(): 20,
    Subtract(4): 10,
    Subtract(3): 8,
    Add(): 5,
    TASKS["signed"]: 5,
    TASKS["spelled"]: 7,
    TASKS["multiply"]: 7,
    corpus.FollowUps(): 16,
    TASKS["sort"]: 12,
    TASKS["reverse"]: 5,
    TASKS["count"]: 5,
    TASKS["small talk"]: 5,
    TASKS["unknown"]: 5,
    TASKS["beyond"]: 20,
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
