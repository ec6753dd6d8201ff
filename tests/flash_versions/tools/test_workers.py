"""Processes that do tasks: what hangs or dies is named, and the rest goes on."""

import io
import json
import time

import pytest

from flash_versions.bench import workers
from flash_versions.bench.workers import Worker, answers, work

HELPER = "tests.helpers.kernels.trials"


@pytest.mark.parametrize(
    ("version", "limit", "why"),
    [("hangs", 2.0, "did not end within 2 s"),
     ("dies", 20.0, "the process ended with 7: illegal memory access")],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_task_that_hangs_or_dies_is_named_and_the_rest_goes_on(version, limit, why, at_once):
    began, tasks = time.monotonic(), [(version, number) for number in range(4)]
    found = dict(answers(tasks, at_once, (HELPER,), limit, 60.0))
    assert time.monotonic() - began < 30
    right = {"outcome": "passed"}
    wrong = {"outcome": "failed", "running": version, "why": why}
    assert [found[task] for task in tasks] == [right, wrong, right, right]


def test_what_time_does_not_allow_is_not_tried():
    tasks = [("hangs", number) for number in (1, 0, 2)]
    found = dict(answers(tasks, 1, (HELPER,), 2.0, 1.0))
    assert [found[task]["outcome"] for task in tasks] == ["failed", "not tried", "not tried"]


def test_a_worker_says_what_it_runs():
    worker = Worker(HELPER)
    assert worker.ask(("a", 0), 20.0) == {"outcome": "passed"}
    assert worker.ask(("dies", 1), 20.0)["running"] == "dies"
    worker.end()


def test_a_worker_answers_each_task(monkeypatch, capsys):
    """Also after one that failed."""
    monkeypatch.setattr("sys.stdin", io.StringIO("[6, 0]\n[6, 3]\n"))
    work(lambda x, y: {"found": x // y})
    said = [json.loads(x) for x in capsys.readouterr().out.split("\n") if x]
    assert said[0] == {"ready": True} and said[2] == {"found": 2}
    assert said[1]["outcome"] == "failed" and said[1]["why"].startswith("ZeroDivisionError: ")


def test_all_of_an_error_is_told(monkeypatch, capsys):
    """Triton's says in its last line what is wrong."""

    def fail():
        raise RuntimeError("at 1:0:\n    x\nmodule has no attribute 'foo'")

    monkeypatch.setattr("sys.stdin", io.StringIO("[]\n"))
    work(fail)
    assert "no attribute 'foo'" in json.loads(capsys.readouterr().out.splitlines()[-1])["why"]


def test_what_a_task_prints_is_no_answer():
    worker = Worker(HELPER)
    for _ in range(2):
        assert worker.ask(("prints", 0), 20.0) == {"outcome": "passed"}
    worker.end()


def test_starting_is_not_hanging():
    worker = Worker(HELPER)
    assert worker.ask(("starts slowly", 0), 0.5) == {"outcome": "passed"}
    assert worker.ask(("hangs", 1), 0.5)["why"] == "did not end within 0.5 s"
    worker.end()


def test_nothing_that_hangs_runs_on(monkeypatch):
    """Where nobody waits for it any more."""
    begun = []
    monkeypatch.setattr(workers, "Worker", lambda *given: begun.append(Worker(*given)) or begun[-1])
    found = answers([("a", 0), ("hangs", 1)], 1, (HELPER,), 60.0, 60.0)
    assert next(found)[1] == {"outcome": "passed"}
    assert begun[0].process.poll() is None
    found.close()
    begun[0].process.wait(10)
