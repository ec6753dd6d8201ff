"""Problems that are asked again: those whose last answers were some right and some wrong.

Late in training nearly all groups are all right and teach nothing. What still has a spread is rare,
and found again without a search if it is remembered. A problem is a function of the seed, of the
step that drew it and of its number there, so a state file needs only these numbers.

Related: prioritized level replay (arXiv:2010.03934), which scores levels by how much may be learned
from them, and the prioritized sampling of Kimi k1.5 (arXiv:2501.12599), by how often they fail.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import compress
from typing import NamedTuple

from transformer.tasks.task import Problem


class Asked(NamedTuple):
    """A problem that was asked.

    Attributes:
        step: that drew it.
        number: of the problem among those of that step.
    """

    step: int
    number: int
    problem: Problem


class Pool:
    """What is not settled. Who has waited longest is asked first: the same few problems, step
    after step, would be learned by heart while others wait.

    Args:
        limit: most problems. A full pool drops who has waited longest, for it was a policy of
            long ago that found it hard.
    """

    def __init__(self, limit: int) -> None:
        self._waiting: deque[Asked] = deque(maxlen=limit)

    def take(self, count: int) -> list[Asked]:
        """Remove `count` problems, or as many as there are."""
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    def put(self, asked: Iterable[Asked], spreads: Iterable[bool]) -> None:
        """Add those problems whose group had a spread."""
        self._waiting.extend(compress(asked, spreads))

    def state(self) -> list[tuple[int, int]]:
        """Steps and numbers, for `restore`."""
        return [(step, number) for step, number, _ in self._waiting]

    def restore(
        self, state: Iterable[tuple[int, int]], find: Callable[[int, int], Problem]
    ) -> None:
        """Go back to a state; `find` makes a problem from its step and its number."""
        self._waiting.clear()
        self._waiting.extend(Asked(*origin, find(*origin)) for origin in state)
