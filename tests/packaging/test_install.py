"""What README.md and docs/use/install.md say of installing; what needs a network is only read."""

import json
import re
import subprocess
import tomllib

import pytest

from tests.helpers import ROOT
from tests.helpers.make import make

README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs/use/install.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def check_extras(command: str) -> None:
    """All extras that a command names exist."""
    [names] = re.findall(r"\[([\w,]+)\]", command)
    assert set(names.split(",")) <= set(EXTRAS), command


def test_the_extras_exist():
    for command in re.findall(r"pip install '\.\S+", README + INSTALL):
        check_extras(command)


def test_make_generate(tmp_path):
    assert "<answer>843</answer>" in make("generate", tmp_path, "transformer")


def test_the_image():
    """What the Dockerfile installs and runs is there; its build needs a network."""
    text = (ROOT / ".devcontainer/Dockerfile").read_text()
    check_extras(re.findall(r'-e "(.+)"', text)[0])
    [command] = re.findall(r"^CMD (.+)$", text, re.M)
    assert (ROOT / f"{json.loads(command)[2].replace('.', '/')}.py").is_file()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone of the repository")
def test_the_cell(tmp_path):
    """The cell for Colab and Kaggle fetches the repository from the one address in it."""
    cell = re.findall(r"```\n(ADDRESS = .+?)```", INSTALL, re.S)[0]
    address, command, change = cell.splitlines()
    assert re.fullmatch(r'ADDRESS = "https://github.com/[\w.-]+/[\w.-]+"', address)
    clone, install = command.removeprefix("!").split(" && ")
    check_extras(install)
    clone = clone.replace("{ADDRESS}", f"file://{ROOT}")
    subprocess.run(clone.split(), cwd=tmp_path, check=True, capture_output=True)
    notebooks = tmp_path / change.removeprefix("%cd ")
    assert (notebooks / "00_start.ipynb").is_file() and (notebooks / "lessons").is_dir()
    assert (notebooks.parent / "pyproject.toml").is_file()
