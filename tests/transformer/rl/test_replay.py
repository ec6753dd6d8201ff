"""Problems that are asked again: who waits, who is next, and what a trainer asks."""

from itertools import count, islice

from tests.helpers.models.tiny_grpo import TINY, make_trainer
from transformer.rl.groups import groups_of
from transformer.rl.sampler import REMEMBERED


class Asker:
    """A trainer whose groups have a spread where we say so."""

    def __init__(self, folder, monkeypatch, **changes):
        self.trainer = make_trainer(folder, **changes)
        self.hard: set[tuple] = set()
        self.judged = count()
        monkeypatch.setattr(self.trainer.source.task, "reward", self.reward)

    def reward(self, completion: str, *arguments) -> float:
        return float(next(self.judged) % 2) if arguments in self.hard else 0.0

    def drawn(self, step: int, *numbers: int) -> set[tuple]:
        """Problems by their origin."""
        problems = [*islice(self.trainer.source.problems(step), 16)]
        return {problems[number].arguments for number in numbers}

    def ask(self, hard: set[tuple]) -> tuple[list[tuple], float]:
        """Take a step; whose groups are learned from, and the share that was asked before."""
        self.hard = hard
        groups = self.trainer.roll_out()
        self.trainer.step += 1
        size = self.trainer.settings.group
        return [g[0].problem.arguments for g in groups_of(groups.rollouts, size)], groups.replayed


def test_what_is_not_settled_is_asked_until_it_is(tempted, monkeypatch):
    one = Asker(tempted, monkeypatch, replay=0.5)
    problems, replayed = one.ask(hard=one.drawn(0, 1, 3))
    assert ({*problems}, replayed) == (one.drawn(0, 0, 1, 2, 3), 0)

    problems, replayed = one.ask(hard=one.drawn(0, 3) | one.drawn(1, 0))
    assert ({*problems}, replayed) == (one.drawn(0, 1, 3) | one.drawn(1, 0, 1), 0.5)

    problems, replayed = one.ask(hard=one.drawn(0, 3))
    assert ({*problems}, replayed) == (one.drawn(0, 3) | one.drawn(1, 0) | one.drawn(2, 0, 1), 0.5)

    problems, replayed = one.ask(hard=set())
    assert ({*problems}, replayed) == (one.drawn(0, 3) | one.drawn(3, 0, 1, 2), 0.25)

    problems, replayed = one.ask(hard=set())
    assert ({*problems}, replayed) == (one.drawn(4, 0, 1, 2, 3), 0)


def test_who_waits_longest_is_next(tempted, monkeypatch):
    one = Asker(tempted, monkeypatch, replay=0.25)
    one.ask(hard=one.drawn(0, 0, 1, 2, 3))
    (_, first), *others = one.trainer.state()["pool"]
    assert others and one.drawn(0, first) < {*one.ask(hard=set())[0]}


def test_dynamic_sampling_asks_nothing_twice_in_a_step(tempted, monkeypatch):
    one = Asker(tempted, monkeypatch, replay=1.0, dynamic_sampling=True)
    problems, replayed = one.ask(hard=one.drawn(0, 0, 2, 5))
    assert ({*problems}, replayed) == (one.drawn(0, 0, 2, 5), 0)
    problems, replayed = one.ask(hard=one.drawn(0, 2) | one.drawn(1, 1))
    assert len(problems) == 2 and {*problems} == one.drawn(0, 2) | one.drawn(1, 1)
    # Three again and one fresh, then three times what is missing, three and then two fresh ones.
    assert replayed == 3 / (4 + 3 + 2 + 2)


def test_the_pool_is_bounded(tempted, monkeypatch):
    one = Asker(tempted, monkeypatch, replay=0.1)  # of four problems, so none is taken
    steps = REMEMBERED * TINY["prompts"] // 2  # not every hard group ends up with a spread
    for step in range(steps):
        one.ask(hard=one.drawn(step, 0, 1, 2))
    waiting = one.trainer.state()["pool"]
    assert len(waiting) == REMEMBERED * TINY["prompts"]
    assert waiting == sorted(waiting) and waiting[0][0] > 0 and waiting[-1][0] == steps - 1


def test_what_is_asked_again_is_dealt_out(tempted, monkeypatch):
    """To a rank goes a half, or a quarter, of a step's problems; none has the hard ones alone."""
    one = Asker(tempted, monkeypatch, prompts=8, replay=0.5)
    one.ask(hard=one.drawn(0, *range(8)))
    problems, _ = one.ask(hard=set())
    again = one.drawn(0, *range(8))
    assert 0 < len(again.intersection(problems[:4])) < 4
