"""A finished GRPO run becomes a checkpoint: its card and log say what the files say."""

import json
import shutil

import pytest
import torch

from transformer import grpo, ship
from transformer.model.weights import load_model
from transformer.training import byte_tokenizer

pytestmark = pytest.mark.slow

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
