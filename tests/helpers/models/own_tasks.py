"""Tasks as somebody might write them at first, each with a fault but `Own`."""

import re
from random import Random

from transformer.tasks.task import Task


class Own(Task):
    """What is asked has one number, 3, or another one if that is held out."""

    name = "own"

    def arguments(self, rng: Random) -> tuple:
        return (rng.choice((3, 4)),)

    def question(self, rng: Random, number: int) -> str:
        return "twice 3?"

    def answer(self, number: int) -> str:
        return "6"

    def held_out(self, number: int) -> bool:
        return number == 4


def other(name: str, **changes) -> type[Own]:
    """`Own` with other methods or attributes."""
    return type(name, (Own,), {"name": name.lower(), **changes})


Number = other("Number", answer=lambda self, number: 6)
Essay = other("Essay", answer=lambda self, number: "m" * 41)
Wrong = other("Wrong", right=lambda self, answer, number: answer == 6)
Formless = other("Formless", demonstrate=lambda self, rng, *arguments, **dials: "6")
Groupless = other("Groupless", form=re.compile("6"))
Mute = other("Mute", question=lambda self, rng, number: 3)
# Two problems, neither of which the hash chooses.
Few = other("Few", held_out=Task.held_out)
