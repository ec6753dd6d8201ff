"""The notebooks: what is committed is what their text gives when it is run, and their exercises can
be solved.
"""

import copy
import importlib.util
import re

import nbformat
import pytest
from IPython.terminal.interactiveshell import TerminalInteractiveShell

from flash_versions.puzzles.puzzle import PUZZLES
from lessons.build import notebooks as build
from lessons.practice import folded, puzzles
from lessons.practice.answers import check
from lessons.practice.exercises import EXERCISES, load_exercises

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


def test_every_notebook_is_there():
    """One executed notebook for each text, and no other."""
    names = build.notebook_names()
    assert names[0] == "00_start"
    assert {path.stem for path in build.NOTEBOOKS.glob("*.ipynb")} == {*names, puzzles.NAME}


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
    assert "copy: not yet. no kernel stores anything." in capsys.readouterr().out
    shell.run_cell(f"%%puzzle copy\n{PUZZLES['copy'].solution}").raise_error()
    assert "copy: right.\n1 of 23 are solved." in capsys.readouterr().out


@pytest.mark.parametrize("name", build.notebook_names())
def test_committed_notebooks_have_run(name):
    """All cells, from the first to the last, without an error."""
    notebook = committed(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [c for c in code for output in c.outputs if output.output_type == "error"]
    assert [c for c in code if c.outputs]


@pytest.mark.parametrize("name", build.notebook_names())
def test_committed_notebooks_are_what_their_text_gives(name):
    """Else: make notebooks."""
    assert differences(committed(name), build.execute(build.read_source(name))) == []


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda cells: cells.pop(), "cells are committed"),
        (lambda cells: cells[0].update(source="other"), "source differs"),
        (lambda cells: cells[1].outputs[0].update(text="4\n"), "now shows"),
        (lambda cells: cells[1].outputs.pop(), "now shows"),
        (lambda cells: cells[1].metadata.update(tags=["other"]), "tags differ"),
        (lambda cells: cells[2].outputs[0].data.update({"text/html": "<b>2</b>"}), "now shows"),
        (lambda cells: cells[2].outputs[0].data.update({"image/png": "AAAB"}), None),
        (lambda cells: cells[2].outputs[0].data.update({"text/html": PICTURE * 2}), "now shows"),
        (lambda cells: cells[3].outputs[0].update(text="13 s\n"), None),
    ],
)
def test_stale_notebooks_are_seen(change, words):
    """Whatever is said; not pictures, and not where the output varies."""
    stream = nbformat.v4.new_output
    old = nbformat.v4.new_notebook()
    old.cells = [
        nbformat.v4.new_markdown_cell("text"),
        nbformat.v4.new_code_cell("1 + 2", outputs=[stream("stream", text="3\n")]),
        nbformat.v4.new_code_cell(
            "draw()",
            outputs=[stream("display_data", {"text/html": PICTURE, "image/png": "AAAA"})],
        ),
        nbformat.v4.new_code_cell(
            "time()", metadata={"tags": ["varies"]}, outputs=[stream("stream", text="12 s\n")]
        ),
    ]
    new = copy.deepcopy(old)
    assert differences(old, new) == []
    change(new.cells)
    found = differences(old, new)
    assert (words in found[0]) if words else found == []


PICTURE = '<img src="data:image/png;base64,AAAA">'


def test_notebooks_set_themselves_up_alike():
    """On Colab, where nothing of the package is there yet."""
    first = {
        name: next(c.source for c in build.read_source(name).cells if c.cell_type == "code")
        for name in build.notebook_names()
    }
    assert "google.colab" in first["00_start"]
    assert [name for name, source in first.items() if source != first["00_start"]] == []


def test_pictures_in_pages_are_not_compared():
    """They differ with every release of matplotlib."""
    other = PICTURE.replace("AAAA", "BBB+/=")
    assert build.without_pictures(PICTURE) == build.without_pictures(other)


def solution_of(name, path=None):
    """The module with an exercise's solution."""
    path = path or SOLUTIONS / folded.where_solved(name)
    spec = importlib.util.spec_from_file_location(f"solution_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(EXERCISES))
def test_solutions_pass(name, capsys, monkeypatch):
    """And a function that is still to be written is not called wrong."""
    monkeypatch.setattr(folded, "display", lambda item, raw: print(item["text/plain"]))
    check(name, getattr(solution_of(name), name))
    assert capsys.readouterr().out == f"{name}: right\n"
    check(name, lambda *args, **named: None)
    out = capsys.readouterr().out
    where = f"solutions/{folded.where_solved(name)}"
    assert out == f"{name}: not solved yet\nA solution is in {where}.\n"


@pytest.mark.parametrize("name", sorted(EXERCISES))
def test_what_is_shown_as_a_solution_passes(name, capsys, tmp_path):
    """With what its file imports, and nothing else of the file."""
    lines = (SOLUTIONS / folded.where_solved(name)).read_text().splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    shown = folded.solution(name)
    assert "wrong_" not in shown and len(EXERCISES[name].hints) > 1
    (tmp_path / f"{name}.py").write_text("\n".join([*imports, shown, ""]))
    check(name, getattr(solution_of(name, tmp_path / f"{name}.py"), name))
    assert capsys.readouterr().out == f"{name}: right\n"


@pytest.mark.parametrize("name", sorted(EXERCISES))
def test_wrong_variants_do_not_pass(name, capsys):
    """There is one at least."""
    functions = vars(solution_of(name))
    wrong = [function for what, function in functions.items() if what.startswith("wrong_")]
    assert wrong
    for function in wrong:
        check(name, function)
        assert capsys.readouterr().out.startswith(f"{name}: wrong. "), function.__name__


@pytest.mark.parametrize(
    "name, wrong, reason",
    [
        ("attend", "wrong_plain_softmax", "take 2 keys at a time"),
        ("attend", "wrong_other_products", "take 2 keys at a time"),
        ("attend", "wrong_dropped_tail", "7 keys in blocks of 3"),
        ("fold_fp8", "wrong_not_rounded", "no error of rounding"),
        ("polynomial_exp2", "wrong_power_of_two", "calls `rpow` of PyTorch"),
        ("polynomial_exp2", "wrong_exponential_of_numpy", "more exact than the polynomial"),
    ],
)
def test_wrong_variants_are_told_why(name, wrong, reason, capsys):
    """What the check says has to lead to the mistake."""
    check(name, getattr(solution_of(name), wrong))
    assert reason in capsys.readouterr().out


def test_every_exercise_is_asked_once_and_solved_once():
    """No solution without a question, no question without a solution, which is in the folder of its
    notebook.
    """
    asked = [
        (path.stem, name)
        for path in build.SOURCES.glob("*.py")
        for name in re.findall(r'^check\("(\w+)"', path.read_text(), re.MULTILINE)
    ]
    assert sorted(name for _, name in asked) == sorted(EXERCISES)
    solved = {path.relative_to(SOLUTIONS).with_suffix("") for path in SOLUTIONS.rglob("*.py")}
    assert {path.parts for path in solved} == set(asked)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of notebooks."""
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "_src")
    build.SOURCES.mkdir()
    return tmp_path


def test_building_twice_gives_the_same_file(folder):
    """Whatever the times, counters and names that Jupyter gives."""
    (build.SOURCES / "one.py").write_text(
        "# %% [markdown]\n# text\n\n# %%\nprint(1)\nprint(2)\n2\n"
    )
    assert build.main(["one.py"]) == 0
    first = (folder / "one.ipynb").read_bytes()
    assert build.main([]) == 0
    assert (folder / "one.ipynb").read_bytes() == first
    cells = nbformat.reads(first.decode(), as_version=4).cells
    assert [output.output_type for output in cells[1].outputs] == ["stream", "execute_result"]
    assert cells[1].outputs[0].text == "1\n2\n"
    assert re.search(rb"execut\w+\": {|20\d\d-|jupytext_version", first) is None


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
