"""Processes that do tasks: what hangs or dies is named, and the rest goes on."""

import io
import json
import time

import pytest

from flash_versions.bench.workers import Worker, answers, work

HELPER = "tests.helpers.kernels.trials"


@pytest.mark.parametrize(
    ("version", "limit", "why"),
    [("hangs", 2.0, "did not end within 2 s"),
     ("dies", 20.0, "the process ended with 7: illegal memory access")],
)  # fmt: skip
@pytest.mark.parametrize("workers", [1, 3])
def test_a_task_that_hangs_or_dies_is_named_and_the_rest_goes_on(version, limit, why, workers):
    began, tasks = time.monotonic(), [(version, number) for number in range(4)]
    found = dict(answers(tasks, workers, (HELPER,), limit, 60.0))
    assert time.monotonic() - began < 30
    right = {"outcome": "passed"}
    wrong = {"outcome": "failed", "why": why}
    assert [found[task] for task in tasks] == [right, wrong, right, right]


def test_what_time_does_not_allow_is_not_tried():
    tasks = [("hangs", number) for number in (1, 0, 2)]
    found = dict(answers(tasks, 1, (HELPER,), 2.0, 1.0))
    assert [found[task]["outcome"] for task in tasks] == ["failed", "not tried", "not tried"]


def test_a_worker_says_what_it_runs():
    worker, running = Worker(HELPER), []
    assert worker.ask(("a", 0), 20.0, running.append) == {"outcome": "passed"}
    assert worker.ask(("dies", 1), 20.0, running.append)["outcome"] == "failed"
    assert running == ["a", "dies"]
    worker.end()


def test_a_worker_answers_each_task(monkeypatch, capsys):
    """Also after one that failed."""
    monkeypatch.setattr("sys.stdin", io.StringIO("[6, 0]\n[6, 3]\n"))
    work(lambda x, y: {"found": x // y})
    failed, right = map(json.loads, capsys.readouterr().out.splitlines())
    assert failed["outcome"] == "failed" and "by zero" in failed["why"]
    assert right == {"found": 2}
