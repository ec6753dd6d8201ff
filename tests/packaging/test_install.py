"""Every row of the README's table "Install" does what it says; what needs a network is only read.

Here are the rows that no other test has; ROWS says where each one is tested.
"""

import ast
import json
import re
import subprocess
import tomllib

import pytest

from tests.helpers import ROOT
from tests.helpers.make import make

ROWS = {
    "Linux, a checkout": "packaging/test_install.py::test_make_generate",
    "Linux, as a library": "packaging/test_wheel.py::test_outside_the_checkout",
    "macOS, Windows": "packaging/test_without_triton.py::test_a_model_answers",
    "Docker": "packaging/test_install.py::test_the_image",
    "VS Code, Codespaces": "packaging/test_install.py::test_development_containers",
    "Colab, Kaggle": "packaging/test_install.py::test_the_cell",
}
README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs/use/install.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def check_extras(command: str) -> None:
    """All extras that a command names exist."""
    [names] = re.findall(r"\[([\w,]+)\]", command)
    assert set(names.split(",")) <= set(EXTRAS), command


def test_every_row_has_a_test():
    table = README.partition("\n## Install\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", table, re.M)[1:]
    assert [name for name, _ in rows] == list(ROWS)
    for test in ROWS.values():
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert function in {getattr(node, "name", "") for node in tree.body}, test
    for command in re.findall(r"pip install '\.\S+", README + INSTALL):
        check_extras(command)


def test_make_generate(tmp_path):
    assert "<answer>843</answer>" in make("generate", tmp_path, "transformer")


def test_the_image():
    """What the Dockerfile copies, installs and runs is there; its build needs a network."""
    text = (ROOT / ".devcontainer/Dockerfile").read_text()
    instructions = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
    assert re.findall(r"^[A-Z]+", instructions, re.M) == [
        "FROM", "ARG", "RUN", "RUN", "WORKDIR", "COPY", "RUN", "CMD",
    ]  # fmt: skip
    [python] = re.findall(r"FROM python:(\d\.\d+)-slim", text)
    assert tuple(map(int, python.split("."))) >= (3, 11)
    check_extras(re.findall(r'-e "(.+)"', instructions)[0])
    assert "-c constraints.txt" in instructions and (ROOT / "constraints.txt").is_file()
    [command] = re.findall(r"^CMD (.+)$", instructions, re.M)
    module = json.loads(command)[2]
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    for command in re.findall(r"docker build .+", README + INSTALL + text):
        assert "-f .devcontainer/Dockerfile" in command
        assert all(x.startswith("TORCH=") for x in re.findall(r"--build-arg (\S+)", command))


@pytest.mark.parametrize("folder, torch", [(".devcontainer", "cpu"), (".devcontainer/cuda", "cu")])
def test_development_containers(folder, torch):
    about = json.loads((ROOT / folder / "devcontainer.json").read_text())
    build = about["build"]
    dockerfile = (ROOT / folder / build["dockerfile"]).resolve()
    assert dockerfile == ROOT / ".devcontainer/Dockerfile"
    assert (ROOT / folder / build["context"]).resolve() == ROOT
    declared = set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.M))
    assert set(build["args"]) == declared and build["args"]["TORCH"].startswith(torch)
    # The checkout is mounted over the copy that the image installed, so both have to be one folder.
    assert f"WORKDIR {about['workspaceFolder']}\n" in dockerfile.read_text()
    assert f"target={about['workspaceFolder']}," in about["workspaceMount"]


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
