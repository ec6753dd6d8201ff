"""A reward and a task, for docs/use/your_data.md."""

from transformer.tasks.phrases import say
from transformer.tasks.task import Task


def short(completion, problem):
    """1 for an answer of at most six characters, else 0."""
    return float(len(completion) <= 6)


class Double(Task):
    """Twice a number."""

    name = "double"

    def arguments(self, rng):
        """Draw the number."""
        return (rng.randint(0, 999),)

    def question(self, rng, number):
        """Ask in one of two ways."""
        return say(rng, ("double {n}", "what is twice {n}"), n=number)

    def answer(self, number):
        """Give the right answer."""
        return str(2 * number)
