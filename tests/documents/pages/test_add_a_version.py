"""The commands of docs/extend/add_a_version.md in their order, from an empty folder."""

import os
import re
import runpy
import shlex
import sys
from types import SimpleNamespace

import pytest

from tests.helpers import ROOT

# One worker takes the walk, for all tests of it.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("add_a_version")]
PAGE = (ROOT / "docs/extend/add_a_version.md").read_text()
COMMANDS = re.findall(r"^python (-m .*)$", PAGE, re.MULTILINE)
# Given last, so they count: a few tokens, one group of which has a spread of rewards.
SMALLER = {
    "inspect": "--arch sm_90 --head-dim 64",
    "generate": "--device cpu",
    "grpo": "--steps 1 --prompts 2 --group 4 --max-tokens 40 --eval-every 0 --device cpu",
}


def run(folder, words):
    """`python -m ...` in a folder, without a GPU; what it says goes to two files there."""
    os.chdir(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)


def walk(processes, folder, words):
    """What a command of the page prints, in a process of its own."""
    process = processes.Process(target=run, args=(folder, words))
    process.start()
    process.join()
    said = {name: (folder / name).read_text() for name in ("stdout", "stderr")}
    return SimpleNamespace(returncode=process.exitcode, **said)


@pytest.fixture(scope="module")
def walked(tmp_path_factory, processes):
    """What each command of the page printed, by its name; and the folder."""
    folder = tmp_path_factory.mktemp("empty")
    found = {}
    for command in COMMANDS:
        words = shlex.split(command)
        name = words[2] if words[1] == "flash_versions.mine" else words[1].partition(".")[2]
        found[name] = walk(processes, folder, [*words, *SMALLER.get(name, "").split()])
    return folder, found


def test_every_command_ends_as_the_page_says(walked):
    assert list(walked[1]) == ["new", "check", "inspect", "bench", "generate", "grpo"]
    for name, done in walked[1].items():
        assert done.returncode == (2 if name == "bench" else 0), (name, done.stderr[-2000:])
    assert "no GPU was found" in walked[1]["bench"].stderr


def test_the_file_is_right(walked):
    tried, others = re.search(
        r"^\d+ of (\d+) cases are right; (\d+) were not", walked[1]["check"].stdout, re.MULTILINE
    ).groups()
    assert int(tried) > 20 and int(others) > 10
    assert f"{tried} of {tried} cases are right" in walked[1]["check"].stdout
    assert "WRONG" not in walked[1]["check"].stdout


def test_the_model_answers_and_learns(walked):
    folder, found = walked
    assert "<answer>1, 2, 5, 9</answer>" in found["generate"].stdout
    assert "mine.py on cpu" in found["generate"].stderr + found["generate"].stdout
    metrics = (folder / "runs/mine/metrics.jsonl").read_text()
    assert re.search(r'"learned": [^0]|"learned": 0\.0*[1-9]', metrics), metrics
    assert (folder / "runs/mine/final/model.safetensors").exists()


def test_the_mistake_of_the_page_is_explained(walked, tmp_path, processes):
    right, wrong = re.search(r"replace `(.*)` by `(.*)`\.", PAGE).groups()
    text = (walked[0] / "mine.py").read_text()
    assert text.count(right) == 1
    (tmp_path / "mine.py").write_text(text.replace(right, wrong))
    done = walk(processes, tmp_path, ["-m", "flash_versions.mine", "check"])
    assert done.returncode == 1, done.stderr
    assert re.search(r"o\[.*\] is .*, and .* is right;", done.stdout)
    assert "OVER its budget" in done.stdout
    assert re.search(r"All \d+ wrong cases, .* have more than 64 keys", done.stdout)
