"""`--report-to` and `--quiet` of `train` and `grpo`: what trackers are told, and what is said."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.helpers.models.tiny_grpo import options
from tests.transformer.training.test_tuning import CHATS
from transformer import train
from transformer.rl.run import read_metrics


class FakeTracker:
    """Stands for TensorBoard's writer and for wandb; keeps what it is told."""

    def __init__(self):
        self.told, self.about, self.is_closed = {}, {}, False

    def SummaryWriter(self, folder):
        self.about = {"dir": folder}
        return self

    def add_scalar(self, name, value, step):
        self.told[step, name] = value

    def init(self, **about):
        self.about = about
        return self

    def log(self, measured, step):
        self.told |= {(step, name): value for name, value in measured.items()}

    def close(self):
        self.is_closed = True

    finish = close


@pytest.fixture(params=["tensorboard", "wandb"])
def tracker(request, monkeypatch):
    """A tracker's name, and what stands for its package."""
    fake = FakeTracker()
    module = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[request.param]
    namespace = SimpleNamespace(SummaryWriter=fake.SummaryWriter, init=fake.init)
    monkeypatch.setitem(sys.modules, module, namespace)
    return request.param, fake


@pytest.fixture
def tune(tempted, tmp_path):
    """The arguments of a small run on chats, without its folder."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    fixed = f"--data {chats} --model {tempted} --device cpu --context 64"
    return [*fixed.split(), "--steps", "2", "--batch-tokens", "128"]


def test_grpo_reports(grpo_command, tempted, tmp_path, tracker):
    name, fake = tracker
    run = tmp_path / "run"
    argv = [*options(tempted, steps=2, eval_every=2), "--out", run, "--report-to", name]
    code, err = grpo_command(*argv)
    assert code == 0, err
    assert fake.is_closed
    lines = read_metrics(run)
    assert len(lines) == 4  # two steps, an evaluation before and after
    for line in lines:
        step, kind = (line["step"], "") if "step" in line else (line["evaluation"], "held out/")
        for key in ("reward", "length"):
            assert fake.told[step, kind + key] == pytest.approx(line[key], rel=1e-5)
    if name == "wandb":
        assert fake.about["name"] == "run" and fake.about["dir"] == str(run)
        assert fake.about["config"]["steps"] == 2
    else:
        assert fake.about["dir"] == str(run / "tensorboard")


def test_train_reports(tune, tmp_path, tracker):
    name, fake = tracker
    out = tmp_path / "out"
    assert train.main([*tune, "--out", str(out), "--report-to", name]) == 0
    assert fake.is_closed
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1, 2, 2]
    for line in log:
        kind = "held out/loss" if "evaluation" in line else "loss"
        assert fake.told[line["step"], kind] == line["loss"]


def test_quiet_says_nothing_but_errors(grpo_command, tempted, tune, tmp_path, capsys):
    arguments = [*options(tempted, steps=1), "--out", tmp_path / "run", "--quiet"]
    assert grpo_command(*arguments) == (0, "")
    assert read_metrics(tmp_path / "run")
    again = [*tune, "--out", str(tmp_path / "out"), "--quiet"]
    assert train.main(again) == 0 and capsys.readouterr().err == ""
    assert train.main(again) == 2 and "already holds a checkpoint" in capsys.readouterr().err
