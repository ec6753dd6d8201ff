"""The measurement of training, made small: what its rows say, and that its losses are right."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.benchmarks.training import training
from transformer.training.run import MODEL, Recipe

TINY = replace(
    MODEL,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    head_dim=16,
    max_positions=1024,
)


@pytest.fixture(autouse=True)
def small(monkeypatch, device):
    """Two steps of a tiny model, and a small layer; the versions that were trained."""
    trained = []

    def recipe(teacher, seed, steps, batch_tokens, learning_rate, attention):
        trained.append(attention)
        return Recipe(teacher, seed, steps, 1024, learning_rate, model=TINY, attention=attention)

    monkeypatch.setattr(training, "Recipe", recipe)
    monkeypatch.setattr(training, "DEVICE", device)
    monkeypatch.setattr(training, "WORKERS", 0)
    monkeypatch.setattr(training, "CURVE_STEPS", 2)
    monkeypatch.setattr(training, "ROUNDS", 3)
    monkeypatch.setattr(training, "STEPS", 2)
    monkeypatch.setattr(training, "SHAPE", {"B": 1, "S": 16, "H": 1, "D": 16, "causal": True})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return trained


def test_losses_are_of_a_token_and_repeat(small):
    """An untrained model is about as sure as one that guesses; a version differs by rounding."""
    row = training.curve("sdpa", 0)
    assert (row["suite"], row["version"], row["seed"]) == ("training curve", "sdpa", 0)
    assert row["losses"] == pytest.approx([math.log(TINY.vocab_size)] * 2, rel=0.1)
    assert training.curve("fa2", 0)["losses"] == pytest.approx(row["losses"], abs=2e-3)
    other = training.curve("sdpa", 1)["losses"]
    assert other != pytest.approx(row["losses"], abs=2e-3)
    assert small == ["sdpa", "fa2", "sdpa"]


def test_competitors_take_turns(monkeypatch):
    """One call of each to begin with, then round after round; the median is kept."""
    turns = []

    def called(function, name):
        def call(*args, **options):
            turns.append(name or options["version"])
            return function(*args, **options)

        return call

    monkeypatch.setattr(training, "VERSIONS", ("fa2",))
    monkeypatch.setattr(training, "BACKENDS", {"torch fa2": SDPBackend.MATH})
    for what, name in (("attention", None), ("torch_backend", "torch fa2")):
        function = getattr(training, what)
        monkeypatch.setattr(training, what, called(function, name))
    rows = training.layer_rows()
    assert turns == ["fa2", "fa2", "torch fa2", "torch fa2"] * (1 + training.ROUNDS)
    assert [row["version"] for row in rows] == ["fa2", "torch fa2"]
    for row in rows:
        assert len(row["times"]) == 3 and row["seconds"] == sorted(row["times"])[1] > 0
        assert row | training.SHAPE == row


@pytest.mark.parametrize(
    "part, expected",
    [
        ([], ["layer", *["training curve"] * 9]),
        (["--part", "layer"], ["layer"]),
        (["--part", "training curve"], ["training curve"] * 9),
    ],
    ids=["all", "layer", "curves"],
)
def test_file_holds_what_was_asked_for(part, expected, tmp_path, monkeypatch):
    def row(suite, version, seed=None):
        return {"suite": suite, "version": version, "seed": seed}

    out = tmp_path / "training.json"
    monkeypatch.setattr(training, "layer_rows", lambda: [row("layer", "fa3")])
    monkeypatch.setattr(training, "curve", partial(row, "training curve"))
    monkeypatch.setattr("flash_versions.bench.document.machine", lambda device: {"gpu": "none"})
    monkeypatch.setattr("sys.argv", ["training.py", "--out", str(out), *part])
    training.main()
    document = json.loads(out.read_text())
    assert [row["suite"] for row in document["rows"]] == expected
    assert document["protocol"]["rounds"] == 3 and document["machine"] == {"gpu": "none"}
    found = {(x["version"], x["seed"]) for x in document["rows"] if x["suite"] != "layer"}
    assert not found or found == {(v, s) for v in ("sdpa", "fa3", "fa4") for s in (0, 1, 2)}
