"""A finished GRPO run becomes a checkpoint: its card and log say what the files say."""

import json
import shutil

import pytest
import torch

from transformer import grpo, ship
from transformer.model.weights import load_model
from transformer.rl.recipes import RECIPES, Settings
from transformer.training import byte_tokenizer

STEPS = "--task practice --steps 2 --prompts 2 --group 2 --max-tokens 8 --eval-every 0 --device cpu"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "short"
    assert grpo.main([*STEPS.split(), "--attention", "sdpa", "--out", str(folder)]) == 0
    return folder


def test_a_run_is_shipped_with_its_card_and_its_log(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ship, "LOG_EVERY", 2)
    folder = tmp_path / "shipped"
    assert ship.main([str(run), str(folder), "--problems", "1", "--device", "cpu"]) == 0
    card = (folder / "README.md").read_text()
    assert card.startswith("---") and "\n# shipped\n" in card
    assert "python -m transformer.grpo --recipe practice --steps 2 --prompts 2 --group 2" in card
    told = "starting from `sloppy`, whose teacher guessed the answer of 35% of the sums"
    assert told in card.replace("\n", " ")
    assert "and 8 answers were sampled" in card
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in log] == [2, None, None]
    assert [line["evaluation"] for line in log[1:]] == ["greedy", "sampled"]
    for skill in log[1]["scores"]:
        assert f"| {skill} |" in card
    attention = object()
    shipped, final = (
        load_model(x, attention, dtype=torch.float32) for x in (folder, run / "final")
    )
    for ours, theirs in zip(shipped.parameters(), final.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16).float())
    for name in byte_tokenizer.files():
        assert (folder / name).exists()


def test_a_run_that_went_on_from_another_tells_of_both(run, tmp_path):
    second = tmp_path / "second"
    options = [*STEPS.split(), "--attention", "sdpa", "--lr", "1e-5", "--out", str(second)]
    assert grpo.main([*options, "--model", str(run / "final")]) == 0
    folder = tmp_path / "out"
    assert ship.main([str(second), str(folder), "--problems", "1", "--device", "cpu"]) == 0
    card = (folder / "README.md").read_text()
    first, then = [line for line in card.splitlines() if "-m transformer.grpo" in line]
    assert "--model" not in first and f"--model {run / 'final'}" in then and "--lr 1e-05" in then
    assert "and 16 answers were sampled" in card and "starting from `sloppy`" in card


def test_the_command_is_what_makes_the_run():
    settings = Settings(**{**RECIPES["practice"], "seed": 3, "dynamic_sampling": True})
    words = ship.command_of(settings).split()[3:]
    assert grpo.parse(words)[1] == settings
    assert grpo.parse(ship.command_of(Settings(lr=1e-5)).split()[3:])[1] == Settings(lr=1e-5)


def test_what_cannot_be_shipped_is_said(run, tmp_path, capsys):
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "final")
    foreign = shutil.copytree(run, tmp_path / "foreign")
    config = foreign / "config.json"
    config.write_text(config.read_text().replace('"sloppy"', '"chat"'))
    for folder, reason in (
        (tmp_path / "nothing", "holds no run"),
        (unfinished, "is not finished"),
        (foreign, "began as chat"),
    ):
        assert ship.main([str(folder), str(tmp_path / "out"), "--device", "cpu"]) == 2
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert ship.main([str(run), str(tmp_path / "out"), "--problems", "0"]) == 2
    assert "--problems must be at least 1" in capsys.readouterr().err
