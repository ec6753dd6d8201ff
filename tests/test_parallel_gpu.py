"""The measurement of training on several GPUs: what it makes of what processes leave, or do not."""

import argparse
import math
from pathlib import Path

import parallel_gpu
import pytest
import torch

STEP = {"reward": 0.5, "length": 40.0, "entropy": 0.3, "gradient_norm": 2.0, "loss": 1e-7}


def found(scale=1.0, **changed):
    """What a part of the equality leaves: two weights that moved by 3 and by 4."""
    weights = {"a": torch.tensor([3.0 * scale]), "b": torch.tensor([4.0 * scale])}
    start = {name: torch.zeros(1) for name in weights}
    metrics = [{**STEP, **changed, "gap_max": 1e-6}]
    return {"start": start, "metrics": metrics, "weights": weights}


def test_rounding_is_equal_and_more_is_not():
    row = parallel_gpu.compared("grpo", "2", found(1 + 1e-4, reward=0.50001), found(), "")
    assert "reason" not in row and row["gap"] == 1e-6
    assert row["weights"] == pytest.approx(1e-4, rel=1e-2)  # of 5, the norm of what moved
    assert row["metrics"]["reward"] == pytest.approx(2e-5)
    assert row["metrics"]["loss"] == 0.0


@pytest.mark.parametrize(
    "other", [found(1.02), found(gradient_norm=4.0), found(loss=math.nan), found(math.nan)]
)
def test_what_is_not_equal_has_a_reason(other):
    row = parallel_gpu.compared("grpo", "2", other, found(), "")
    assert row["reason"].startswith("metrics differ by ")


def test_what_failed_is_no_comparison():
    row = parallel_gpu.compared("grpo", "2", {"reason": "ended with code 1"}, found(), "")
    assert row["reason"] == "ended with code 1" and "weights" not in row
    _, resumed = parallel_gpu.equality("grpo", 2, found(), found())
    assert resumed["reason"] == "there was nothing to go on from"


def test_ratios_are_of_tokens_per_second():
    one = {"step_tokens_per_second": 100.0, "learn_tokens_per_second": 300.0}
    many = {"step_tokens_per_second": 190.0, "learn_tokens_per_second": 450.0}
    found = {1: one, 2: many, 4: {"reason": "no time was left"}}
    alone, two, four = parallel_gpu.speed("GRPO", found)
    assert (two["step_ratio"], two["learn_ratio"], two["gpus"]) == (1.9, 1.5, 2)
    assert "step_ratio" not in alone and "step_ratio" not in four
    _, two = parallel_gpu.speed("GRPO", {1: {"reason": "out of memory"}, 2: many})
    assert "step_ratio" not in two


@pytest.mark.parametrize(("available", "at_once"), [(4, [[1, 2], [4]]), (8, [[1, 2, 4]])])
def test_sizes_share_the_gpus_that_there_are(tmp_path, available, at_once):
    args = argparse.Namespace(device="cuda", available=available)
    session, placed = parallel_gpu.Session(args, tmp_path), {}

    def run(names, size, gpus):
        placed[size] = gpus
        return dict.fromkeys(names)

    session.run = run
    found = session.times({4, 1, 2})
    for sizes in at_once:
        used = [gpu for size in sizes for gpu in placed[size]]
        assert len({*used}) == len(used) == sum(sizes) and max(used) < available
    assert [*found[2]] == [*parallel_gpu.FAST]
    assert not parallel_gpu.GROWING.keys() & found[1].keys()


def test_what_fails_does_not_keep_the_rest_from_being_done(tmp_path):
    """The first start does one part and dies in the second; the next one goes on after it."""
    args = argparse.Namespace(device="cpu", tiny=True, out=Path("out"), seconds=1e9)
    session, started = parallel_gpu.Session(args, tmp_path), []

    def start(command, log, gpus):
        names = command[command.index("tiny") + 1 :]
        started.append(names)
        for name in names:
            if name == "second":
                (tmp_path / "second 2 reason").write_text("ValueError: no")
                return "ended with code 1"
            torch.save({"tokens": [1.0]}, tmp_path / f"{name} 2.pt")
        return None

    session.start = start
    results = session.run(["first", "second", "third"], 2)
    assert started == [["first", "second", "third"], ["third"]]
    assert results["second"] == {"reason": "ValueError: no"}
    assert results["first"] == results["third"] == {"tokens": [1.0]}


def test_a_start_without_time_is_not_made(tmp_path):
    args = argparse.Namespace(device="cpu", tiny=True, out=Path("out"), seconds=0.0)
    results = parallel_gpu.Session(args, tmp_path).run(["one", "two"], 1)
    assert results == {name: {"reason": "no time was left"} for name in ("one", "two")}


def test_a_process_that_hangs_is_ended(tmp_path):
    log = tmp_path / "log"
    assert parallel_gpu.finished(["sleep", "60"], log, 0.1) == "did not end within 0 s"
    assert parallel_gpu.finished(["false"], log, 10) == "ended with code 1"
    assert parallel_gpu.finished(["true"], log, 10) is None
