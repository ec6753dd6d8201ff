"""The notebooks: what is committed is what their text gives when it is run, and their exercises can
be solved.
"""

import importlib.util

import nbformat
import pytest
from IPython.terminal.interactiveshell import TerminalInteractiveShell

from flash_versions.puzzles.puzzle import PUZZLES
from lessons.build import notebooks as build
from lessons.practice import folded, puzzles
from lessons.practice.answers import check
from lessons.practice.exercises import EXERCISES, load_exercises

pytestmark = pytest.mark.slow

load_exercises()
SOLUTIONS = build.NOTEBOOKS / "solutions"


def committed(name):
    """A notebook as it is committed."""
    return nbformat.read(build.NOTEBOOKS / f"{name}.ipynb", as_version=4)


def differences(old, new):
    """What one notebook shows and another does not, a sentence for each cell."""
    found = []
    if len(old.cells) != len(new.cells):
        found.append(f"{len(old.cells)} cells are committed, {len(new.cells)} are in the text")
    for number, (before, after) in enumerate(zip(old.cells, new.cells)):
        for what in ("cell_type", "id", "source"):
            if before[what] != after[what]:
                found.append(f"cell {number}: {what} differs: {before[what]!r} {after[what]!r}")
        tags, new_tags = (cell.metadata.get("tags", []) for cell in (before, after))
        if tags != new_tags:
            found.append(f"cell {number}: tags differ: {tags} {new_tags}")
        if before.cell_type == after.cell_type == "code" and build.VARIES not in tags:
            texts, new_texts = build.texts(before), build.texts(after)
            if texts != new_texts:
                found.append(f"cell {number} shows\n{texts}\nand now shows\n{new_texts}")
    return found


def test_the_notebook_of_puzzles_is_made_from_them(tmp_path, monkeypatch):
    """Else: make notebooks NAMES=puzzles."""
    before = (build.NOTEBOOKS / "puzzles.ipynb").read_text()
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    assert build.build("puzzles").read_text() == before


def test_a_cell_of_the_notebook_of_puzzles_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shell = TerminalInteractiveShell()
    [cell] = [x for x in puzzles.notebook().cells if x.source.startswith("%%puzzle copy\n")]
    monkeypatch.setattr(puzzles, "get_ipython", lambda: shell)
    puzzles.register()
    shell.run_cell(cell.source).raise_error()
    assert "copy: not written yet\n" in capsys.readouterr().out
    assert not list(tmp_path.glob("puzzles/*"))  # an attempt from before is not written over
    shell.run_cell(f"{cell.source}\n# begun").raise_error()
    assert "copy: not yet. " in capsys.readouterr().out
    shell.run_cell(f"%%puzzle copy\n{PUZZLES['copy'].solution}").raise_error()
    assert "copy: right.\n1 of 23 are solved." in capsys.readouterr().out


@pytest.mark.parametrize("name", build.notebook_names())
def test_committed_notebooks_are_what_their_text_gives(name):
    """Else: make notebooks."""
    assert differences(committed(name), build.execute(build.read_source(name))) == []


def solution_of(name):
    """The module with an exercise's solution."""
    path = SOLUTIONS / folded.where_solved(name)
    spec = importlib.util.spec_from_file_location(f"solution_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(EXERCISES))
def test_solutions_pass_and_wrong_ones_do_not(name, capsys, monkeypatch):
    """Nor is a function wrong that is still to be written. A solution has a wrong variant at least,
    and may have right ones.
    """
    monkeypatch.setattr(folded, "display", lambda item, raw: print(item["text/plain"]))
    solution = f"A solution is in solutions/{folded.where_solved(name)}.\n"
    functions = vars(solution_of(name))
    assert any(what.startswith("wrong_") for what in functions)
    for what, function in functions.items():
        if what == name or what.startswith("right_"):
            check(name, function)
            assert capsys.readouterr().out == f"{name}: right\n", what
        elif what.startswith("wrong_"):
            check(name, function)
            assert capsys.readouterr().out.startswith(f"{name}: wrong. "), what
    check(name, lambda *args, **named: None)
    assert capsys.readouterr().out == f"{name}: not solved yet, it returns None\n{solution}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of notebooks."""
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "_src")
    build.SOURCES.mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "code, words",
    [("1 / 0", "ZeroDivisionError"), ("object()", "printed an address"), (None, "there is no")],
)
def test_what_fails_leaves_the_committed_file(folder, capsys, code, words):
    """And says what went wrong."""
    (folder / "one.ipynb").write_text("before")
    if code:
        (build.SOURCES / "one.py").write_text(f"# %%\n{code}\n")
    assert build.main(["one"]) == 1
    assert words in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == {"one.ipynb", "_src"}
    assert (folder / "one.ipynb").read_text() == "before"
