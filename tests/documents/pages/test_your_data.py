"""The commands of docs/use/your_data.md, in their order, with tiny models and settings."""

import importlib
import json
import re
import runpy
import shlex
import shutil
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.models.random_checkpoint import TINY, write_checkpoint
from transformer.tasks.problems import read_line
from transformer.training.tuning.chats import read_chats

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/use/your_data.md").read_text()
BLOCKS = re.findall(r"^```(.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]
COMMANDS = [shlex.split(line) for line in LINES if not line.startswith("{")]
HUB = "Qwen/Qwen2.5-0.5B-Instruct"
# Given last, so they count.
SMALLER = {
    "train": "--epochs 1 --device cpu --attention sdpa --eval-every 0",
    "grpo": "--steps 2 --prompts 2 --group 2 --max-tokens 8 --eval-problems 2 --device cpu",
    "generate": "--max-tokens 4 --attention sdpa --device cpu",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the reader is: with the files of the page, and a random model in the hub's place."""
    for name in ("clock.py", "mine.py"):
        assert f"examples/own_data/{name}" in PAGE
        shutil.copy(ROOT / "docs/use/examples/own_data" / name, tmp_path)
    write_checkpoint(tmp_path / HUB, TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    return tmp_path


def fewer(path, count=24):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def test_every_command_of_the_page_works(folder, capsys):
    done = []
    for words in COMMANDS:
        if words[0] == "torchrun":  # as `python`: two processes are tested elsewhere
            words = ["python", *words[words.index("-m") :]]
        assert words[0] == "python"
        if words[1] != "-m":
            runpy.run_path(words[1], run_name="__main__")
            for name in ("chats.jsonl", "problems.jsonl"):
                assert len((folder / name).read_text().splitlines()) == 720
                fewer(folder / name)
            continue
        name = words[2].removeprefix("transformer.")
        smaller = SMALLER[name].split()
        if "--examples" in words:
            smaller += ["--examples", "8"]
        code = importlib.import_module(words[2]).main([*words[3:], *smaller])
        assert code == 0, (words, capsys.readouterr().err)
        done.append(name)
        if "--out" in words:
            out = folder / words[words.index("--out") + 1]
            assert (out / ("final" if name == "grpo" else "") / "model.safetensors").exists()
    assert done.count("train") == 5 and done.count("grpo") == 5 and done.count("generate") == 1
    metrics = (folder / "runs/clock-short/metrics.jsonl").read_text()
    assert "reward exact" in metrics and "reward mine:short" in metrics


def test_the_lines_of_the_page_are_read(tmp_path):
    found = {"chat": 0, "problem": 0}
    for line in LINES:
        if not line.startswith("{"):
            continue
        content = json.loads(line)
        if "prompt" in content:
            read_line("line", content)
            found["problem"] += 1
        else:
            (tmp_path / "a.jsonl").write_text(line)
            assert read_chats(tmp_path / "a.jsonl")
            found["chat"] += 1
    assert found == {"chat": 2, "problem": 1}
