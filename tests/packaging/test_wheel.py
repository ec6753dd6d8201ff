"""What users install: the wheel and the sdist, and the wheel in an environment without a checkout.

The environment links the installed distributions that the wheel asks for and no others. So nothing
is downloaded, and a package that is used without being asked for is not found.
"""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("flash_versions", "transformer")
ATTENTION = """
import torch, flash_versions
q, k, v = torch.randn(3, 1, 40, 2, 16, requires_grad=True).unbind()
for version in flash_versions.VERSIONS:
    o = flash_versions.attention(q, k, v, causal=True, version=version)
    do = torch.randn_like(o)
    found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do)))
    found = flash_versions.compare(o, q, k, v, causal=True, do=do, **found)
    assert len(found) == 4 and all(accuracy.ok for accuracy in found.values())
print(flash_versions.__file__)
"""


def run(*command, cwd: Path, code: int = 0) -> str:
    """What a command prints to either stream, in an environment that knows of no checkout."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        list(map(str, command)), env={**environment, "CUDA_VISIBLE_DEVICES": ""}, cwd=cwd,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The sdist, and the wheel that is made from it, by their suffix."""
    folder = tmp_path_factory.mktemp("dist")
    python = [sys.executable, "-m"]
    run(*python, "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    run(*python, "twine", "check", "--strict", *folder.iterdir(), cwd=folder)
    return {path.suffix: path for path in folder.iterdir()}


def test_contents(built):
    """The wheel holds the two packages with their data; the sdist holds what tests them too."""
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wheel = {name for name in zipfile.ZipFile(built[".whl"]).namelist() if "dist-info" not in name}
    assert wheel == expected >= {f"{package}/py.typed" for package in PACKAGES}
    with tarfile.open(built[".gz"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert sdist > expected | {"Makefile", "README.md", "tests/conftest.py", "docs/conf.py"}


def distributions(requirements: list[str], found: set[str]) -> set[str]:
    """Names of the installed distributions that requirements need, directly or not."""
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = distribution(requirement.name)
        if needed.name not in found:
            found.add(needed.name)
            distributions(needed.requires or [], found)
    return found


def link(requirements: list[str], site_packages: Path) -> None:
    """Make the distributions that requirements need importable, and known to pip."""
    for name in distributions(requirements, set()):
        installed = distribution(name)
        for entry in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (site_packages / entry).exists():
                (site_packages / entry).symlink_to(installed.locate_file(entry))


def test_outside_the_checkout(built, tmp_path):
    """Attention needs the base dependencies only, a shipped model's answer those of its extra."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    [site_packages] = tmp_path.glob("venv/lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    generate = [python, "-m", "transformer.generate"]

    link(PROJECT["dependencies"], site_packages)
    run(*install, built[".whl"], cwd=tmp_path)
    assert f"{site_packages}/flash_versions" in run(python, "-c", ATTENTION, cwd=tmp_path)
    assert "'flash-versions[transformer]'" in run(*generate, cwd=tmp_path, code=1)

    link(PROJECT["optional-dependencies"]["transformer"], site_packages)
    run(*install, f"{built['.whl']}[transformer]", cwd=tmp_path)
    assert "843" in run(*generate, cwd=tmp_path)
