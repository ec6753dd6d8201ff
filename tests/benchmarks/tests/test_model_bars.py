"""The lists of questions to the shipped models: their truths, and what counts as right."""

import re

from tests.benchmarks.transformer.model_bars import ASKED, Asked, lists
from transformer.tasks.phrases import REPLIES
from transformer.tasks.task import worked

LISTS = lists()


def truth_of(kind, truth, text):
    """What the words of a question say of its truth."""
    words = re.findall(r"\w+", text.lower())
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    letters = [word for word in words if len(word) == 1]
    counts = {word.count(x) for word in words if len(word) > 4 for x in letters}
    return {
        "max": lambda: str(max(numbers)),
        "min": lambda: str(min(numbers)),
        "sort": lambda: ", ".join(map(str, sorted(numbers))),
        "desc": lambda: ", ".join(map(str, sorted(numbers, reverse=True))),
        "reverse": lambda: truth if truth[::-1] in words else None,
        "count": lambda: truth if int(truth) in counts else None,
    }[kind]()


def test_a_phrasing_has_its_truth():
    """The truth fits the words of the question, and it alone is right."""
    problems = {problem.question: problem for problem in LISTS["asked: phrasings"]}
    lines = (ASKED / "phrasings.txt").read_text(encoding="utf-8").splitlines()
    assert len(problems) == len(lines) == 200
    for kind, truth, text in (line.split("\t") for line in lines):
        problem = problems[text]
        if isinstance(problem.task, Asked) and problem.arguments[1]:
            assert all(problem.reward(sentence) for sentence in problem.arguments[1])
            assert not problem.reward("Fine.") and not problem.reward(REPLIES["complaint"][0])
            continue
        answer = truth
        if kind in ("sum", "diff", "prod"):
            assert problem.held_out, "training may have seen it"
            answer = problem.task.answer(*problem.arguments)
        else:
            assert truth == truth_of(kind, truth, text), text
        assert problem.reward(worked("", answer)) == 1, text
        assert problem.reward(worked("", f"{answer}1")) == problem.reward(answer) == 0, text


def test_a_question_of_people_has_its_truth():
    """The truth alone is right; what is to be declined, is."""
    lines = (ASKED / "people.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 160
    for line, problem in zip(lines, LISTS["asked: people"], strict=True):
        kind, truth, text = line.split("\t")
        assert problem.question == text
        if kind == "no":
            assert (
                problem.reward(REPLIES["beyond"][0]) == 1 and problem.reward(worked("", "7")) == 0
            )
            continue
        if truth:
            answer = str(eval(truth)) if kind in ("sum", "diff", "prod") else truth
            assert problem.reward(worked("", answer)) == 1, text
        assert problem.reward(REPLIES["beyond"][0]) == problem.reward(worked("", "1.5")) == 0, text


def test_an_opener_is_greeted():
    for problem in LISTS["asked: openers"]:
        assert problem.reward(REPLIES["greeting"][0]) == 1
        assert problem.reward(REPLIES["unknown"][0]) == 0
