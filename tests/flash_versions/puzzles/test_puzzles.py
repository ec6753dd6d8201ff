"""The puzzles: solutions are right, mistakes get the right sentence, and a person's path."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flash_versions.puzzles import __main__ as command
from flash_versions.puzzles.check import Compared, cases_of, check
from flash_versions.puzzles.puzzle import PUZZLES
from tests.compile.compiled import compiled
from tests.flash_versions.puzzles.changes import changed
from tests.flash_versions.puzzles.right_kernels import RIGHT
from tests.flash_versions.puzzles.wrong_kernels import WRONG

HINTS = 3
NAMED = 0.9  # of the wrong solutions: how many get a sentence that names the cause


def some(kernels):
    """Of each puzzle the first and the third; the rest is slow."""
    return [
        pytest.param(name, i, id=f"{name}-{i}", marks=[pytest.mark.slow] if i % 2 else [])
        for name, found in kernels.items()
        for i in range(len(found))
    ]


@pytest.fixture(autouse=True, scope="module")
def cases_are_made_once():
    """They are the same in each call, and solutions run for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flash_versions.puzzles.check.cases_of", functools.cache(cases_of))
        yield


@pytest.fixture
def no_compiler(monkeypatch):
    """Leave the compiler's word out, which takes seconds: what the simulator says is tested."""
    monkeypatch.setattr("flash_versions.puzzles.check.refusal", lambda *given: None)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", PUZZLES)
def test_solutions_are_right(name, tmp_path, no_compiler):
    puzzle = PUZZLES[name]
    assert check(puzzle, write(tmp_path, name, puzzle.solution)) is None


@pytest.mark.parametrize("name", PUZZLES)
def test_stubs_are_files_to_fill_in(name, tmp_path, monkeypatch):
    puzzle = PUZZLES[name]
    monkeypatch.setattr(Compared, "repaired", lambda *given, **named: [])  # is sought for seconds
    compile(puzzle.stub, name, "exec")
    assert "# Write here: " in puzzle.stub
    assert "HINTS" not in puzzle.stub
    assert len(puzzle.hints) == HINTS
    with pytest.raises(NotImplementedError):
        check(puzzle, write(tmp_path, name, puzzle.stub))
    assert check(puzzle, write(tmp_path, name, f"{puzzle.stub}\n# begun\n"))


@pytest.mark.parametrize(("name", "i"), some(RIGHT))
def test_other_ways_are_right(name, i, tmp_path, no_compiler):
    puzzle, right = PUZZLES[name], RIGHT[name][i]
    text = changed(puzzle.solution, right.changes)
    assert check(puzzle, write(tmp_path, name, text)) is None, right.about


@pytest.mark.slow
def test_wrong_solutions_are_refused_and_most_causes_named(tmp_path, no_compiler):
    """Layouts that do not fit are the compiler's to find."""
    named, missed, accepted = 0, [], []
    for name, found in WRONG.items():
        for i, wrong in enumerate(found):
            file = write(tmp_path, name, changed(PUZZLES[name].solution, wrong.changes))
            said = check(PUZZLES[name], file)
            if said and re.search(wrong.about, said, re.I | re.S):
                named += 1
            else:
                (missed if said else accepted).append((name, i, wrong.about, said))
    assert all("layout" in cause for _, _, cause, _ in accepted), accepted
    assert named >= NAMED * sum(map(len, WRONG.values())), missed


@pytest.mark.parametrize("name", PUZZLES)
def test_a_wrong_solution_is_explained(name, tmp_path, no_compiler):
    puzzle, wrong = PUZZLES[name], WRONG[name][0]
    said = check(puzzle, write(tmp_path, name, changed(puzzle.solution, wrong.changes)))
    assert said and re.search(wrong.about, said, re.I | re.S), said


def test_a_forgotten_return_is_named(tmp_path):
    text = PUZZLES["fa1"].solution.replace("    return o\n", "")
    said = check(PUZZLES["fa1"], write(tmp_path, "fa1", text))
    assert said and "fa1 returned None; it should return o" in said


def test_the_compiler_has_the_last_word(tmp_path):
    """A layout that does not fit, which the simulator does not look at."""
    [wrong] = [x for x in WRONG["ring"] if x.about == "layout"]
    text = changed(PUZZLES["ring"].solution, wrong.changes)
    said = check(PUZZLES["ring"], write(tmp_path, "ring", text))
    assert said and "Triton's compiler refuses it for sm_90" in said, said


@pytest.mark.slow
def test_solutions_compile_for_a_gpu():
    """What the simulator takes need not compile."""
    rows = compiled("kernels.puzzles")
    assert {x["puzzle"] for x in rows} == set(PUZZLES)
    hopper = [x for x in rows if PUZZLES[x["puzzle"]].group == "hopper"]
    assert all(x["copies"] for x in hopper)
    assert [x["puzzle"] for x in hopper if not x["wgmma"]] == ["ring"]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty folder, and no progress."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(capsys, *arguments):
    """A command's exit code and what it says."""
    code = command.main(list(arguments))
    said = capsys.readouterr()
    return code, said.out + said.err


def test_the_way_of_a_learner(own_folder, capsys):
    assert f"0 of {len(PUZZLES)} are solved." in run(capsys)[1]
    assert run(capsys, "start")[0] == 0
    program = "python -m flash_versions.puzzles"
    code, said = run(capsys, "check")
    assert (code, said) == (1, f"copy: not written yet.\nA hint: {program} hint copy\n")
    for shown in range(1, HINTS + 1):
        assert f"{shown} of {HINTS}: " in run(capsys, "hint")[1]
    said = run(capsys, "solution")[1]
    Path("puzzles/copy.py").write_text(said)
    code, said = run(capsys, "check")
    assert code == 0 and said.startswith(f"copy: right.\n1 of {len(PUZZLES)} are solved.\n")
    said = run(capsys, "status")[1]
    assert "[x]  1 copy" in said and "[ ]  2 scale_rows" in said
    assert f"Next: {program} start scale_rows" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("    y = torch", "    while True: pass\n    y = torch"), "It takes more than 1 s, at line 34"),
        (("    # end", "    while length > 0:\n        length += 0\n    # end"),
         "`while length > 0:`: this loop does not end"),
    ],
)  # fmt: skip
def test_an_endless_loop_is_stopped(change, said, own_folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "SECONDS", 1.0)
    Path("mine").mkdir()
    write(Path("mine"), "copy", PUZZLES["copy"].solution.replace(*change))
    code, found = run(capsys, "check", "copy", "--folder", "mine")
    assert code == 1 and said in found, found


def test_a_file_here_hides_nothing_of_python(own_folder):
    """A puzzle's copy.py in the current folder, which comes first where a command's modules are
    sought.
    """
    write(own_folder, "copy", PUZZLES["copy"].solution)
    words = [sys.executable, "-m", "flash_versions.puzzles", "check", "copy", "--folder", "."]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("copy: right."), done.stderr


def test_an_attempt_is_never_written_over(own_folder, capsys):
    assert run(capsys, "start", "4")[0] == 0
    Path("puzzles/row_sum.py").write_text("mine")
    code, said = run(capsys, "start", "row_sum")
    assert code == 2 and "is there already" in said
    assert Path("puzzles/row_sum.py").read_text() == "mine"
    assert run(capsys, "start", "row_sum", "--folder", "again")[0] == 0
    assert Path("again/row_sum.py").read_text() == PUZZLES["row_sum"].stub


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["start", "softmax"], "there is no puzzle 'softmax'; give a number from 1 to"),
        (["check", "delta"], "there is no puzzles/delta.py; write it with"),
        (["hint", "0"], "there is no puzzle '0'"),
    ],
)
def test_what_cannot_be_done_is_said(own_folder, capsys, arguments, words):
    code, said = run(capsys, *arguments)
    assert code == 2 and words in said


def test_damaged_progress_is_named(own_folder, capsys):
    state = own_folder / "state" / "flash-versions" / "puzzles.json"
    state.parent.mkdir(parents=True)
    state.write_text("{")
    code, said = run(capsys, "status")
    assert code == 2 and f"{state} is not as it was written" in said


@pytest.mark.parametrize(
    "text, said",
    [
        ("def copy(x:\n    pass\n", "line 1 of"),
        ("import torch\n", "the file has no function copy."),
        ("def copy(x):\n    return missing\n", "NameError: name 'missing' is not defined"),
        ("def copy(x):\n    return 3\n", "no kernel stores anything"),
    ],
)
def test_what_is_no_solution_gets_a_sentence(text, said, tmp_path):
    assert said in check(PUZZLES["copy"], write(tmp_path, "copy", text))
