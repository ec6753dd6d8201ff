"""Groups of rollouts, the answers to one problem: what is worth knowing of them."""

from collections.abc import Sequence
from itertools import chain
from math import comb, fsum
from typing import TypeVar

from transformer.rl.rollout import Rollout
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
