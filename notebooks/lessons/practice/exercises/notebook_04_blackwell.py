"""The exercise of 04_fa4's second half: a bug in a kernel of roles."""

from collections.abc import Callable
from typing import Any

from lessons.practice import planted
from lessons.practice.exercises import exercise

REPAIR_HINTS = (
    "The complaint says that tensor memory is touched while a product uses it. Which product reads "
    "or writes O, and which barrier does it wait for?",
    "Two lines of the inner loop have to change places.",
    "Return text.replace(the two lines as they are, the two lines in the other order).",
)


@exercise("repair", *REPAIR_HINTS)
def check_repair(function: Callable[..., Any]) -> None:
    """function(text of the correction with the bug) -> the text without it."""
    broken = planted.planted()
    text = function(broken)
    assert isinstance(text, str), f"return the text; you returned {type(text).__name__}."
    assert text != broken, "the text is the same as before: nothing was replaced."
    for order, complaint in planted.outcomes(text).items():
        first = complaint.partition("\n")[0]
        assert not complaint, f"in the order {order!r} the simulator says: {first}"
    assert planted.outcomes(broken)["late products"], "the bug has to be there before"
