"""What a release needs: metadata, one version, links, a change log, a citation, issue forms."""

import importlib.util
import json
import re
import shutil
import tomllib

import pytest
import yaml

import flash_versions
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = "https://github.com/someone/flash-versions"


@pytest.fixture
def address(tmp_path):
    """The command that writes the address, on a copy of the files that it changes."""
    spec = importlib.util.spec_from_file_location("address", ROOT / ".ci" / "address.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    pages = "README.md", "docs/use/install.md", "docs/extend/contributing.md"
    for file in ("pyproject.toml", "CITATION.cff", *pages):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return module


def read(folder) -> str:
    return "".join(path.read_text() for path in sorted(folder.rglob("*.*")) if path.is_file())


def test_one_version():
    """The version is in one file; the change log begins with it."""
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    [newest, *_] = re.findall(r"^## (\S+)", (ROOT / "docs/changelog.md").read_text(), re.M)
    assert newest == flash_versions.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert "version" not in cited and cited["cff-version"] == "1.2.0"
    assert {"title", "message", "authors"} <= set(cited) and cited["license"] == PROJECT["license"]


def test_classifiers_are_known():
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    assert set(PROJECT["classifiers"]) <= set(classifiers)


def test_the_address_is_given_once(address, tmp_path):
    assert address.main([f"{ADDRESS}.git"]) == 0
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == ADDRESS and set(urls) == {
        "Repository", "Documentation", "Changelog", "Issues",
    }  # fmt: skip
    for link in urls.values():  # every page that is linked is there
        _, tree, path = link.removeprefix(ADDRESS).partition("/main/")
        assert not tree or (ROOT / path).exists()
    assert yaml.safe_load((tmp_path / "CITATION.cff").read_text())["repository-code"] == ADDRESS
    install = (tmp_path / "docs/use/install.md").read_text()
    assert f'\nADDRESS = "{ADDRESS}"\n' in install
    for page in ("README.md", "docs/extend/contributing.md"):
        assert f"git clone {ADDRESS} flash-versions" in (tmp_path / page).read_text()
    colab = "https://colab.research.google.com/github/someone/flash-versions/blob/main/"
    [notebook] = re.findall(rf"{re.escape(colab)}([^)]+)", install)
    assert (ROOT / notebook).is_file()
    assert "https://codespaces.new/someone/flash-versions" in install

    once = read(tmp_path)
    assert address.main([ADDRESS]) == 0 and read(tmp_path) == once
    assert address.main(["https://github.com/else/where"]) == 0
    assert ADDRESS not in read(tmp_path) and not list(tmp_path.rglob("*.new"))


def test_what_is_no_address_is_refused(address, tmp_path, capsys):
    before = read(tmp_path)
    assert address.main(["flash-versions"]) == 2
    assert "https://github.com/OWNER/NAME works" in capsys.readouterr().err
    assert read(tmp_path) == before


def test_the_workflow_publishes_what_was_checked():
    """Publishing needs no password, waits for the checks, and happens for a tag only."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow[True]["push"] == {"tags": ["v*"]}  # YAML reads the key "on" as true
    assert publish["needs"] == "build" and publish["if"] == "github.event_name == 'push'"
    assert publish["permissions"] == {"id-token": "write"}
    commands = " ".join(step.get("run", "") for step in build["steps"])
    assert "twine check --strict" in commands and "python .ci/address.py" in commands
    assert "secrets." not in json.dumps(workflow)
    pattern = re.search(r"sed -n 's/(.+?)/\\1/p'", commands)[1].replace(r"\(", "(")
    source = (ROOT / "flash_versions/__init__.py").read_text()
    assert re.findall(pattern.replace(r"\)", ")"), source, re.M) == [flash_versions.__version__]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")))
def test_forms_for_issues(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids)) >= 2
    assert all(part["attributes"]["label"] for part in form["body"])
