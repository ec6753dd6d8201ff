"""What a release needs: metadata, one version, links, a change log, a citation."""

import importlib.util
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
    pages = "docs/use/install.md", *module.CLONED
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
    for page in ("README.md", "docs/index.md", "docs/extend/contributing.md"):
        text = (tmp_path / page).read_text()
        assert f"git clone {ADDRESS} flash-versions\n" in text and "ADDRESS" not in text
    colab = "https://colab.research.google.com/github/someone/flash-versions/blob/main/"
    [notebook] = re.findall(rf"{re.escape(colab)}([^)]+)", install)
    assert (ROOT / notebook).is_file()
    assert "https://codespaces.new/someone/flash-versions" in install

    once = read(tmp_path)
    assert address.main([ADDRESS]) == 0 and read(tmp_path) == once
    assert address.main(["https://github.com/else/where"]) == 0
    assert ADDRESS not in read(tmp_path)


def test_what_is_no_address_is_refused(address, tmp_path, capsys):
    before = read(tmp_path)
    assert address.main(["flash-versions"]) == 2
    assert "https://github.com/OWNER/NAME works" in capsys.readouterr().err
    assert read(tmp_path) == before
