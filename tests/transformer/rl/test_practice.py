"""What is practised: problems of all kinds, none held out, and what a careful teacher says."""

from random import Random

import pytest

from transformer.rl.practice import PRACTICE, Mix, Practice
from transformer.training.corpus import CAREFUL


@pytest.mark.parametrize("task", [Mix(), Practice()], ids=lambda task: task.name)
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
