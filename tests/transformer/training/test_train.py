"""Training: one step against transformers and torch, resuming to the bit, what a run leaves."""

import contextlib
import gc
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import flash_versions
from transformer import train
from transformer.generation.progress import Progress
from transformer.model.decoder import Config, Transformer
from transformer.model.files import only_writer
from transformer.model.weights import save_model
from transformer.tasks.task import Marks, Problem
from transformer.training import byte_tokenizer, evaluate, teaching
from transformer.training import run as training
from transformer.training.corpus import Corpus, Teacher
from transformer.training.run import Training
from transformer.training.teaching import Teaching

os.environ["HF_HUB_OFFLINE"] = "1"

TINY = Config(320, 32, 48, 2, 2, 1, 16, 1024, tied_embeddings=True, qk_norm=True)
SDPA = partial(flash_versions.attention, version="sdpa")
CPU = torch.device("cpu")


def recipe(**changes):
    fields = {"teacher": Teacher(), "seed": 3, "steps": 7, "batch_tokens": 1024, "log_every": 1}
    return Teaching(**{**fields, "learning_rate": 1e-3, "model": TINY, **changes})


def run(folder, given=None, stop_before=None, save_every=3):
    """Train for some steps, as if killed before one. The weights, and the log without its times."""
    run = Training(given or recipe(), folder, CPU)
    learn = run.learn

    def learn_or_die(batch):
        if run.step == stop_before:
            raise KeyboardInterrupt
        return learn(batch)

    run.learn = learn_or_die
    with contextlib.suppress(KeyboardInterrupt):
        train.train(run, save_every, Progress(quiet=True))
    records = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second")
    return run.model.state_dict(), [
        {k: v for k, v in record.items() if k not in timed} for record in records
    ]


def test_a_step_is_that_of_transformers_and_torch(tmp_path):
    """Loss, clipping and AdamW, from a saved copy of the same weights."""
    transformers = pytest.importorskip("transformers")
    run = Training(recipe(), tmp_path / "run", CPU)
    save_model(run.model, tmp_path / "copy", torch.float32)
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    batch = Corpus(Teacher(), 3, 1024)[0][0]
    loss, norm = run.learn(batch)

    tokens = torch.from_numpy(batch.tokens.astype("int64"))
    labels = torch.where(torch.from_numpy(batch.learned), tokens, -100)
    count = (labels != -100).sum()
    mean = theirs(input_ids=tokens, labels=labels).loss
    torch.testing.assert_close(loss, mean.detach() * count)
    (mean * count / 1024).backward()
    gradients = [p.grad for p in theirs.parameters()]
    expected_norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
    torch.testing.assert_close(norm, expected_norm)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), recipe().clip)
    rate = recipe().rate_at(0)
    torch.optim.AdamW(theirs.parameters(), rate, (0.9, 0.95), weight_decay=0.01).step()
    for name, weight in theirs.named_parameters():
        ours = run.model.get_parameter(name).detach()
        # Adam's first step is the gradient's sign: a gradient near 0 may round to the other one
        close = (ours - weight.detach()).abs() < 0.01 * rate
        assert close.float().mean() > 0.999, name
        assert not torch.equal(ours, before[name])


@pytest.mark.parametrize("killed_at", [1, 3, 5], ids=lambda step: f"step {step}")
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path, killed_at):
    weights, log = run(tmp_path / "whole")
    run(tmp_path / "halves", stop_before=killed_at)
    resumed_weights, resumed_log = run(tmp_path / "halves")
    assert resumed_log == log
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6, 7]
    torch.testing.assert_close(resumed_weights, weights, rtol=0, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which files are mapped")
def test_a_resumed_run_does_not_hold_its_state_file(tmp_path):
    """Windows replaces no file that is mapped, and elsewhere its space would stay in use."""
    run(tmp_path / "run", stop_before=4)
    resumed = Training(recipe(), tmp_path / "run", CPU)
    gc.collect()
    assert resumed.step == 3 and resumed.seconds > 0
    assert str(tmp_path / "run") not in Path("/proc/self/maps").read_text()
    resumed.seconds += 1000
    train.train(resumed, 3, Progress(quiet=True))
    assert resumed.seconds > 1000  # those before count


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_neither_workers_nor_its_lock(tmp_path, kill):
    folder = tmp_path / "run"
    options = f"--out {folder} --workers 2 --batch-tokens 1024 --eval-every 0 --device cpu"
    process = subprocess.Popen(
        [sys.executable, "-m", "transformer.train", *options.split()],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while len(workers := children.read_text().split()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # they have batches that nobody will take
    process.send_signal(kill)
    process.wait()
    with only_writer(folder):
        pass
    while left := [pid for pid in workers if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} outlived the run by minutes"
        time.sleep(0.05)


def is_alive(pid):
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_is_taken_up_that_was_killed_before_its_first_line(tmp_path):
    Training(recipe(), tmp_path, CPU).save()
    again = Training(recipe(), tmp_path, CPU)
    again.record(loss=1.0)
    assert json.loads((tmp_path / training.LOG).read_text()) == {"step": 0, "loss": 1.0}


def test_an_unfinished_run_with_another_recipe_is_not_taken_up(tmp_path):
    run(tmp_path, stop_before=5)
    with pytest.raises(ValueError, match="unfinished run with another seed .3, now 4."):
        run(tmp_path, recipe(seed=4))


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "no recipe": partial(torch.save, {"recipe": {}}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_in_one_sentence(tmp_path, damage):
    run(tmp_path, stop_before=5)
    path = tmp_path / training.STATE
    damage(path)
    with pytest.raises(ValueError, match="training_state.pt is damaged; delete it to start again$"):
        Training(recipe(), tmp_path, CPU)
    path.unlink()
    assert Training(recipe(), tmp_path, CPU).step == 0


def test_learning_rate():
    schedule = recipe(steps=1000, learning_rate=1.0)
    rates = [schedule.rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 200)
    assert max(rates) == rates[199] == pytest.approx(1)
    assert rates[600] == pytest.approx(0.5)
    assert 0 < rates[-1] < 1e-5
    assert sorted(rates[199:], reverse=True) == rates[199:]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    diverged = Training(recipe(), tmp_path, CPU)
    with torch.no_grad():
        diverged.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="loss is nan at step 1; a smaller --lr helps"):
        train.train(diverged, 500, Progress(quiet=True))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(evaluate, "MAX_TOKENS", 3)
    monkeypatch.setattr(teaching, "MODEL", TINY)


def arguments(folder, *more):
    fixed = "--steps 2 --batch-tokens 1024 --eval-problems 1 --workers 0 --device cpu"
    return ["--out", str(folder), *fixed.split(), *more]


def test_what_a_run_leaves(tmp_path, quick, capsys):
    folder = tmp_path / "sloppy one"
    given = arguments(folder, "--teacher", "sloppy", "--hasty", "0.3", "--forget", "0.5")
    assert train.main(given) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.jsonl"),
    ]
    card = (folder / "README.md").read_text()
    assert shlex.join(["python", "-m", "transformer.train", *given]) in card
    assert "guessed the answer of 30%" in card and "forgot 50%" in card
    for skill in evaluate.SKILLS:
        assert f"| {skill} | " in card
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert [record.get("evaluation") for record in log] == [None, "greedy", "sampled"]
    assert "step 2/2" in capsys.readouterr().err

    assert train.main(given) == 2
    assert "already holds a checkpoint; use another --out" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reply_that_does_not_end_is_not_right(monkeypatch, temperature):
    """The judge accepts everything, so the end of the turn alone decides. What a reply was begun
    with is a part of it.
    """
    model, judged = Transformer(TINY, SDPA), []
    monkeypatch.setattr(Problem, "marks", lambda _, said: judged.append(said) or Marks(1.0, 1.0))
    monkeypatch.setattr(evaluate, "MAX_TOKENS", 2)
    never = evaluate.evaluate(model, 1, temperature=temperature)
    assert all(score.right == 0 for score in never.values())
    monkeypatch.setattr(model, "forward", partial(_always, byte_tokenizer.IM_END))
    always = evaluate.evaluate(model, 3, temperature=temperature)
    assert all(score.right == pytest.approx(1) for score in always.values())
    assert judged.count(evaluate.EMPTY_THOUGHT) == 3 and {*judged} == {"", evaluate.EMPTY_THOUGHT}


def _always(token, tokens, *_, **__):
    logits = torch.full((len(tokens), 1, 320), -1e4)
    logits[..., token] = 0
    return logits
