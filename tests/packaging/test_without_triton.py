"""A machine without triton, such as macOS: kernels are simulated there, too, and what compiles or
inspects says in one sentence what is missing.

The tests run Python of a virtual environment that has every package of this one but triton. What
needs no process of its own runs in one, which also lacks what Windows lacks.
"""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from flash_versions.puzzles.puzzle import PUZZLES
from tests.helpers import ROOT

SENTENCE = "this needs Triton's compiler, and triton is not installed"
# Reference values come from torch in fp64, and the kernels from both packages.
API = """
import importlib, pkgutil, runpy, sys
import torch
import flash_versions
from flash_versions import attention, compare
from flash_versions.dispatch.device import Properties, devices
from flash_versions.flash_attn import flash_attn_func, flash_attn_with_kvcache
from torch.utils._triton import has_triton_package

q, k, v = torch.randn(3, 1, 40, 2, 16, requires_grad=True).unbind()
do = torch.randn(1, 40, 2, 16)
for version in ("sdpa", "auto", *flash_versions.VERSIONS):
    o = attention(q, k, v, causal=True, version=version)
    found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do)))
    found = compare(o, q, k, v, causal=True, do=do, **found)
    assert len(found) == 4 and all(accuracy.ok for accuracy in found.values()), version
half = [x.detach().bfloat16() for x in (q, k, v)]
for name in ("fa2", "fa3", "fa4"):
    o = attention(*half, causal=True, version=name, dropout_p=0.1)
    assert o.isfinite().all()
assert flash_attn_func(*half).shape == half[0].shape
with torch.no_grad():
    flash_attn_with_kvcache(half[0], half[1].clone(), half[2].clone(), cache_seqlens=0)
q, k, v = torch.randn(3, 1, 130, 2, 64).bfloat16().unbind()
with devices.assume(Properties((9, 0), num_sms=2)):  # kernels for Hopper
    for version in ("fa3", "fa4"):
        o = attention(q, k, v, causal=True, version=version)
        assert all(x.ok for x in compare(o, q, k, v, causal=True).values())

refusing = {}
for package in ("flash_versions", "transformer"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ImportError as error:
            assert "this needs Triton's compiler" in str(error), module.name
            refusing[module.name] = error.name
inspect, rank, verify = (f"flash_versions.{x}" for x in ("inspect", "mine.rank", "verify"))
# Of a package that refuses by its own name `python -m` says the sentence alone.
assert refusing == {inspect: inspect, rank: inspect, verify: verify}, refusing

runpy.run_path("own.py", run_name="__main__")
for line in open("commands.txt"):
    sys.argv = line.split()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, line
assert not has_triton_package() and "triton" not in sys.modules  # for others it is missing
"""
WINDOWS = """
import os, signal, sys
sys.modules |= dict.fromkeys("fcntl grp pty pwd readline resource syslog termios tty".split())
del os.O_DIRECTORY, signal.SIGALRM, signal.setitimer
"""
COMMANDS = """
transformer.train --data data.jsonl --out run --steps 1
transformer.generate --model run --input asked.jsonl --output said.jsonl
transformer.generate --attention fa1 -p 357+486
"""
LEARNER = """
import flash_versions
import torch
import triton
import triton.language as tl

SCALE = tl.constexpr(2.0)

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) * SCALE, mask=i < n)

x, y = torch.randn(40), torch.empty(40)
double[(triton.cdiv(40, 16),)](x, y, 40, BLOCK=16)
assert torch.equal(y, 2 * x)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment without triton."""
    folder = tmp_path_factory.mktemp("without") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("triton", "__editable__")):
            target = Path(packages, entry.name)
            if not target.exists():
                target.symlink_to(entry)
    return folder / "bin" / "python"


@pytest.fixture
def run(python, tmp_path):
    """Runs Python with arguments where triton is missing."""

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | more
        return subprocess.run(
            [str(python), *arguments], cwd=tmp_path, capture_output=True, text=True, env=environment
        )

    return run


def assert_fine(done):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_there_is_no_triton(run):
    assert "No module named 'triton'" in run("-c", "import triton").stderr


def test_nothing_is_needed_that_is_missing(run, tmp_path):
    """Every version computes, every module is imported, a learner's kernel runs, puzzles are
    checked, a model answers and learns, and files are written.
    """
    names = ["row_sum", "fa1", "ring", "fa3"]
    check = "".join(f"flash_versions.puzzles check {name} --folder .\n" for name in names)
    files = {
        "sitecustomize.py": WINDOWS,
        "own.py": LEARNER,
        "commands.txt": f"{COMMANDS[1:]}{check}",
    }
    files |= {"data.jsonl": '{"text": "one and one is two"}\n'}
    files |= {"asked.jsonl": '{"prompt": "What is 1+1?"}\n'}
    files |= {f"{name}.py": PUZZLES[name].solution for name in names}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    assert "import of fcntl halted" in run("-c", "import fcntl", PYTHONPATH=path).stderr
    done = run("-c", API, PYTHONPATH=path)
    assert_fine(done)
    assert "memory      unknown" in done.stderr
    assert "What is 1+1?" in (tmp_path / "said.jsonl").read_text()
    assert "<answer>843</answer>" in done.stdout and "fa1 on cpu" in done.stderr
    assert re.findall(r"(\w+): right\.", done.stdout) == names


@pytest.mark.slow
def test_a_version_of_yours(run, tmp_path):
    assert_fine(run("-m", "flash_versions.mine", "new", str(tmp_path)))
    done = run("-m", "flash_versions.mine", "check", str(tmp_path / "mine.py"))
    assert_fine(done)
    assert "cases are right" in done.stdout


def test_a_command_that_compiles_says_so(run):
    done = run("-m", "flash_versions.inspect", "fa2")
    assert done.returncode in (1, 2), done.stdout
    [line] = done.stderr.splitlines()
    assert SENTENCE in line and not done.stdout
