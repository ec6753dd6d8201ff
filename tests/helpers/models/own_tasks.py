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


class Number(Own):
    name = "number"

    def answer(self, number: int) -> int:
        return 6


class Essay(Own):
    name = "essay"

    def answer(self, number: int) -> str:
        return "m" * 41


class Wrong(Own):
    name = "wrong"

    def right(self, answer: str, number: int) -> bool:
        return answer == 6


class Formless(Own):
    name = "formless"

    def demonstrate(self, rng: Random, *arguments, **dials) -> str:
        return "6"


class Groupless(Own):
    name = "groupless"
    form = re.compile("6")


class Mute(Own):
    name = "mute"

    def question(self, rng: Random, number: int) -> int:
        return 3


class Few(Own):
    """Two problems, neither of which the hash chooses."""

    name = "few"

    def held_out(self, number: int) -> bool:
        return Task.held_out(self, number)
