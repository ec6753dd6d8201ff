"""FA4's two ideas on Blackwell, each switched off and on, and how sure the model is of them."""

from functools import cache
from typing import NamedTuple

from lessons.modelled import counts, model, trace
from lessons.modelled.rates import B200, SOURCES, Rates

BLOCKS = 16  # of keys
CHANGES = 0.8, 1.2  # of each rate, for the range of a speed-up
VARIANTS = {  # threshold and eighths of the polynomial
    "as in FA3": (0.0, 0),
    "conditional rescaling": (8.0, 0),
    "polynomial": (0.0, 2),
    "both": (8.0, 2),
}


class Row(NamedTuple):
    """A variant, modelled.

    Attributes:
        cycles: for one block of keys and both tiles of queries.
        busy: share of the time in which each unit was busy.
        gain: its speed, divided by that of the first variant.
        least: of its gains when any one rate is 20 % lower or higher.
        most: of these gains.
    """

    cycles: float
    busy: dict[str, float]
    gain: float
    least: float
    most: float


@cache
def run(variant: str, rates: Rates = B200) -> model.Run:
    """A variant's run."""
    threshold, eighths = VARIANTS[variant]
    found = trace.record(threshold, eighths, BLOCKS)
    return model.replay(found, counts.of_softmax()[eighths], rates)


def compared() -> dict[str, Row]:
    """A row for each variant."""
    others = [B200.times(change, name) for name in SOURCES for change in CHANGES]
    rows = {}
    for variant in VARIANTS:
        gains = [gain(variant, rates) for rates in (B200, *others)]
        made = run(variant)
        busy = {unit: cycles / made.cycles for unit, cycles in made.busy.items()}
        rows[variant] = Row(made.cycles / BLOCKS, busy, gains[0], min(gains), max(gains))
    return rows


def gain(variant: str, rates: Rates) -> float:
    """A variant's speed, divided by that of the first."""
    return run(next(iter(VARIANTS)), rates).cycles / run(variant, rates).cycles
