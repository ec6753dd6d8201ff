"""The lists of questions to the shipped models: their truths, and what counts as right."""

import re

import pytest

from tests.benchmarks.transformer.model_bars import ASKED, Asked, lists
from transformer.tasks.phrases import REPLIES
from transformer.tasks.task import worked

LISTS = lists()
LINES = [
    line.split("\t") for line in (ASKED / "phrasings.txt").read_text(encoding="utf-8").splitlines()
]
PHRASINGS = {problem.question: problem for problem in LISTS["asked: phrasings"]}


def test_the_lists_are_whole():
    assert {name: len(problems) for name, problems in LISTS.items()} == {
        "asked: differences of two digits, not below zero": 4095,
        "asked: differences of two digits, below zero": 4005,
        "asked: openers": 50,
        "asked: phrasings": 200,
    }
    assert len(PHRASINGS) == 200


@pytest.mark.parametrize("kind, truth, text", LINES, ids=[text for *_, text in LINES])
def test_a_phrasing_has_its_truth(kind, truth, text):
    """The truth fits the words of the question, and it alone is right."""
    problem = PHRASINGS[text]
    if isinstance(problem.task, Asked) and problem.arguments[1]:
        assert all(problem.reward(sentence) for sentence in problem.arguments[1])
        assert not problem.reward("Fine.")
        assert problem.reward(REPLIES["complaint"][0]) == 0
        return
    words = re.findall(r"\w+", text.lower())
    if kind in ("sum", "diff", "prod"):
        assert set(re.split(r"\D", truth)) <= set(words) | set(re.findall(r"\d+", text))
        assert problem.held_out, "training may have seen it"
        answer = problem.task.answer(*problem.arguments)
    else:
        answer = truth
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        letters = [word for word in words if len(word) == 1]
        counts = {word.count(x) for word in words if len(word) > 4 for x in letters}
        expected = {
            "max": lambda: str(max(numbers)),
            "min": lambda: str(min(numbers)),
            "sort": lambda: ", ".join(map(str, sorted(numbers))),
            "desc": lambda: ", ".join(map(str, sorted(numbers, reverse=True))),
            "reverse": lambda: truth if truth[::-1] in words else None,
            "count": lambda: truth if int(truth) in counts else None,
        }
        assert truth == expected[kind]()
    assert problem.reward(worked("", answer)) == 1
    assert problem.reward(worked("", f"{answer}1")) == problem.reward(answer) == 0


def test_an_opener_is_greeted():
    for problem in LISTS["asked: openers"]:
        assert problem.reward(REPLIES["greeting"][0]) == 1
        assert problem.reward(REPLIES["unknown"][0]) == 0
