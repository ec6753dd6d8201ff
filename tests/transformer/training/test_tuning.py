"""Training on data of one's own: a step against transformers, packing, resuming, the result; and
what the command refuses, with and without such data.
"""

import json
import os
import re
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.helpers.models.family_checkpoints import make_checkpoint
from tests.transformer.training.test_train import arguments, run
from transformer import train
from transformer.generation.progress import Progress
from transformer.model import weights
from transformer.model.weights import load_model
from transformer.training import byte_tokenizer
from transformer.training.run import Training
from transformer.training.tuning.documents import Document
from transformer.training.tuning.packing import Packing, pack
from transformer.training.tuning.run import Tuning

CPU = torch.device("cpu")
WIDTH = 48
FAMILIES = ["llama 3.2", "qwen 2.5", "mistral", "gemma 2"]  # the last two have windows


def documents(count=9, largest=24):
    """Random tokens, some of each learned."""
    draw = np.random.default_rng(0)
    found = []
    for i in range(count):
        length = int(draw.integers(2, largest))
        learned = draw.random(length) < 0.6
        learned[0], learned[-1] = False, True
        found.append(Document(f"{i}", draw.integers(3, 256, length, np.int32), learned))
    return found


def recipe(folder, **changes):
    data = documents()
    fields = {"model": str(folder), "data": "a hash", "seed": 0, "steps": 4, "batch_tokens": 96}
    fields |= {"learning_rate": 1e-3, "lora_rank": 0, "width": WIDTH, "attention": "sdpa"}
    packing = Packing(data, 0, WIDTH, fields["batch_tokens"])
    return Tuning(**{**fields, "packing": packing, **changes})


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A checkpoint of a family, and transformers' model of it."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("family")
    attention = "reference" if request.param == "gemma 2" else "sdpa"  # which has no softcap
    settings = recipe(folder, attention=attention, held_out=Packing(documents(), None, WIDTH, 96))
    return settings, make_checkpoint(request.param, folder)


def test_packed_documents_are_learned_as_transformers_learns_them_one_by_one(family, tmp_path):
    """The loss is the mean over all learned tokens; so is the gradient, before it is clipped."""
    settings, theirs = family
    data = documents()
    batch = pack([data[:4], data[4:7], data[7:]])
    ours = Training(settings, tmp_path, CPU)
    count = sum(int(x.learned.sum()) for x in data)
    loss = settings.loss(ours.model, ours.model, batch, range(3))
    (loss / count).backward()
    expected = torch.zeros(())
    theirs.zero_grad()
    for document in data:
        tokens = torch.from_numpy(document.tokens).long()[None]
        labels = torch.where(torch.from_numpy(document.learned), tokens, -100)
        expected += theirs(input_ids=tokens, labels=labels).loss * int(document.learned.sum())
    (expected / count).backward()
    assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    settings.measure(ours, Progress(quiet=True))  # the same documents are held out
    measured = json.loads((tmp_path / "training.jsonl").read_text())
    assert measured["loss"] == pytest.approx((expected / count).item(), abs=2e-5)
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.model.named_parameters():
        wanted = gradients[name].grad
        assert (parameter.grad - wanted).norm() < 1e-3 * wanted.norm() + 1e-6, name


@pytest.mark.parametrize("changes", [{"micro_tokens": 1}, {"checkpointing": True}], ids=str)
def test_what_only_saves_memory_changes_nothing(tempted, tmp_path, changes):
    found = []
    for name, more in (("plain", {}), ("other", changes)):
        run = Training(recipe(tempted, **more), tmp_path / name, CPU)
        found.append((run.learn(pack([documents()[:3], documents()[3:6]])), run.model.state_dict()))
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_packing_loses_nothing_and_fits():
    data = documents(count=100)
    packing = Packing(data, 5, WIDTH, 96)
    for epoch in (0, 1):
        rows = packing.rows(epoch)
        assert sorted(i for row in rows for i in row) == [*range(100)]
        sizes = [sum(len(data[i].tokens) for i in row) for row in rows]
        assert max(sizes) <= WIDTH
        assert sum(sizes) > 0.9 * WIDTH * len(rows)  # little room is lost
        assert len([*packing[epoch]]) == packing.steps(epoch + 1) - packing.steps(epoch)
    assert packing.rows(0) == packing.rows(0) != packing.rows(1)
    for batch in packing[0]:
        for i, row in enumerate(batch.lengths):
            starts = np.cumsum([0, *row[:-1]])
            assert not batch.learned[i, starts].any()  # nothing is predicted across a bound
            assert not batch.learned[i, sum(row) :].any()


@pytest.mark.parametrize("rank", [0, 2], ids=["all weights", "adapters"])
def test_an_interrupted_run_ends_in_the_same_bits(tempted, tmp_path, rank):
    given = recipe(tempted, steps=5, lora_rank=rank, log_every=1)
    assert given.packing.steps(1) < 4  # it goes through more than one epoch
    whole, log = run(tmp_path / "whole", given, save_every=2)
    run(tmp_path / "halves", given, stop_before=3, save_every=2)
    again, resumed_log = run(tmp_path / "halves", given, save_every=2)
    assert_close(again, whole, rtol=0, atol=0)
    assert resumed_log == log


PARITY = [(f"What is {i}?", "odd" if i % 2 else "even") for i in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": x}, {"role": "assistant", "content": y}]}
    for x, y in PARITY
]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return path


def argv(chats, model, out, *more):
    fixed = f"--data {chats} --model {model} --out {out} --device cpu --attention sdpa --context 64"
    return [*fixed.split(), "--steps", "2", "--batch-tokens", "128", *more]


@pytest.mark.parametrize("more", [(), ("--lora-rank", "2")], ids=["all weights", "adapters"])
def test_the_result_loads_in_transformers_unchanged(tempted, chats, tmp_path, more, capsys):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert train.main(argv(chats, tempted, out, "--lr", "1e-2", *more)) == 0
    said = capsys.readouterr().err
    assert "38 chats" in said and "2 held out" in said and "step 2/2" in said
    assert f"ask it: python -m transformer.generate --model {out}" in said
    names = {path.name for path in tempted.iterdir()} | {"training.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "config.json").read_text() == (tempted / "config.json").read_text()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    before, ours = load_model(tempted), load_model(out)
    assert ours.model.embed_tokens.weight.dtype == before.model.embed_tokens.weight.dtype
    tokens = torch.tensor([[72, 105, 33, 32]])
    assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    changed = {
        name
        for name, w in ours.state_dict().items()
        if not torch.equal(w, before.state_dict()[name])
    }
    assert changed and all("proj" in name for name in changed) == bool(more)
    rendered = transformers.AutoTokenizer.from_pretrained(out).apply_chat_template(
        CHATS[0]["messages"], tokenize=False
    )
    assert "even<|im_end|>" in rendered
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert [x["step"] for x in log if x.get("evaluation") == "held out"] == [0, 2]

    assert train.main(argv(chats, tempted, out, *more)) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err


def test_what_is_dropped_is_named_and_not_counted(tempted, chats, tmp_path, capsys):
    long = CHATS[0]["messages"][0] | {"content": "?" * 80}
    with chats.open("a") as file:
        file.write(json.dumps({"messages": [long, CHATS[0]["messages"][1]]}) + "\n")
    assert train.main([*argv(chats, tempted, tmp_path / "out"), "--drop-long"]) == 0
    said = capsys.readouterr().err
    counts = re.search(r"(\d+) chats to learn from, .*; (\d+) held out", said)
    assert int(counts[1]) + int(counts[2]) == 40
    assert f"1 chat is longer than 64 tokens and left out: {chats}, line 41\n" in said


@pytest.mark.parametrize(
    "more, reason",
    [
        ((), "model.norm.weight is no longer finite at step 1"),
        (("--steps", "2", "--eval-every", "1"), "the held-out loss is nan at step 1"),
    ],
    ids=["at the end", "before"],
)
def test_a_model_that_fell_apart_is_no_success(
    tempted, chats, tmp_path, more, reason, monkeypatch, capsys
):
    """An update may break the weights whose loss was finite."""
    learn = Training.learn

    def learn_and_break(self, batch):
        found = learn(self, batch)
        with torch.no_grad():
            self.model.model.norm.weight[0] = float("nan")
        return found

    monkeypatch.setattr(Training, "learn", learn_and_break)
    out = tmp_path / "out"
    assert train.main([*argv(chats, tempted, out), "--steps", "1", *more]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.endswith("a smaller --lr helps\n")
    assert [path.name for path in out.iterdir()] == ["training.jsonl"]


def test_a_model_that_is_broken_before_is_not_blamed_on_the_rate(tempted, chats, tmp_path, capsys):
    model = shutil.copytree(tempted, tmp_path / "broken")
    path = model / weights.WEIGHTS
    path.write_bytes(path.read_bytes()[:-64] + b"\xff" * 64)  # NaN
    assert train.main([*argv(chats, model, tmp_path / "out"), "--steps", "1"]) == 2
    assert f"nan at step 0; the weights of {model} are broken\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "limit, saves, name",
    [
        (30, True, "training.jsonl"),
        (20_000, True, "training_state.pt"),
        (20_000, False, "model.safetensors"),
        (5_000, False, "tokenizer.json"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    tempted, chats, tmp_path, limit, saves, name, monkeypatch, capsys
):
    """With a limit of the size of a file in the place of a full disk: Python, torch and safetensors
    say it each in another way, and a copy by the name of what is copied.
    """
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    if not saves:
        monkeypatch.setattr(Training, "save", lambda self: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        code = train.main([*argv(chats, tempted, out), "--quiet"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, capsys.readouterr().err) == (2, f"error: {out / name}: File too large\n")
    assert not [path for path in out.iterdir() if "unfinished" in path.name]


def train_until_saving(argv):
    """The command, killed while it writes the trained weights."""

    def write_half(tensors, path, metadata):
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    weights.save_file = write_half
    train.main(argv)


def test_a_killed_save_leaves_nothing_behind_the_next_run(tempted, chats, tmp_path, processes):
    out, whole = tmp_path / "out", tmp_path / "whole"
    process = processes.Process(target=train_until_saving, args=(argv(chats, tempted, out),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert any("model.safetensors" in path.name for path in out.iterdir())
    other = tmp_path / "other.jsonl"
    other.write_text(chats.read_text().replace("odd", "even"))
    assert train.main(argv(other, tempted, out)) == 2  # a run of other data is not gone on with
    for folder in (out, whole):
        assert train.main(argv(chats, tempted, folder)) == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize("name", ["gpt-oss", "gemma 2"])
def test_a_model_that_sdpa_cannot_compute_trains_on_a_cpu(name, chats, tmp_path, capsys):
    """Sinks and softcaps: attention is PyTorch written out."""
    pytest.importorskip("transformers")
    model, out = tmp_path / "model", tmp_path / "out"
    make_checkpoint(name, model)
    for file, text in byte_tokenizer.files().items():
        (model / file).write_text(text)
    fixed = f"--data {chats} --model {model} --out {out} --device cpu --steps 1"
    assert train.main([*fixed.split(), "--batch-tokens", "64", "--context", "64"]) == 0
    assert "attention is reference, PyTorch written out: " in capsys.readouterr().err
    assert load_model(out).config == load_model(model).config


REFUSED = {
    "--steps 0": "--steps must be at least 1, got 0",
    "--lr nan": "--lr must be above 0, at most 1e+30, got nan",
    "--seed 99999999999999999999": "--seed must be a whole number of 64 bits, got 999",
    "--batch-tokens 100": "a batch must hold at least 1024 tokens",
    "--hasty 0.5": "--hasty and --forget need --teacher sloppy",
    "--teacher sloppy --hasty 2": "hasty is a probability, not 2.0",
    "--eval-problems 0": "--eval-problems must be at least 1, got 0",
    "--device abacus": "--device abacus is unknown",
    "--model sloppy": "--model needs --data or --task",
    "--data {chats} --task sums": "--data and --task are two kinds of data",
    "--data {chats} --teacher careful": "--teacher is for the built-in skills; leave it out with",
    "--task sums --eval-data {chats}": "--eval-data does not go with --task",
    "--task nosuch:Task": "there is no task nosuch:Task: No module named 'nosuch'",
    "--data {chats} --steps 2 --epochs 2": "--steps and --epochs both say how long",
    "--data {chats} --context 999": "--context 999 is more than the model's context of 128",
    "--data {chats} --lora-rank 999": "--lora-rank 999 is more than the width of the model",
    "--data {chats} --context 8": "line 1 is longer than 8 tokens",
    "--data {chats} --model nosuch": "there is no checkpoint folder 'nosuch'",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(tempted, chats, tmp_path, given, capsys):
    out = tmp_path / "out"
    line = arguments(out)
    if "--data" in given or "--task" in given:
        line = ["--out", str(out), "--device", "cpu", "--model", str(tempted)]
    line += given.format(chats=chats).split()
    assert train.main(line) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and REFUSED[given] in said
    assert not out.exists()
