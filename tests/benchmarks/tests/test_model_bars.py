"""The questions to the shipped models that are hard to read."""

from tests.benchmarks.transformer.model_bars import ASKED, lists
from transformer.tasks.phrases import REPLIES
from transformer.tasks.task import worked


def test_a_question_of_people_has_its_truth():
    """The truth alone is right; what is to be declined, is."""
    lines = (ASKED / "people.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 160
    for line, problem in zip(lines, lists()["asked: people"], strict=True):
        kind, truth, text = line.split("\t")
        assert problem.question == text
        if kind == "no":
            assert problem.reward(REPLIES["beyond"][0]) == 1
            assert problem.reward(worked("", "7")) == 0
            continue
        if truth:
            answer = str(eval(truth)) if kind in ("sum", "diff", "prod") else truth
            assert problem.reward(worked("", answer)) == 1, text
        assert problem.reward(REPLIES["beyond"][0]) == problem.reward(worked("", "1.5")) == 0, text
