"""Solution of `digit_sum` in 06_grpo."""

from transformer.tasks.phrases import say
from transformer.tasks.task import Task


class DigitSum(Task):
    """The sum of a number's digits."""

    name = "digit-sum"

    def arguments(self, rng):
        """Draw a number."""
        return (rng.randint(0, 9999),)

    def question(self, rng, number):
        """Ask for the sum of its digits."""
        return say(rng, ("add the digits of {n}", "what is the digit sum of {n}"), n=number)

    def answer(self, number):
        """Add the digits."""
        return str(sum(map(int, str(number))))


class Numeric(DigitSum):
    """Gives a number where a text is due."""

    def answer(self, number):
        return sum(map(int, str(number)))


class Always(DigitSum):
    """Asks one problem."""

    def arguments(self, rng):
        return (407,)


class Generous(DigitSum):
    """Takes whatever begins with the right answer."""

    def right(self, answer, number):
        return answer.startswith(self.answer(number))


class Bare(DigitSum):
    """Draws a number and not a tuple of one."""

    def arguments(self, rng):
        return rng.randint(0, 9999)


def digit_sum():
    """The task."""
    return DigitSum()


def wrong_number():
    """An answer that is no text."""
    return Numeric()


def wrong_draw():
    """Always the same problem."""
    return Always()


def wrong_judge():
    """A judge with a loophole."""
    return Generous()


def wrong_tuple():
    """Arguments that are no tuple."""
    return Bare()
