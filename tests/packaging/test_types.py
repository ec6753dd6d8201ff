"""A user's program with the types of the installed packages, under `mypy --strict`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.packaging.test_wheel import PACKAGES, PROJECT, link

PROGRAM = """
import torch

from flash_versions import VERSIONS, Fp8, Version, attention, attention_reference, compare
from flash_versions import context_parallel_attention, merge_attention_states
from flash_versions.flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_versions.integrations.hf import register
from transformer.generation.session import Session
from transformer.model.config import Config
from transformer.model.decoder import Transformer


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    o, lse = merge_attention_states(o, lse, o, lse)
    return o + attention(q, k, v, window=(64, 0), precision=Fp8("head", hadamard=True))


def title(name: str) -> str:
    version: Version = VERSIONS[name]
    return version.title


def ask(question: str) -> str:
    session = Session.load("reinforced", attention="sdpa")
    text, tokens = session.encode([{"role": "user", "content": question}])
    completions, statistics = session.answer([tokens], [torch.Generator()])
    return completions[0].text


def model(config: Config) -> Transformer:
    return Transformer(config, attention)
"""
WRONG = """
from flash_versions import attention

o: int = attention("q", "k", "v", causal="yes")
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Runs mypy on a program, in an environment where the packages are installed."""
    folder = tmp_path_factory.mktemp("types")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [site_packages] = folder.glob("venv/lib/python*/site-packages")
    link(PROJECT["dependencies"], site_packages)
    for package in PACKAGES:
        (site_packages / package).symlink_to(ROOT / package)

    def check(program: str) -> str:
        (folder / "program.py").write_text(program)
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "program.py"]
        command += ["--python-executable", str(folder / "venv/bin/python")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert not done.stderr, done.stderr
        return done.stdout

    return check


@pytest.mark.slow
def test_a_program_of_a_user_is_clean(check):
    assert check(PROGRAM).startswith("Success")


@pytest.mark.slow
def test_wrong_calls_are_found(check):
    found = check(WRONG)
    assert "call-overload" in found and "Success" not in found


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_offered(package):
    assert Path(ROOT, package, "py.typed").is_file()
