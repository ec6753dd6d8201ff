"""The measurement of trainers, made small: contestants learn alike; a failure is a reason."""

import json
import sys

import pytest

pytest.importorskip("trl", reason="needs trl: make test-trainers")
pytest.importorskip("peft", reason="needs peft: make test-trainers")

from tests.benchmarks.training import trainers  # noqa: E402


def new_document(*_, **about):
    """One of a machine that the tests do not look at."""
    return about | {"source": "", "machine": {}, "rows": []}


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The rows that the command writes of an integration."""
    monkeypatch.setattr(trainers, "new_document", new_document)
    monkeypatch.setattr(trainers, "passed", lambda: 1.0)  # however old the process is
    monkeypatch.setattr(trainers, "WARM_UP", 1)

    def measured(integration, *options):
        out = tmp_path / "x.json"
        few = ["--device", "cpu", "--tiny", "--steps", "1", "--integration", integration, *options]
        monkeypatch.setattr(sys, "argv", ["trainers", "--out", str(out), *few])
        trainers.main()
        return json.loads(out.read_text())["rows"]

    return measured


@pytest.mark.parametrize("integration", ["Trainer, padded rows", "TRL SFTTrainer, packed"])
def test_both_learn_alike(integration, measured):
    ours, plain = measured(integration)
    assert "reason" not in ours and "reason" not in plain, (ours, plain)
    assert (ours["contestant"], plain["contestant"]) == trainers.CONTESTANTS
    assert len(ours["times"]) == 1 and ours["seconds"] > 0
    assert ours["losses"] == pytest.approx(plain["losses"], abs=2e-4)


def test_a_failure_is_a_reason(measured, monkeypatch):
    def fails(*_):
        raise RuntimeError("no trainer here")

    name = "Trainer, padded rows"
    monkeypatch.setitem(trainers.INTEGRATIONS, name, fails)
    assert {row["reason"] for row in measured(name)} == {"RuntimeError: no trainer here"}
    both = measured("Trainer, FSDP2", "--add")
    assert [row["integration"] for row in both] == [name] * 2 + ["Trainer, FSDP2"] * 2
    assert "torchrun" in both[-1]["reason"]


def test_rows_of_another_machine_are_not_added_to(measured, monkeypatch):
    def other(*_, **about):
        return about | {"source": "other", "machine": {}, "rows": []}

    measured("Trainer, FSDP2")
    monkeypatch.setattr(trainers, "new_document", other)
    with pytest.raises(SystemExit, match="another source"):
        measured("Trainer, FSDP2", "--add")
