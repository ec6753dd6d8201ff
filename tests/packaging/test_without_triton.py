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

    def run(*arguments: str) -> subprocess.CompletedProcess:
        path = [str(tmp_path), str(ROOT)]
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    return run


def test_a_model_answers(run):
    done = run("-m", "transformer.generate", "-p", "What is 357+486?")
    assert done.returncode == 0, done.stderr
    assert "<answer>843</answer>" in done.stdout
    # auto says why it is not a version of ours
    assert "sdpa on cpu" in done.stderr and SENTENCE in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "transformer.generate --attention fa2", "flash_versions.inspect fa2", "flash_versions.puzzles",
])  # fmt: skip
def test_a_command_that_needs_kernels_says_so(run, command):
    done = run("-m", *command.split())
    assert done.returncode in (1, 2), done.stdout
    [line] = done.stderr.splitlines()
    assert SENTENCE in line and not done.stdout


def test_the_package(run):
    done = run("-c", API)
    assert done.returncode == 0, done.stderr
