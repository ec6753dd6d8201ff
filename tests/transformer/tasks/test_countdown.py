"""Countdown: the problems, their judge, and a teacher who searches with limited patience."""

import itertools
import math
import re
import statistics
from random import Random

import pytest

from transformer.tasks.countdown import Countdown, evaluate, ways
from transformer.tasks.task import Marks, worked
from transformer.train import PATIENCE
from transformer.training.corpus import Teacher

TASK = Countdown()
NUMBERS, TARGET = (3, 8, 4), 96
LINE = re.compile(r"(\d+)([-+*])(\d+)=(\d+) (\d+)([-+*])(\d+)=(\d+) (yes|no)")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def draw(count, seed=0):
    rng = Random(seed)
    return [TASK.sample(rng) for _ in range(count)]


# The problems.


def reachable(numbers):
    """Targets by brute force: both orders of every step, none of which leaves 1..999."""
    found = set()
    for a, b, c in itertools.permutations(numbers):
        for first, second in itertools.product(OPERATIONS.values(), repeat=2):
            step = first(a, b)
            if 1 <= step <= 999:
                found |= {second(step, c), second(c, step)}
    return {value for value in found if 1 <= value <= 999}


def test_ways_agree_with_brute_force():
    rng = Random(1)
    for _ in range(300):
        numbers = [rng.randint(1, rng.choice((5, 50))) for _ in range(3)]
        assert {way.value for way in ways(numbers)} == reachable(numbers), numbers


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_problem_has_an_answer(count):
    task, rng = Countdown(count), Random(2)
    for _ in range(40):
        numbers, target = arguments = task.arguments(rng)
        assert len(numbers) == count and min(numbers) >= 1 and max(numbers) <= 50
        assert 1 <= target <= 999
        assert task.reward(worked("", task.answer(*arguments)), *arguments) == 1


# The judge.

RIGHT = [
    *("(8*4)*3", "8*4*3", "3*(4*8)", "4*3*8", "8 * 4 * 3", "((8)*((4)))*3", "(((3*8*4)))"),
    *("8*  4 *3", "3*(8*4)"),
]


@pytest.mark.parametrize("answer", RIGHT)
def test_every_right_expression_is_accepted(answer):
    assert TASK.marks(worked("", answer), NUMBERS, TARGET) == Marks(answer=1, form=1)


@pytest.mark.parametrize("answer", ["7-(3-9)", "(7-3)+9", "7+9-3", "9-(3-7)"])
def test_steps_may_be_negative(answer):
    assert TASK.right(answer, (3, 9, 7), 13)


WRONG = {
    "target": "96",
    "tower": "9**9**9**9",
    "one number missing": "8*12",
    "a number twice": "8*4*3+3-3",
    "wrong value": "(8+4)*3",
    "underscore": "8*4*3_0",
    "unicode digits": "８*4*3",
    "leading zero": "08*4*3",
    "minus sign": "-8*-4*3",
    "minus sign inside": "8*(-4)*(-3)",
    "call": "8*(4)(3)",
    "adjacent": "8*4 3",
    "open bracket": "(8*4*3",
    "name": "__import__('os')",
    "newline": "8*4\n*3",
    "spaces around": " 8*4*3 ",
    "nothing": " ",
    "deep": "(" * 18 + "8*4*3" + ")" * 17,
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_no_reward_for(answer):
    assert TASK.marks(worked("", answer), NUMBERS, TARGET) == Marks(answer=0, form=1)


@pytest.mark.parametrize(
    "answer, numbers, target",
    [("3**2*1", (3, 2, 1), 9), ("8/4*3", (8, 4, 3), 6), ("3*8", (3, 3, 8), 24), ("3", (3,), 3)],
)
def test_no_reward_for_what_would_be_right_by_other_rules(answer, numbers, target):
    assert not TASK.right(answer, numbers, target)


# The teacher.


def lines_of(reply):
    thought, answer = re.fullmatch(
        r"<think>(.*)</think><answer>(.*)</answer>", reply, re.S
    ).groups()
    return [LINE.fullmatch(line).groups() for line in thought.split("\n")], answer


@pytest.mark.parametrize("patience", [0.75, 1.0])
def test_every_line_is_true_and_needs_only_itself_and_the_question(patience):
    rng = Random(4)
    for problem in draw(300):
        numbers, target = problem.arguments
        lines, answer = lines_of(Teacher(patience=patience).reply(rng, problem))
        results = []
        for a, first, b, step, c, second, d, result, verdict in lines:
            a, b, step, c, d, result = map(int, (a, b, step, c, d, result))
            assert OPERATIONS[first](a, b) == step and OPERATIONS[second](c, d) == result
            assert sorted([a, b, c, d]) == sorted([*numbers, step])  # the step is used once
            assert step in (c, d) and 1 <= step <= 999 and 1 <= result <= 999
            assert verdict == ("yes" if result == target else "no")
            results.append(result)
        assert len(set(results)) == len(results)
        assert target not in results[:-1]
        assert evaluate(answer)[0] == results[-1]
        assert sorted(evaluate(answer)[1]) == sorted(numbers)
        assert problem.marks(worked("", answer)) == Marks(float(results[-1] == target), 1)


def test_patience_decides_how_often_the_teacher_is_right():
    """Who needs k tries is right with probability patience to the power of k - 1."""
    rng, problems = Random(5), draw(1500, seed=5)
    tries = [len(lines_of(Teacher().reply(rng, problem))[0]) for problem in problems]
    for patience in (0.0, 0.5, PATIENCE):
        teacher = Teacher(patience=patience)
        share = statistics.mean(p.reward(teacher.reply(rng, p)) for p in problems)
        expected = statistics.mean(patience ** (k - 1) for k in tries)
        assert abs(share - expected) < 4 * math.sqrt(0.5 / len(problems)), patience
    assert 0.3 < share < 0.4  # with the patience that training has by default
