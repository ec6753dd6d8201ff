"""The limit on the time of a reward: whatever it waits for, and wherever it is called."""

import re
import signal
import threading
import time
from dataclasses import replace

import pytest

from tests.helpers.models.tiny_grpo import Count, make_trainer
from transformer.rl.limit import at_most
from transformer.rl.run import Run
from transformer.tasks.verifiers import RewardError


def sleep():
    time.sleep(60)


def loop():
    while True:
        pass


def search():
    re.fullmatch(r"(a+)+b", 60 * "a")


def hide():
    try:
        time.sleep(60)
    except Exception:
        return


@pytest.mark.parametrize("body", [sleep, loop, search, hide])
def test_what_takes_too_long_is_stopped_where_it_was(body):
    before, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(RewardError) as told, at_most(0.05, "mine"):
        body()
    limit, _, place = str(told.value).partition(" and was at ")
    assert limit == "mine took more than 0.05 seconds (--reward-seconds)"
    assert re.fullmatch(r".+\.py, line \d+", place)
    assert time.monotonic() - started < 30
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_error_within_the_limit_is_itself():
    with pytest.raises(KeyError), at_most(60, "mine"):
        raise KeyError("no such word")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_another_thread_is_told_afterwards():
    told = []

    def run():
        try:
            with at_most(0.01, "mine"):
                time.sleep(0.05)
        except RewardError as error:
            told.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert told == ["mine took more than 0.01 seconds (--reward-seconds)"]


class Sleepy(Count):
    name = "sleepy"

    def reward(self, completion: str, *arguments) -> float:
        time.sleep(60)
        return 1.0


def test_a_run_names_the_completion(tempted):
    trainer = make_trainer(tempted, task=f"{__name__}:Sleepy", reward_seconds=0.05)
    message = r"the reward of task 'sleepy' took more than 0.05 .*, for the completion '.*' of '\?"
    with pytest.raises(ValueError, match=message):
        trainer.roll_out()


def test_a_run_may_go_on_with_another_limit(tempted, tmp_path):
    settings = make_trainer(tempted).settings
    Run(tmp_path / "run", settings)
    Run(tmp_path / "run", replace(settings, reward_seconds=5.0))
