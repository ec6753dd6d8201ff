"""The measurement of the host's time, with calls that do nothing, which need no GPU."""

import pytest
import torch

from tests.benchmarks.attention import host as bench


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(bench, "now", lambda device: bench.time.perf_counter())
    monkeypatch.setattr(bench, "ROUNDS", 3)
    monkeypatch.setattr(bench, "CALLS", 2)


def test_dense_and_packed_calls_take_turns(monkeypatch):
    """All of a round before any of the next; what fails gets a reason and no time."""
    asked = []

    def calls_of(function, heads_first, shape, packed):
        if function == "broken":
            return {"forward": torch.zeros(1).view}
        return {"forward": lambda: asked.append((function, packed))}

    names = {"fa3": ("fa3", False, None), "broken": ("broken", False, None)}
    monkeypatch.setattr(bench, "contestants", lambda packed: names)
    monkeypatch.setattr(bench, "calls_of", calls_of)
    rows = bench.rows_of((2, 64, 8, 64), (False, True), wait=False)
    assert asked[-12:] == 3 * [("fa3", False), ("fa3", False), ("fa3", True), ("fa3", True)]
    assert [(x["packed"], x["contestant"]) for x in rows if "reason" in x] == [
        (False, "broken"), (True, "broken")
    ]  # fmt: skip
    timed = [x for x in rows if "us" in x]
    assert [x["packed"] for x in timed] == [False, True]
    assert all(x["least"] <= x["us"] <= x["most"] and x["measured"] == "host" for x in timed)
