"""The measurement of training on several GPUs: what it makes of what processes leave, or do not."""

import argparse
import json
import math
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.training import parallel

STEP = {"reward": 0.5, "length": 40.0, "entropy": 0.3, "gradient_norm": 2.0, "loss": 1e-7}


def found(scale=1.0, **changed):
    """What a part of the equality leaves: two weights that moved by 3 and by 4."""
    weights = {"a": torch.tensor([3.0 * scale]), "b": torch.tensor([4.0 * scale])}
    start = {name: torch.zeros(1) for name in weights}
    metrics = [{**STEP, **changed, "gap_max": 1e-6}]
    return {"start": start, "metrics": metrics, "weights": weights}


def test_rounding_is_equal_and_more_is_not():
    row = parallel.compared("grpo", "2", found(1 + 1e-4, reward=0.50001), found(), "")
    assert "reason" not in row and row["gap"] == 1e-6
    assert row["weights"] == pytest.approx(1e-4, rel=1e-2)  # of 5, the norm of what moved
    assert row["metrics"]["reward"] == pytest.approx(2e-5)
    assert row["metrics"]["loss"] == 0.0


@pytest.mark.parametrize(
    "other", [found(1.02), found(gradient_norm=4.0), found(loss=math.nan), found(math.nan)]
)
def test_what_is_not_equal_has_a_reason(other):
    row = parallel.compared("grpo", "2", other, found(), "")
    assert row["reason"].startswith("metrics differ by ")


def test_what_failed_is_no_comparison():
    row = parallel.compared("grpo", "2", {"reason": "ended with code 1"}, found(), "")
    assert row["reason"] == "ended with code 1" and "weights" not in row
    _, resumed = parallel.equality("grpo", 2, found(), found())
    assert resumed["reason"] == "there was nothing to go on from"


def test_ratios_are_of_tokens_per_second():
    one = {"step_tokens_per_second": 100.0, "learn_tokens_per_second": 300.0}
    many = {"step_tokens_per_second": 190.0, "learn_tokens_per_second": 450.0}
    found = {1: one, 2: many, 4: {"reason": "no time was left"}}
    alone, two, four = parallel.speed("GRPO", found)
    assert (two["step_ratio"], two["learn_ratio"], two["gpus"]) == (1.9, 1.5, 2)
    assert "step_ratio" not in alone and "step_ratio" not in four
    _, two = parallel.speed("GRPO", {1: {"reason": "out of memory"}, 2: many})
    assert "step_ratio" not in two


@pytest.mark.parametrize(("available", "at_once"), [(4, [[1, 2], [4]]), (8, [[1, 2, 4]])])
def test_sizes_share_the_gpus_that_there_are(tmp_path, available, at_once):
    args = argparse.Namespace(device="cuda", available=available, what=[*parallel.FAST])
    session, placed, found = parallel.Session(args, tmp_path), {}, {}

    def run(names, size, gpus, done):
        placed[size] = gpus
        found[size] = names

    session.run = run
    session.times({4, 1, 2}, done=None)
    for sizes in at_once:
        used = [gpu for size in sizes for gpu in placed[size]]
        assert len({*used}) == len(used) == sum(sizes) and max(used) < available
    assert [*found[2]] == [*parallel.FAST]
    assert not parallel.GROWING.keys() & {*found[1]}


def test_what_fails_does_not_keep_the_rest_from_being_done(tmp_path):
    """The first start does one part and dies in the second; the next one goes on after it."""
    args = argparse.Namespace(device="cpu", tiny=True, out=Path("out"), seconds=1e9)
    session, started = parallel.Session(args, tmp_path), []

    def start(command, log, gpus, poll):
        names = command[command.index("tiny") + 1 :]
        started.append(names)
        for name in names:
            if name == "second":
                (tmp_path / "second 2 reason").write_text("ValueError: no")
                return "ended with code 1"
            torch.save({"tokens": [1.0]}, tmp_path / f"{name} 2.pt")
        return None

    session.start = start
    kept = []
    results = session.run(["first", "second", "third"], 2, done=lambda *of: kept.append(of))
    assert started == [["first", "second", "third"], ["third"]]
    assert kept == [(name, 2, results[name]) for name in ("first", "second", "third")]
    assert results["second"] == {"reason": "ValueError: no"}
    assert results["first"] == results["third"] == {"tokens": [1.0]}


def test_a_start_without_time_is_not_made(tmp_path):
    args = argparse.Namespace(device="cpu", tiny=True, out=Path("out"), seconds=0.0)
    results = parallel.Session(args, tmp_path).run(["one", "two"], 1)
    assert results == {name: {"reason": "no time was left"} for name in ("one", "two")}


def test_a_process_that_hangs_is_ended(tmp_path):
    log, limit = tmp_path / "log", lambda: 10
    assert parallel.finished(["sleep", "60"], log, lambda: 0.1) == "did not end within 0 s"
    assert parallel.finished(["false"], log, limit) == "ended with code 1"
    assert parallel.finished(["true"], log, limit) is None


def test_what_is_done_gives_a_process_more_time(tmp_path):
    ends = time.monotonic() + 1.5
    command, log = ["sleep", "2"], tmp_path / "log"
    going_on = lambda: time.monotonic() < ends  # noqa: E731
    assert parallel.finished(command, log, lambda: 1.5, poll=going_on) is None


def test_a_file_is_written_after_each_part(tmp_path, monkeypatch):
    """The ratio comes when one GPU is there, also to what was measured before."""
    args = argparse.Namespace(
        device="cpu", tiny=True, out=tmp_path / "out", seconds=1e9, gpus=[2], available=1,
        part=parallel.SPEED, what=["GRPO, 0.5 B", "GRPO, 0.5 B, per GPU"],
    )  # fmt: skip
    written = []

    def times(session, sizes, done):
        for name, size, rate in [(args.what[0], 2, 90.0), (args.what[1], 2, 80.0),
                                 (args.what[0], 1, 50.0)]:  # fmt: skip
            done(name, size, {"step_tokens_per_second": rate})
            written.append(json.loads(args.out.read_text())["rows"])

    monkeypatch.setattr(parallel.Session, "times", times)
    parallel.measure(args, tmp_path)
    assert [len(rows) for rows in written] == [1, 2, 4]
    assert [row.get("step_ratio") for row in written[-1]] == [None, 1.8, None, 1.6]
