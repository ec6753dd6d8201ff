"""The package's own commands: the table of `python -m flash_versions` and the lesson of `diff`."""

import importlib.util
import itertools
import re

import pytest

from flash_versions import VERSIONS, __main__
from flash_versions.diff import __main__ as diff
from flash_versions.diff import changed, plain_diff, plain_source
from tests.helpers import ROOT


def test_table_names_every_version(capsys):
    assert __main__.main() == 0
    out = capsys.readouterr().out
    for name in (*VERSIONS, "torch", "triton", "GPU", "Next"):
        assert name in out
    assert re.search(r"fa2 .*(simulated|natively)", out)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "a diff takes two versions; nothing was given"),
        (["fa1"], "a diff takes two versions; fa1 was given"),
        (["fa1", "--show", "fa2"], "--show fa2 shows one version; fa1 was given besides"),
        (["fa1", "fa2", "--all", "--plain"], "--all shows all files of two versions"),
        (["fa1", "fa2", "--plain", "--head-dim", "0"], "head_dim=0 is not possible; 1 to 256 are"),
        (["--show", "fa4", "--backward"], "fa4 has no kernel of its own for the backward"),
    ],
)
def test_diffs_that_are_refused(arguments, words, capsys):
    assert diff.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_kernels_are_shown_without_the_host(capsys):
    """By default with every option, but only kernel code: also what is imported on one side, not
    what is imported on both or from the other.
    """
    assert diff.main(["fa1", "fa2"]) == 0
    out = capsys.readouterr().out
    assert "-    p = tl.exp(s - pivot[:, None])\n-    alpha" in out  # held against its successor
    assert "+    p = tl.exp2(s * scale_log2 - pivot[:, None])\n+    alpha" in out
    assert "+    s = add_alibi(s, queries.slope[:, None], distance, mods)" in out
    assert "def forward(" not in out and '"""' not in out and "import" not in out
    assert diff.main(["fa3", "fa4", "--context", "0"]) == 0
    out = capsys.readouterr().out
    assert "+def rescale(" in out and "heavy_first(" not in out and "def load_rows" not in out


def test_kernels_for_hopper_lose_what_is_switched_off(capsys):
    assert diff.main(["--show", "fa4-hopper", "--plain"]) == 0
    out = capsys.readouterr().out
    assert "acc = corrected(acc, alpha)" in out and "def store(" in out
    for word in ("trace", "LATE_WAIT", "is_fp8", "scored", '"""', "attend_in_order", "start"):
        assert word not in out
    assert diff.main(["fa3-hopper", "fa4-hopper", "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 50 < changed(lines) <= 150
    assert "-def produce(problem, schedule, buffers, scheduler, q, k, v, bounds):" in lines
    assert "     round = 0" in lines  # what became another function is held against it


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
    """Of the plain kernels, as `--plain` prints them."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    for before, name in itertools.pairwise(VERSIONS):
        count = changed(plain_diff(before, name))
        assert re.search(
            rf"{count} (changed lines )?from {before.upper()} to {name.upper()}", readme
        )
    assert f"prints one without them, in {len(plain_source('fa2').splitlines())} lines" in readme
