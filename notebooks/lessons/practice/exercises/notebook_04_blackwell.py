"""The exercises of 04_fa4's second half: a bug in a kernel of roles, and the polynomial's share."""

from collections.abc import Callable
from typing import Any

from lessons.modelled import counts
from lessons.modelled.rates import B200, Rates
from lessons.practice import planted
from lessons.practice.exercises import exercise

REPAIR_HINTS = (
    "The complaint says that tensor memory is touched while a product uses it. Which product reads "
    "or writes O, and which barrier does it wait for?",
    "Two lines of the inner loop have to change places.",
    "Return text.replace(the two lines as they are, the two lines in the other order).",
)
SHARE_HINTS = (
    "Compute three times for each share, and compare the longest of them.",
    "4 warps of 32 threads execute each instruction of the counts, so a unit takes "
    "instructions * 128 / rate cycles. Issuing takes one cycle for each instruction.",
    "Return the share whose longest time is shortest: min(counts, key=...).",
)
GPUS: dict[str, Rates] = {
    "a B200": B200,
    "a GPU with twice the exponentials": B200.times(2, "exponentials"),
    "a GPU with half of the exponentials": B200.times(0.5, "exponentials"),
    "a GPU with half of the multiply-adds": B200.times(0.5, "arithmetic"),
    "a GPU with a fourth of the multiply-adds": B200.times(0.25, "arithmetic"),
}


@exercise("repair", *REPAIR_HINTS)
def check_repair(function: Callable[..., Any]) -> None:
    """function(text of the correction with the bug) -> the text without it."""
    broken = planted.planted()
    text = function(broken)
    assert isinstance(text, str), f"return the text; you returned {type(text).__name__}."
    assert text != broken, "the text is the same as before: nothing was replaced."
    for order, complaint in planted.outcomes(text).items():
        first = complaint.partition("\n")[0]
        assert not complaint, f"in the order {order!r} the emulator says: {first}"
    assert planted.outcomes(broken)["late products"], "the bug has to be there before"


@exercise("best_share", *SHARE_HINTS)
def check_share(function: Callable[..., Any]) -> None:
    """function(counts by eighths, rates) -> eighths, whose busiest unit is done first."""
    found = counts.of_softmax()
    for name, rates in GPUS.items():
        times = {
            eighths: max(
                128 * made.exponentials / rates.exponentials,
                128 * made.arithmetic / rates.arithmetic,
                made.issued,
            )
            for eighths, made in found.items()
        }
        best = min(times, key=times.__getitem__)
        chosen = function(dict(found), rates)
        assert chosen in times, f"return one of {list(times)}; you returned {chosen!r}."
        assert times[chosen] == times[best], (
            f"{name}: with {chosen}/8 the busiest unit takes {times[chosen]:.0f} cycles, with "
            f"{best}/8 {times[best]:.0f}."
        )
