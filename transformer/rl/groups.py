"""Groups of rollouts, the answers to one problem: what is worth knowing of them, and asking again.

Late in training nearly all groups are all right and teach nothing. What still has a spread is rare,
and a pool of such problems finds it again without a search. A problem is a function of the seed, of
the step that drew it and of its number there, so a state file needs only these numbers.

Related: prioritized level replay (arXiv:2010.03934), which scores levels by how much may be learned
from them, and the prioritized sampling of Kimi k1.5 (arXiv:2501.12599), by how often they fail.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from math import comb, fsum
from typing import NamedTuple, TypeVar

from transformer.rl.rollout import Rollout
from transformer.tasks.task import Problem
from transformer.training.parallel import ALONE, World

Item = TypeVar("Item")


def groups_of(rollouts: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The groups of some rollouts, or of what belongs to them."""
    return [rollouts[at : at + size] for at in range(0, len(rollouts), size)]


def spread(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group differ."""
    return len({rollout.reward for rollout in group}) > 1


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one at least of `k` samples is right, of which so many were drawn and are
    right: 1 - C(samples - right, k) / C(samples, k), without bias (Codex, arXiv:2107.03374).
    """
    return 1 - comb(samples - right, k) / comb(samples, k)


def describe(rollouts: Sequence[Rollout], size: int, world: World = ALONE) -> dict[str, float]:
    """What is worth knowing of a step's rollouts, those of all ranks; empty if there are none."""
    groups = groups_of(rollouts, size)
    logprobs = list(chain.from_iterable(r.completion.logprobs or [] for r in rollouts))
    rows, tokens = world.total(len(rollouts)), world.total(len(logprobs))
    if not rows:
        return {}
    sums = {
        "reward": fsum(r.reward for r in rollouts),
        "accuracy": fsum(r.answer for r in rollouts),
        "form": fsum(r.form for r in rollouts),
        "length": fsum(len(r.completion.tokens) for r in rollouts),
        "truncated": fsum(r.truncated for r in rollouts),
        "skipped": fsum(not spread(group) for group in groups) * size,
    }
    names = set(chain(*world.gather([name for r in rollouts for name in r.parts])))
    for name in sorted(names) if len(names) > 1 else ():
        sums[f"reward {name}"] = fsum(r.parts[name] for r in rollouts)
    means = {name: world.total(value) / rows for name, value in sums.items()}
    return means | {"surprisal": -world.total(fsum(logprobs)) / tokens}


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
    """Problems to ask again. The one that has waited longest is asked first: otherwise the same few
    problems would be learned by heart, step after step, while others wait.

    Args:
        limit: most problems. A full pool drops the one that has waited longest, for it was a policy
            of long ago that found it hard.
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
