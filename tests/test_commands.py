"""The package's own commands: the table of `python -m flash_versions` and the lesson of `diff`."""

import re
from pathlib import Path

import pytest

from flash_versions import BASELINES, VERSIONS, __main__, diff

ROOT = Path(__file__).parent.parent


def test_table_names_every_version(capsys):
    assert __main__.main() == 0
    out = capsys.readouterr().out
    for name in (*VERSIONS, "torch", "triton", "GPU", "interpreter", "Next"):
        assert name in out
    assert re.search(r"fa2 .*(interpreted|natively)", out)


def test_lesson_shows_what_changed_and_nothing_else(capsys):
    assert diff.main(["fa1", "fa2"]) == 0
    out = capsys.readouterr().out
    assert "+    p = tl.exp2(s * scale_log2 - pivot[:, None])" in out
    assert "+++ fa2/combine.py" in out
    assert '"""' not in out
    assert "new_max = tl.maximum(row_max, tl.max(s, 1))\n" in out
    replaced = re.findall(r"^-def (\w+)", out, re.MULTILINE)
    assert replaced == ["softmax_step", "probabilities", "backward_kernel", "choose_config"]


def test_lesson_shows_shared_definitions_in_the_place_of_imports(capsys):
    """FA3 loads rows in its own way, FA2 in that of a shared page; the backward is FA2's."""
    assert diff.main(["fa2", "fa3"]) == 0
    out = capsys.readouterr().out
    assert "-def load_rows(view, rows, index, MASKED: tl.constexpr):\n" in out
    assert "+def load_rows(desc, rows, index):\n" in out
    assert "backward" not in out and "softmax_step(" not in re.findall(
        r"^[+-].*", out, re.MULTILINE
    )


def test_lesson_as_html(tmp_path):
    page = tmp_path / "lesson.html"
    assert diff.main(["fa1", "fa2", "--html", str(page)]) == 0
    assert '<span class="add">+    p = tl.exp2(s * scale_log2 - pivot[:, None])' in page.read_text()


def test_unknown_version(capsys):
    assert diff.main(["fa1", "fa7"]) == 2
    assert capsys.readouterr().err == "error: there is no version 'fa7'; there are fa1, fa2, fa3\n"


def test_versions_on_disk_are_the_registered_ones():
    assert diff.version_names() == list(VERSIONS)
    assert not set(VERSIONS) & set(BASELINES)


@pytest.mark.parametrize("name", VERSIONS)
def test_readme_table_tells_what_the_code_tells(name):
    """The progression table is written once in the code; the README repeats it word for word."""
    version = VERSIONS[name]
    readme = (ROOT / "README.md").read_text()
    assert f"| {version.wasted} | {version.idea} |" in readme
    assert f"(flash_versions/{name}/forward.py)" in readme


def test_no_version_number_in_an_identifier():
    """The version is in the path, so that a diff between two versions shows the idea only."""
    for path in (ROOT / "flash_versions").glob("fa*/*.py"):
        names = re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE)
        assert not [name for name in names if re.search(r"fa\d|v\d|\d$", name)], path
