"""The package's own commands: the table of `python -m flash_versions`, and `diff`."""

import html
import importlib.util
import itertools
import re

import pytest

from flash_versions import VERSIONS, __main__, diff
from tests.helpers import ROOT


def test_table_names_every_version(capsys):
    assert __main__.main() == 0
    out = capsys.readouterr().out
    for name in (*VERSIONS, "torch", "triton", "GPU", "Next"):
        assert name in out
    assert re.search(r"fa2 .*(simulated|natively)", out)


@pytest.mark.parametrize(
    "given, reason",
    {
        "fa1 fa9": "there is no lesson 'fa9'; there are fa1, fa2, ",
        "fa1 fa2 --context -1": "--context must be at least 0, got -1",
        "fa1 fa2 --html .": ".: Is a directory",
    }.items(),
)
def test_diffs_that_are_refused(given, reason, capsys):
    assert diff.main(given.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {reason}") and err.count("\n") == 1


def test_a_diff_is_of_code(capsys, tmp_path):
    """Printed or as a page: kernels and their launch, no docstring, nothing of FA2's splits."""
    assert diff.main(["fa1", "fa2"]) == 0
    out = capsys.readouterr().out
    assert "-    p = tl.exp(s - pivot[:, None])\n-    alpha" in out
    assert "+    p = tl.exp2(s * scale_log2 - pivot[:, None])\n+    alpha" in out
    assert '"""' not in out and "def combine(" not in out and "__main__" not in out
    assert diff.main(["fa1", "fa2", "--context", "0", "--html", f"{tmp_path}/page.html"]) == 0
    page = html.unescape(re.sub("<[^>]*>", "", (tmp_path / "page.html").read_text()))
    assert set(page.splitlines()[2:]) - {*out.splitlines()} == {
        x for x in page.splitlines() if x.startswith("@@")
    }


SPLITS = 7  # lines that split the keys, in FA2's lesson alone
BARS = {  # changed lines of code
    ("fa1", "fa2"): 60 + SPLITS,
    ("fa2", "fa3"): 40,
    ("fa3", "fa4"): 45,
    ("fa3-hopper", "fa4-hopper"): 80,
}


@pytest.mark.parametrize("old, new", BARS)
def test_an_idea_fits_on_a_page(old, new):
    assert 10 < diff.changed(diff.difference(old, new)) <= BARS[old, new]


def test_readme_names_what_there_is():
    """Commands, and the files and pictures that it links to; its ratios are to what users have."""
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"\bmake ([a-z-]+)", re.sub(r"`make\n", "`make ", readme))
    assert len(named) > 5 and set(named) <= set(targets)
    modules = re.findall(r"python -m ([a-z_.]+[a-z])", readme)
    assert len(modules) > 5
    for module in modules:
        assert importlib.util.find_spec(module), module
    links = re.findall(r"\]\(([^)#]+)|src=\"([^\"]+)", readme)
    paths = [one or other for one, other in links]
    assert len(paths) > 30
    for path in paths:
        assert "://" in path or (ROOT / path).exists(), path
    assert not [x for x in re.findall(r"([\d.]+) x\b", readme) if float(x) > 20]  # of a bound host


def test_readme_counts_the_lines_that_change():
    """As `diff` counts them."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    for before, name in itertools.pairwise(VERSIONS):
        count = diff.changed(diff.difference(before, name))
        assert re.search(
            rf"{count} (changed lines )?from {before.upper()} to {name.upper()}", readme
        )
