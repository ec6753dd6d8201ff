"""What is not imported: optional packages that are missing, and what a start does not need."""

import importlib
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from transformer.rl.run import read_metrics

PACKAGES = [
    ("transformer", "jinja2", "transformer"),
    ("transformer", "safetensors", "transformer"),
    ("transformer", "tokenizers", "transformer"),
    ("transformer", "tqdm", "transformer"),
    ("flash_versions.plot", "matplotlib", "plot"),
]


@pytest.mark.parametrize("module, package, extra", PACKAGES)
def test_import(module, package, extra, monkeypatch):
    imported = importlib.import_module(module)
    monkeypatch.setitem(sys.modules, package, None)
    sentence = rf"^{package} is not installed; pip install 'flash-versions\[{extra}\]' does that\.$"
    with pytest.raises(ImportError, match=sentence):
        importlib.reload(imported)


def test_a_run_without_matplotlib_goes_on_and_says_so_once(
    grpo_command, tempted, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = tmp_path / "run"
    arguments = ["--model", tempted, "--task", "count", "--steps", "2", "--eval-every", "1"]
    code, err = grpo_command(*arguments, "--device", "cpu", "--out", run)
    assert code == 0, err
    assert err.count("matplotlib is not installed") == 1 and "curve: " not in err
    assert read_metrics(run) and not (run / "curve.png").exists()
    code, err = grpo_command("plot", run, "--out", tmp_path / "plot.png")
    assert (code, err.count("pip install 'flash-versions[plot]'")) == (2, 1)


def test_a_start_imports_no_simulator_no_lesson_no_tool_and_no_compiler_of_torch():
    code = "import sys, flash_versions, transformer.generate; print(*sys.modules, sep='\\n')"
    modules = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    late = "simulator.launch", "simulator.gluon", "lessons.", "bench", "plot", "puzzles", "verify"
    late = ("torch._dynamo", "torch._inductor", *(f"flash_versions.{name}" for name in late))
    assert "transformer.generate" in modules
    assert [name for name in modules if name.startswith(late)] == []
