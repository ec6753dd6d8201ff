"""The package's own commands: the table of `python -m flash_versions` and the lesson of `diff`."""

import importlib.util
import itertools
import re

import pytest

from flash_versions import BASELINES, VERSIONS, __main__
from flash_versions.diff import __main__ as diff
from flash_versions.diff import changed, files, lesson, plain_diff, plain_source
from tests.helpers import ROOT


def test_table_names_every_version(capsys):
    assert __main__.main() == 0
    out = capsys.readouterr().out
    for name in (*VERSIONS, "torch", "triton", "GPU", "interpreter", "Next"):
        assert name in out
    assert re.search(r"fa2 .*(interpreted|natively)", out)


def test_lesson_shows_what_changed_and_nothing_else(capsys):
    assert diff.main(["fa1", "fa2", "--all"]) == 0
    out = capsys.readouterr().out
    assert "+    p = tl.exp2(s * scale_log2 - pivot[:, None])" in out
    assert "+++ fa2/combine.py" in out
    assert '"""' not in out
    assert "new_max = tl.maximum(row_max, tl.max(s, 1))\n" in out
    replaced = re.findall(r"^-def (\w+)", out, re.MULTILINE)
    assert replaced == ["softmax_step", "probabilities", "backward_kernel", "choose_config"]


def test_lesson_shows_shared_definitions_in_the_place_of_imports(capsys):
    """FA3 loads rows in its own way, FA2 in that of a shared page."""
    assert diff.main(["fa2", "fa3", "--all"]) == 0
    out = capsys.readouterr().out
    assert "-def load_rows(view, rows, index, MASKED: tl.constexpr):\n" in out
    assert "+def load_rows(desc, rows, index):\n" in out
    assert "+++ fa3/hopper/forward.py" in out


PAGES = {
    "shared.py": "def helper():\n    return 0\n",
    "fa1/forward.py": """from pages.shared import helper

# What tile needs.
SIZE = 4
LIMIT = 5


def tile():
    return SIZE + width() + changed()


def width():
    return 1


def changed():
    return 2


def wrapped():
    return 3


def gone():
    return LIMIT
""",
    "fa2/forward.py": """from pages.fa1 import forward as before
from pages.fa1.forward import tile


def changed():
    return tile()


def wrapped():
    return before.wrapped()
""",
    "fa2/__init__.py": "from pages.fa1.forward import changed\n",
}


def test_lesson_leaves_out_what_is_imported_from_the_version_before(tmp_path, monkeypatch):
    """With what only that needs; not what has another definition now, unless that uses it."""
    for name, text in PAGES.items():
        path = tmp_path / "pages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in ("ROOT", "FOLDER"):
        monkeypatch.setattr(files, folder, tmp_path / "pages")
    monkeypatch.setattr(files, "VERSIONS", "pages")
    lines = [line for line in lesson("fa1", "fa2") if line[1:].strip()]
    assert [line for line in lines if line[0] == "-" and line[1] != "-"] == [
        "-from pages.shared import helper",
        "-LIMIT = 5",
        "-    return 2",
        "-def gone():",
        "-    return LIMIT",
    ]
    added = [line for line in lines if line[0] == "+" and line[1] != "+"]
    assert added[2:] == ["+    return tile()", "+def wrapped():", "+    return before.wrapped()"]


def test_lesson_of_the_last_version(capsys):
    """FA4's softmax is new; boxes, the order of tiles and the launch are imported from FA3."""
    assert diff.main(["fa3", "fa4", "--all"]) == 0
    out = capsys.readouterr().out
    assert "+    acc = rescale(acc, alpha, rule, MASKED)\n" in out
    assert "+++ fa4/softmax.py" in out
    removed = set(re.findall(r"^-(?:def |class )?(\w+)", out, re.MULTILINE))
    assert {"produce", "attend_in_order"} <= removed
    imported = {"load_rows", "heavy_first", "choose_config", "HopperConfig"}
    assert not removed & (
        imported | {"overlapping_config", "describe_inputs", "numbers", "MEASURED"}
    )


def test_lesson_as_html(tmp_path):
    page = tmp_path / "lesson.html"
    assert diff.main(["fa1", "fa2", "--html", str(page)]) == 0
    assert '<span class="add">+    p = tl.exp2(s * scale_log2 - pivot[:, None])' in page.read_text()


@pytest.mark.parametrize("view", [[], ["--plain"], ["--all"]])
def test_unknown_version(view, capsys):
    known = ", ".join(VERSIONS) if "--all" in view else f"{', '.join(VERSIONS)}, fa3-hopper, fa4-ho"
    assert diff.main(["fa1", "fa7", *view]) == 2
    assert f"error: there is no version 'fa7'; there are {known}" in capsys.readouterr().err


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


def test_one_kernel_is_shown_whole(capsys):
    assert diff.main(["--show", "fa2", "--plain"]) == 0
    assert capsys.readouterr().out == plain_source("fa2")
    assert diff.main(["--show", "fa2", "--plain", "--full", "--head-dim", "80"]) == 0
    out = capsys.readouterr().out
    assert out == plain_source("fa2", causal=False, head_dim=80)
    assert "tl.zeros([BLOCK_Q, 128], tl.float32)" in out and "offset" not in out


def test_versions_on_disk_are_the_registered_ones():
    assert files.version_names() == list(VERSIONS)
    assert not set(VERSIONS) & set(BASELINES)


@pytest.mark.parametrize("name", VERSIONS)
def test_readme_table_tells_what_the_code_tells(name):
    """The progression table is written once in the code; the README repeats it word for word."""
    version = VERSIONS[name]
    readme = (ROOT / "README.md").read_text()
    assert f"| {version.wasted} | {version.idea} |" in readme
    assert f"(flash_versions/versions/{name}/forward.py)" in readme


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


def test_no_version_number_in_an_identifier():
    """The version is in the path, so that a diff between two versions shows the idea only."""
    for path in (ROOT / "flash_versions/versions").glob("fa*/**/*.py"):
        names = re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE)
        bare = [re.sub(r"(exp|log)2|fp8", "", name) for name in names]
        assert not [name for name in bare if re.search(r"fa\d|v\d|\d$", name)], path
