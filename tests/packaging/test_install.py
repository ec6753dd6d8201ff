"""What README.md and docs/use/install.md say of installing; what needs a network is only read."""

import re
import tomllib

from tests.helpers import ROOT
from tests.helpers.make import make

README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs/use/install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def check_extras(command: str) -> None:
    """All extras that a command names exist."""
    [names] = re.findall(r"\[([\w,]+)\]", command)
    assert set(names.split(",")) <= set(EXTRAS), command


def test_the_extras_exist():
    for command in re.findall(r"pip install '\.\S+", README + INSTALL):
        check_extras(command)


def test_make_generate(tmp_path):
    assert "<answer>843</answer>" in make("generate", tmp_path, "transformer")
