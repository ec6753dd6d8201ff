"""Runs that are killed go on to the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.models.tiny_grpo import evaluated, make_trainer, options, run_command
from transformer import grpo
from transformer.model.files import only_writer
from transformer.rl import curves
from transformer.rl.run import METRICS, Run, read_metrics

pytestmark = pytest.mark.xdist_group("grpo_run")  # the undisturbed run is made once
CLOCK = {"seconds", "rollout_seconds", "learn_seconds", "tokens_per_second"}
LENGTH = {"steps": 14, "eval_every": 5, "warm_up": 5, "replay": 0.5}
LENGTH |= {"task": "tests.helpers.models.tiny_grpo:Seldom"}
LENGTH |= {"average": 0.8}  # from the fourth step on: some are killed before, some behind
WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


def command(tempted: Path, folder: Path, save_every: int, **changes) -> list[str]:
    changes |= {"save_rollouts": f"{folder}.jsonl", "save_every": save_every, "out": folder}
    return options(tempted, **changes)


def outcome(folder: Path):
    """What a run comes to: weights, metrics but for the clock, samples, rollouts."""
    metrics = [
        {name: value for name, value in line.items() if name not in CLOCK}
        for line in read_metrics(folder)
    ]
    weights = {
        f"{name} {parameter}": weight
        for name in ("best", "final")
        for parameter, weight in load_file(folder / name / "model.safetensors").items()
    }
    said = (folder / "samples.jsonl").read_text(), Path(f"{folder}.jsonl").read_text()
    return weights, metrics, said


def assert_same(folder: Path, expected) -> None:
    weights, *written = outcome(folder)
    assert written == [*expected[1:]]
    torch.testing.assert_close(weights, expected[0], rtol=0, atol=0)
    left = {"config.json", "metrics.jsonl", "samples.jsonl", "curve.png", "best", "final"}
    assert {path.name for path in folder.iterdir()} == left


@pytest.fixture(scope="module")
def whole(tempted, tmp_path_factory):
    """The outcome of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert grpo.main(command(tempted, folder, 10, **LENGTH)) == 0
    expected = outcome(folder)
    steps = [line for line in expected[1] if "step" in line]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert [line["replayed"] for line in steps] == [0.0] + [0.5] * 13
    return expected


def lines(folder: Path) -> int:
    path = folder / METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(folder: Path, count: int, running) -> None:
    deadline = time.monotonic() + 120
    while running() and lines(folder) < count:
        assert time.monotonic() < deadline, f"{lines(folder)} lines of {count} after two minutes"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(10, marks=pytest.mark.wide)])
def test_a_run_killed_at_random_ends_in_the_same_bits(tempted, tmp_path, whole, processes, kills):
    folder, rng = tmp_path / "run", Random(kills)
    argv = command(tempted, folder, 2, **LENGTH)
    saved = 0
    for kill in range(kills):
        process = processes.Process(target=run_command, args=(argv,))
        process.start()
        if kill:  # the first one dies wherever it is, often before the run has a folder
            wait_for_lines(folder, 11 * kill // kills, process.is_alive)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before it could be killed"
        saved += (folder / "state.pt").exists()
    assert saved >= kills // 2
    last = processes.Process(target=run_command, args=(argv,))
    last.start()
    last.join()
    assert last.exitcode == 0
    assert_same(folder, whole)


def run_until_write(argv: list[str], folder: str, number: int) -> None:
    """The command, killed right before it changes its folder for the `number`-th time."""
    count = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal count
        writes = event in WRITES
        if event == "open" and isinstance(arguments[2], int):
            writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes and str(arguments[0]).startswith(folder):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    run_command(argv)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("stride", [4, 1])
def test_a_run_killed_between_its_writes_ends_in_the_same_bits(
    tempted, tmp_path, processes, stride
):
    """Each process gets a few writes further than the one before it, from where that one died."""
    changes = {"steps": 4, "eval_every": 2}
    assert grpo.main(command(tempted, tmp_path / "whole", 10, **changes)) == 0
    folder = tmp_path / "run"
    argv = command(tempted, folder, 1, **changes)
    for number in range(1, 1000, stride):
        process = processes.Process(target=run_until_write, args=(argv, str(folder), number))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            break
    assert process.exitcode == 0
    assert number > 20
    assert_same(folder, outcome(tmp_path / "whole"))


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tempted, tmp_path, whole):
    folder = tmp_path / "run"
    argv = command(tempted, folder, 1, **LENGTH)
    process = subprocess.Popen(
        [sys.executable, "-m", "transformer.grpo", *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    wait_for_lines(folder, 5, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.endswith("command goes on from the last saved state, if there is one\n")
    assert "Traceback" not in err
    assert 0 < int(torch.load(folder / "state.pt")["step"]) < LENGTH["steps"]
    assert grpo.main(argv) == 0
    assert_same(folder, whole)


def test_the_best_is_remembered(tempted, tmp_path, monkeypatch):
    """A run that is interrupted behind its best evaluation, and again before its last word."""
    scores = iter([0.2, 0.6, 0.5])
    monkeypatch.setattr(curves, "draw", lambda *_: None)

    def trainer():
        made = make_trainer(tempted, steps=2, eval_every=1)
        monkeypatch.setattr(made, "evaluate", lambda: (evaluated(next(scores)), []))
        return made, Run(tmp_path / "run", made.settings)

    def interrupt(*_):
        raise KeyboardInterrupt

    first, run = trainer()
    with pytest.raises(KeyboardInterrupt):
        grpo.train(
            first, run, save_every=1, watch=lambda step, _: None if step < 2 else interrupt()
        )
    best = (tmp_path / "run" / "best" / "model.safetensors").read_bytes()

    second, run = trainer()
    monkeypatch.setattr(run, "load", lambda load=run.load: load() | {"seconds": 1000.0})
    publish = grpo.publish
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "publish", lambda *x: interrupt() if x[-1] == "final" else publish(*x))
        with pytest.raises(KeyboardInterrupt):
            grpo.train(second, run, save_every=1)
    assert not run.finished and read_metrics(run.folder)[-1]["seconds"] > 1000  # those before count

    third, run = trainer()
    grpo.train(third, run, save_every=1)
    assert run.finished
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == best
    assert next(scores, None) is None


def test_a_checkpoint_goes_where_a_link_leads(model, folder, tmp_path):
    trainer = SimpleNamespace(result=lambda: model, world=SimpleNamespace(main=True), folder=folder)
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "best").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        grpo.publish(trainer, SimpleNamespace(folder=tmp_path / "run"), "best")
        assert (tmp_path / "run" / "best").is_symlink()
        assert (tmp_path / "elsewhere" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run"]


def test_what_a_kill_leaves_is_cleared_away_and_nothing_else(tempted, tmp_path):
    """The moment before the settings are written is the only one without config.json."""
    settings = make_trainer(tempted).settings
    names = ("config.json", "state.pt", "curve.png")
    leftovers = [f".{name}.4711.unfinished" for name in names]
    folders = [".best.4711.unfinished", ".final.4711.unfinished"]
    for name in leftovers:
        (tmp_path / name).write_text("{")
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{")
    with only_writer(tmp_path):
        Run(tmp_path, settings)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}
    others = {".git", ".bashrc.1", "best.1", "config.json"}
    for name in others - {"config.json"}:
        (tmp_path / name).write_text("mine")
    with only_writer(tmp_path):
        Run(tmp_path, settings)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_logs_are_cut_to_what_the_state_knows(tempted, tmp_path):
    """The record of steps that have to be taken again, a torn last line among it."""
    trainer = make_trainer(tempted)
    run = Run(tmp_path / "run", trainer.settings)
    run.log(METRICS, {"step": 1, "word": "Äpfel"})
    run.save({**trainer.state(), "best": 0.0, "extent": 0.0, "seconds": 0.0})
    run.log(METRICS, {"step": 2})
    with open(run.folder / METRICS, "a") as file:
        file.write('{"step": 3, "rew')
    assert [line["step"] for line in read_metrics(run.folder)] == [1, 2]
    again = Run(tmp_path / "run", trainer.settings)
    assert again.load() is not None
    assert read_metrics(again.folder) == [{"step": 1, "word": "Äpfel"}]
    again.log(METRICS, {"step": 2})
    text = (run.folder / METRICS).read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2]
