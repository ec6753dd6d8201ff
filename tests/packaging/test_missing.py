"""Optional packages that are not installed are named with the command that installs them."""

import importlib
import os
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


@pytest.mark.parametrize("module, packages, extra", [
    ("transformer.generate", ["tokenizers", "tqdm"], "transformer"),
    ("flash_versions.plot", ["matplotlib"], "plot"),
])  # fmt: skip
def test_a_command_ends_with_one_line(module, packages, extra, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({packages}))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert ", ".join(packages) in line and f"pip install 'flash-versions[{extra}]'" in line


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
