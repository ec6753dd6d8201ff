"""A machine without triton, such as macOS: what needs no kernel works, the rest says what is
missing in one sentence.

A finder in a child process refuses `import triton`.
"""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""
SENTENCE = "triton is not installed and this needs it; pip install triton, or choose sdpa"
API = """
import importlib, pkgutil, sys
import pytest, torch
import flash_versions
from flash_versions import attention, compare
from flash_versions.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_versions.versions.fa2.forward import forward_kernel
from torch.utils._triton import has_triton_package

q, k, v = torch.randn(3, 1, 40, 2, 16, requires_grad=True).unbind()
o = attention(q, k, v, causal=True, version="sdpa")
do = torch.randn_like(o)
found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do)))
found = compare(o, q, k, v, causal=True, do=do, **found)
assert len(found) == 4 and all(accuracy.ok for accuracy in found.values())

sentence = "triton is not installed and this needs it"
for version in ("auto", *flash_versions.VERSIONS):
    with pytest.raises(ValueError, match=sentence):
        attention(q, k, v, version=version)
with pytest.raises(ValueError, match=sentence):
    flash_attn_func(q, k, v)
with torch.no_grad(), pytest.raises(ValueError, match=sentence):
    flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=0)
with pytest.raises(ImportError, match=sentence):
    forward_kernel[(1,)](q)

refusing = []
for package in ("flash_versions", "transformer"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ImportError as error:
            assert sentence in str(error)
            refusing.append(module.name)
assert refusing == [f"flash_versions.{name}" for name in ("inspect", "mine", "puzzles", "verify")]

with pytest.raises(ModuleNotFoundError):  # for everything else triton is missing as before
    import triton
assert not has_triton_package() and "triton" not in sys.modules
"""


@pytest.fixture
def run(tmp_path):
    """Runs Python with arguments where triton is missing."""
    (tmp_path / "sitecustomize.py").write_text(REFUSE)

    def run(*arguments: str, refuse: bool = True) -> subprocess.CompletedProcess:
        path = [str(tmp_path)] * refuse + [str(ROOT)]
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    return run


@pytest.mark.parametrize("options", [["--attention", "sdpa"], []])
def test_a_model_answers(run, options):
    done = run("-m", "transformer.generate", "-p", "What is 357+486?", *options)
    assert done.returncode == 0, done.stderr
    assert "<answer>843</answer>" in done.stdout
    assert "sdpa on cpu" in done.stderr and "Traceback" not in done.stderr
    assert (SENTENCE in done.stderr) == (not options)  # auto says why it is not a version of ours


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "transformer.generate --attention fa2",
    "transformer.train --attention fa1 --steps 1 --out trained",
    "flash_versions.bench.accuracy",
    "flash_versions.inspect fa2",
    "flash_versions.mine new",
    "flash_versions.puzzles",
    "flash_versions.verify --interpret",
])  # fmt: skip
def test_a_command_that_needs_kernels_says_so(run, command):
    done = run("-m", *command.split())
    assert done.returncode in (1, 2), done.stdout
    [line] = done.stderr.splitlines()
    assert SENTENCE in line and not done.stdout


def test_what_is_named_as_the_next_step_works(run):
    done = run("-m", "flash_versions")
    assert done.returncode == 0 and done.stdout.count(SENTENCE) == 4, done.stderr
    commands = [line.split("  ")[1] for line in done.stdout.partition("Next, ")[2].splitlines()[1:]]
    assert len(commands) == 2
    for command in commands:
        assert run(*command.split()[1:]).returncode == 0, command


def test_the_package(run):
    done = run("-c", API)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kernels_can_be_read(run):
    """The sources of kernels show the same with and without triton."""
    command = ["-m", "flash_versions.diff", "fa1", "fa2"]
    without, with_triton = run(*command), run(*command, refuse=False)
    assert without.returncode == 0, without.stderr
    assert without.stdout == with_triton.stdout and "-def softmax_step" in without.stdout
    plain = run(*command, "--plain")
    assert plain.returncode == 2 and SENTENCE in plain.stderr and "Traceback" not in plain.stderr
