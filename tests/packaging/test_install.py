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


def test_the_oldest_versions_that_are_allowed_are_tested():
    oldest = dict(re.findall(r"(\w+)>=([\d.]+)", " ".join(PROJECT["dependencies"])))
    python = PROJECT["requires-python"].removeprefix(">=")
    tested = f'TORCH={oldest["torch"]}.0 TRITON={oldest["triton"]}.0 PYTHON="$(python {python})"'
    assert tested in (ROOT / ".ci/run").read_text()
