"""Exercises by name: hints, and what holds a reader's function against the truth.

The exercises of notebook NN are registered in `notebook_NN.py`:

    @exercise("doubling", "what is twice the number?", "add it to itself")
    def check_doubling(doubling):
        assert doubling(3) == 6, f"of 3 it is {doubling(3)}; it should be 6"

A checker returns if the function is right and raises an AssertionError with a sentence if not. The
solution is in `notebooks/solutions`, in the folder of the notebook, as a function `doubling` in
`doubling.py`; the file also has functions `wrong_...`, each with a mistake that the checker has to
find, and perhaps `right_...`, which are right in another way.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

Checker = Callable[[Callable[..., Any]], None]


class Exercise(NamedTuple):
    """What a reader is asked to write."""

    name: str
    hints: tuple[str, ...]  # each says more than the one before it
    checker: Checker


EXERCISES: dict[str, Exercise] = {}


def exercise(name: str, *hints: str) -> Callable[[Checker], Checker]:
    """Register a checker under the exercise's name."""

    def register(checker: Checker) -> Checker:
        EXERCISES[name] = Exercise(name, hints, checker)
        return checker

    return register


@cache
def load_exercises() -> None:
    """Import every module of exercises."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def find_exercise(name: str) -> Exercise:
    """An exercise; ValueError with those that there are."""
    load_exercises()
    if name not in EXERCISES:
        known = ", ".join(sorted(EXERCISES)) or "none"
        raise ValueError(f"there is no exercise {name!r}; there are {known}.")
    return EXERCISES[name]
