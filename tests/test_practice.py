"""What is practised: problems of all kinds, none held out, and what a careful teacher says."""

from collections import Counter
from random import Random

import pytest

from transformer.corpus import CAREFUL
from transformer.practice import PRACTICE, Close, LongSort, Mix, Practice


@pytest.mark.parametrize("task", [Mix(), Practice()], ids=["mix", "practice"])
def test_training_and_evaluation_share_no_problem(task):
    rng = Random(0)
    assert not any(task.sample(rng).held_out for _ in range(1000))
    assert all(task.sample(rng, held_out=True).held_out for _ in range(200))


@pytest.mark.parametrize("task", PRACTICE, ids=lambda task: type(task).__name__)
def test_a_careful_teacher_earns_every_reward(task):
    rng = Random(1)
    for _ in range(50):
        problem = task.sample(rng)
        assert problem.reward(CAREFUL.reply(rng, problem)) == 1


def test_what_is_practised_adds_up_and_is_held_out_as_it_was_taught():
    assert sum(PRACTICE.values()) == 100
    rng = Random(2)
    kinds = Counter(type(Practice().sample(rng, held_out=True).task) for _ in range(500))
    assert not kinds.keys() & {Close, LongSort}
    prompted = [Practice().sample(rng) for _ in range(500)]
    assert 0 < sum(p.messages[0]["role"] == "system" for p in prompted) < 250


def test_close_numbers_begin_alike_and_either_is_the_larger_one():
    rng = Random(3)
    drawn = [Close(4).arguments(rng) for _ in range(400)]
    assert all(a // 1000 == b // 1000 for a, b in drawn)
    assert 0.3 < sum(a < b for a, b in drawn) / len(drawn) < 0.7
