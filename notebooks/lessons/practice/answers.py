"""What the reader says, held against the truth: predictions and exercises."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lessons.practice.exercises import find_exercise
from lessons.practice.folded import display_answer, display_help, solution, where_solved

NUMBER = (int, float, np.integer, np.floating)
WITHIN = 0.1  # of the truth: close enough for a prediction


def guess(mine: Any, truth: Any, what: str, unit: str = "") -> None:
    """Print a prediction beside the truth, which is folded away if there is no prediction.

    Args:
        mine: the reader's; None if there is none.
        truth: a number, or anything that can be compared.
        what: is predicted, such as "bytes read from memory".
        unit: of a number.
    """
    said = f"{what}: {written(truth)} {unit}".rstrip()
    if mine is None:
        print("you did not guess")
        display_answer(said)
    else:
        print(f"your guess: {written(mine)} {unit}".rstrip())
        print(f"{said}  ({verdict(mine, truth)})")


def checked(name: str, holds: object) -> None:
    """End the cell if what the text says of its output is false now.

    Args:
        name: what the text says, in short.
        holds: whether it is true.

    Raises:
        AssertionError: it is not.
    """
    assert holds, f"the text says {name!r} of this output, and that is false now"


def verdict(mine: Any, truth: Any) -> str:
    """How a guess compares with the truth, in words."""
    if not (isinstance(mine, NUMBER) and isinstance(truth, NUMBER)):
        return "right" if mine == truth else "not what you said"
    if math.isclose(mine, truth):
        return "right"
    if math.isclose(mine, truth, rel_tol=WITHIN):
        return "close"
    if mine * truth <= 0:
        return "not what you said"
    larger, ratio = ("high", mine / truth) if mine / truth > 1 else ("low", truth / mine)
    return f"{ratio:.2g} times too {larger}" if ratio < 1000 else f"far too {larger}"


def written(value: Any) -> str:
    """A number with at most four digits that count, or what it is."""
    if isinstance(value, bool) or not isinstance(value, NUMBER):
        return str(value)
    number = float(value)
    if number.is_integer():
        return f"{int(value):,}"
    return f"{number:,.4g}" if abs(number) < 1e4 else f"{number:,.0f}"


def check(name: str, function: Callable[..., Any]) -> None:
    """Say whether a reader's function solves an exercise: not solved yet, what is wrong, or right.

    Unless it is right, the hints and a solution follow, folded. Nothing that the function does ends
    the notebook.
    """
    exercise = find_exercise(name)

    @functools.wraps(function)
    def attempt(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if result is None:
            raise NotImplementedError
        return result

    try:
        exercise.checker(attempt)
    except NotImplementedError:
        print(f"{name}: not solved yet, it returns None")
    except AssertionError as error:
        print(f"{name}: wrong. {error or 'it does not pass the check.'}")
    except Exception as error:
        print(f"{name}: wrong. It raised {type(error).__name__}: {error}")
    else:
        print(f"{name}: right")
        return
    display_help(
        exercise.hints, solution(name), f"A solution is in solutions/{where_solved(name)}."
    )
