"""Two processes compute what one does: gloo, on the CPU, started by torchrun."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from torch.testing import assert_close

from tests.helpers.models.tiny_grpo import CPU, options
from tests.transformer.training.parallel_worker import (
    CASES,
    CHAINS,
    LENGTH,
    lessons,
    make,
    recipe,
    study,
    take,
    unequal,
)
from transformer import grpo
from transformer.model.weights import load_model
from transformer.rl.run import Run
from transformer.training.parallel import ALONE, own_device
from transformer.training.run import Training

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parallel")]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tempted, tmp_path_factory) -> Path:
    """What the ranks share: a checkpoint, and runs that one process began."""
    folder = tmp_path_factory.mktemp("parallel")
    shutil.copytree(tempted, folder / "model")
    for name in CHAINS:
        trainer = make(folder / "model", ALONE, **CASES[name])
        run = Run(folder / name, trainer.settings)
        take(trainer, 1)
        run.save({**trainer.state(), "best": 0.25, "seconds": 1.5})
    training = Training(recipe(), folder / "taught", CPU)
    study(training, lessons()[:1])
    training.record(by="one")
    training.save()
    return folder


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """What each of two ranks found."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NEXT_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONFAULTHANDLER": "1",  # a rank that dies of a signal says where
    }
    worker = Path(__file__).with_name("parallel_worker.py")
    process = subprocess.Popen(
        [sys.executable, *command, str(worker), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.terminate()  # so that torchrun ends the ranks, which wait for each other
        process.communicate()
        raise
    assert process.returncode == 0, said[:6000]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def assert_same(found: dict, expected: dict) -> None:
    assert found["rollouts"] == expected["rollouts"]
    assert (found["drawn"], found["pool"]) == (expected["drawn"], expected["pool"])
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert_close(found["gradients"], expected["gradients"], **CLOSE)
    assert_close(found["weights"], expected["weights"], **CLOSE)
    assert_close(found["result"], expected["result"], **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_rollouts_gradients_weights_and_scores(folder, ranks, name):
    trainer = make(folder / "model", ALONE, **CASES[name])
    expected = take(trainer, 3)
    assert bool(expected["pool"]) == bool(trainer.settings.replay)
    scores = trainer.evaluate()[0]
    for found in ranks:
        assert_same(found[name], expected)
        assert found[name]["scores"] == scores


def test_a_rank_with_nothing_to_learn_takes_part(folder, ranks):
    expected = take(make(folder / "model", ALONE), 2, halved)
    for found in ranks:
        assert_same(found["unequal"], expected)


def halved(rank: int, row: int, given: float) -> float:
    """What `unequal` does to the rows of two ranks, when one process has them all."""
    return unequal(row // 8, row, given)


@pytest.mark.parametrize("name", CHAINS)
def test_a_state_goes_from_one_process_to_two_and_back(folder, ranks, tmp_path, name):
    whole = make(folder / "model", ALONE, **CASES[name])
    take(whole, 1)
    expected = take(whole, 2)
    for found in ranks:
        assert_same(found[f"chain {name}"], expected)
    shutil.copytree(folder / name, tmp_path / "run")
    trainer = make(folder / "model", ALONE, **CASES[name])
    run = Run(tmp_path / "run", trainer.settings)
    state = run.load()
    assert (state["best"], state["seconds"]) == (0.25, 1.5)
    trainer.restore(state)
    expected, alone = take(whole, 1), take(trainer, 1)
    assert_same(alone, expected)
    for found in ranks:
        assert_same(found[f"again {name}"], expected)


def test_supervised_training(folder, ranks, tmp_path):
    whole = Training(recipe(), tmp_path / "whole", CPU)
    study(whole, lessons()[:1])
    expected = study(whole, lessons()[1:3])
    for found in ranks:
        assert_close(found["taught"], expected, **CLOSE)
    shutil.copytree(folder / "taught", tmp_path / "taught")
    training = Training(recipe(), tmp_path / "taught", CPU)
    assert training.step == 3 and training.position == (0, 3)
    assert_close(study(training, lessons()[3:]), study(whole, lessons()[3:]), **CLOSE)
    assert json.loads((tmp_path / "taught" / "training.jsonl").read_text())["by"] == "one"


def test_an_error_of_one_rank_ends_both(ranks):
    first, second = (found["failure"] for found in ranks)
    assert first.startswith("ElsewhereError")
    assert second.startswith("ValueError: the reward of task 'seldom' raised KeyError")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [("train --lr nan --out {}/new", "--lr must be above 0"),
     ("train --steps 1 --out {}/file", "{}/file: Not a directory"),
     ("grpo --group 1 --out {}/new", "--group must be at least 2, got 1"),
     ],
)  # fmt: skip
def test_two_processes_refuse_once(command, sentence, tmp_path):
    (tmp_path / "file").touch()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    name, *options = command.replace("{}", str(tmp_path)).split()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"transformer.{name}", "--device", "cpu", *options],
            env={**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2",
                 "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert said[0].startswith("error: ") and sentence.replace("{}", str(tmp_path)) in said[0]
    assert (said[0].count("\n"), said[1]) == (1, "")
    assert not (tmp_path / "new").exists()


def test_the_command_writes_once(folder, ranks, tmp_path):
    said = [found["command"] for found in ranks]
    assert "the curve:" in said[0] and said[1] == ""
    argv = options(folder / "model", **LENGTH)
    assert grpo.main([*argv, "--out", str(tmp_path / "run")]) == 0
    ours, theirs = folder / "command", tmp_path / "run"
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()
    records = [(path / "metrics.jsonl").read_text().splitlines() for path in (ours, theirs)]
    for line, expected in zip(*records, strict=True):
        found, expected = json.loads(line), json.loads(expected)
        assert found.keys() == expected.keys()
        for name in found:
            if "second" not in name and "gap" not in name:
                assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    assert_close(
        load_model(ours / "final").state_dict(),
        load_model(theirs / "final").state_dict(),
        rtol=2**-7,  # a bit of bf16
        atol=1e-6,
    )


def test_a_gpu_for_each_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device("auto") == torch.device("cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")  # one process on each of two machines
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert own_device("auto") == torch.device("cuda", 0)  # NCCL wants its number
    assert own_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("auto") == own_device("cuda") == torch.device("cuda", 1)
    assert own_device("cpu") == CPU
    with pytest.raises(ValueError, match="--device cuda:0 would be every process's"):
        own_device("cuda:0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="started 3 processes here but torch finds 2 GPUs"):
        own_device("cuda")
