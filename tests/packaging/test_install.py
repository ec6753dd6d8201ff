"""What README.md and docs/use/install.md say of installing; what needs a network is only read."""

import re
import tomllib

from tests.helpers import ROOT
from tests.helpers.make import make

README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs/use/install.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_extras_exist():
    named = re.findall(r"pip install '\.\[([\w,]+)\]", README + INSTALL)
    assert named and {x for names in named for x in names.split(",")} <= {*EXTRAS}


def test_make_generate(tmp_path):
    assert "<answer>843</answer>" in make("generate", tmp_path, "transformer")
