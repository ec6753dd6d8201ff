"""What the reader says, held against the truth: predictions and exercises."""

import dis
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lessons.practice.exercises import find_exercise
from lessons.practice.folded import display_answer, display_help, solution, where_solved

NUMBER = (int, float, np.integer, np.floating)
WITHIN = 0.1  # of the truth: close enough for a prediction
RETURNS_A_CONSTANT = {"RESUME", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE", "NOP"}
FACTOR = 2  # what counts as near in the comparison at the end


class Prediction(NamedTuple):
    """What a reader said of a number, and what it is."""

    mine: Any
    truth: Any
    unit: str


PREDICTIONS: dict[str, Prediction] = {}  # of this notebook, by what was predicted


def guess(mine: Any, truth: Any, what: str, unit: str = "") -> None:
    """Note a prediction and print it beside the truth, which is folded away if there is none.

    Args:
        mine: the reader's; None if there is none.
        truth: a number, or anything that can be compared.
        what: is predicted, such as "bytes read from memory".
        unit: of a number.
    """
    PREDICTIONS[what] = Prediction(mine, truth, unit)
    said = f"{what}: {written(truth)} {unit}".rstrip()
    if mine is None:
        print("you did not guess")
        display_answer(said)
        return
    print(f"your guess: {written(mine)} {unit}".rstrip())
    print(f"{said}  ({verdict(mine, truth)})")


def predictions() -> None:
    """Print how near the predictions of this notebook were; what was not guessed stays hidden."""
    made = {what: one for what, one in PREDICTIONS.items() if one.mine is not None}
    print(f"you made {len(made)} of {len(PREDICTIONS)} predictions")
    if made:
        near = sum(is_near(one.mine, one.truth) for one in made.values())
        print(f"within {FACTOR} x, or right: {near} of {len(made)}")
    for what, (mine, truth, unit) in made.items():
        said = f"you said {written(mine)}, it is {written(truth)} {unit}".rstrip()
        print(f"* {what}: {said} ({verdict(mine, truth)})")


def checked(name: str, holds: object) -> None:
    """End the cell if what the text says of its output is false now.

    Args:
        name: what the text says, in short.
        holds: whether it is true.

    Raises:
        AssertionError: it is not.
    """
    assert holds, f"the text says {name!r} of this output, and that is false now"


def is_near(mine: Any, truth: Any) -> bool:
    """Whether a prediction is right, or a number within a factor of the true one."""
    if mine == truth or not (isinstance(mine, NUMBER) and isinstance(truth, NUMBER)):
        return bool(mine == truth)
    return bool(mine * truth > 0 and 1 / FACTOR <= mine / truth <= FACTOR)


def verdict(mine: Any, truth: Any) -> str:
    """How a guess compares with the truth, in words."""
    if not (isinstance(mine, NUMBER) and isinstance(truth, NUMBER)):
        return "right" if mine == truth else "not what you said"
    if math.isclose(mine, truth):
        return "right"
    if math.isclose(mine, truth, rel_tol=WITHIN):
        return "close"
    if not truth or not mine or mine * truth < 0:
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


def is_empty(function: Callable[..., Any]) -> bool:
    """Whether nothing is in a function but a docstring and perhaps `return None`."""
    return {x.opname for x in dis.get_instructions(function)} <= RETURNS_A_CONSTANT


def check(name: str, function: Callable[..., Any]) -> None:
    """Say whether a reader's function solves an exercise: not solved yet, what is wrong, or right.

    Unless it is right, the hints and a solution follow, folded. Nothing that the function does ends
    the notebook.
    """
    exercise = find_exercise(name)

    @functools.wraps(function)
    def attempt(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if result is None and is_empty(function):
            raise NotImplementedError
        assert result is not None, "It returned None. Is a `return` missing?"
        return result

    try:
        exercise.checker(attempt)
    except NotImplementedError:
        print(f"{name}: not solved yet")
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
