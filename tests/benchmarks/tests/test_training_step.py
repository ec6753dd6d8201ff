"""The measurement of a training step, made small: its contestants learn alike; failures."""

import json
import sys

import pytest

from tests.benchmarks.training import training_step
from tests.benchmarks.training.training_step import CONTESTANTS, LLAMA_1B, WARM_UP, operations
from tests.helpers.models.random_checkpoint import TINY
from transformer.model.decoder import Transformer


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The rows that the command writes, with two short rows of tokens in a step."""
    monkeypatch.setattr(training_step, "TOKENS", 64)
    monkeypatch.setattr(training_step, "new_document", lambda *_, **about: about | {"rows": []})
    monkeypatch.setattr(training_step, "passed", lambda: 1.0)  # however old the process is

    def measured(*arguments):
        out = tmp_path / "x.json"
        few = ["--device", "cpu", "--tiny", "--length", "32", "--steps", "2"]
        monkeypatch.setattr(sys, "argv", ["training_step", "--out", str(out), *few, *arguments])
        training_step.main()
        return json.loads(out.read_text())["rows"]

    return measured


def test_contestants_learn_alike(measured):
    """Ours compiled and torch's attention as it comes, from the same weights on the same tokens."""
    ours, plain = measured("--contestant", "ours compiled", "sdpa")
    assert "reason" not in ours and "reason" not in plain, (ours, plain)
    assert (ours["rows"], ours["length"]) == (2, 32)
    assert ours["attention"] != "sdpa" == plain["attention"]
    for row in (ours, plain):
        assert len(row["losses"]) == WARM_UP + 2 and row["losses"][-1] < row["losses"][0]
        assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-4)


def test_every_contestant_has_a_row_and_a_failure_is_a_reason(measured, monkeypatch):
    def fails(*_):
        raise RuntimeError("no attention here")

    monkeypatch.setattr(training_step, "choose_attention", fails)
    rows = measured()
    assert [row["contestant"] for row in rows] == [*CONTESTANTS]
    assert {row["reason"] for row in rows} == {"RuntimeError: no attention here"}
    assert [row["reason"] for row in measured("--seconds", "0")] == (
        ["no time was left after 0 s"] * len(CONTESTANTS)
    )


def test_operations():
    """A tiny model's, by hand: two layers with 4 heads of 16 dims and 2 heads of keys."""
    projections = 64 * 64 * 2 + 2 * 64 * 32 + 2 * 32 + 64 + 3 * 64 * 96 + 2 * 64  # with biases
    tied = 2 * projections + 64
    assert operations(Transformer(TINY), 100) == 6 * tied + 3 * 2 * (2 * 64 * 100)
    assert LLAMA_1B.tied_embeddings and not training_step.MODEL.tied_embeddings
