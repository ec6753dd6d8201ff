"""What is practised: problems of all kinds, none held out, and what a careful teacher says."""

from collections import Counter
from random import Random

import pytest

from transformer.rl.practice import FINISH, PRACTICE, Finish, Mix, Practice
from transformer.training.corpus import CAREFUL


@pytest.mark.parametrize("task", [Mix(), Practice(), Finish()], ids=lambda task: task.name)
def test_training_and_evaluation_share_no_problem(task):
    rng = Random(0)
    assert not any(task.sample(rng).held_out for _ in range(1000))
    assert all(task.sample(rng, held_out=True).held_out for _ in range(200))


@pytest.mark.parametrize("task", [*PRACTICE, *FINISH], ids=lambda task: type(task).__name__)
def test_a_careful_teacher_earns_every_reward(task):
    rng = Random(1)
    for _ in range(50):
        problem = task.sample(rng)
        assert problem.reward(CAREFUL.reply(rng, problem)) == 1


def test_some_is_practised_under_a_system_prompt_or_as_a_second_question():
    rng = Random(2)
    first = Counter(
        problem.messages[0]["role"] if len(problem.messages) % 2 == 0 else len(problem.messages)
        for problem in (Practice().sample(rng) for _ in range(1000))
    )
    assert first["system"] > 100 and first[3] > 50 and first[1] > 500
