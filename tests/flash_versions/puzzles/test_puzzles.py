"""The puzzles: solutions are right, mistakes get the right sentence, and a person's path."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from flash_versions.puzzles import command
from flash_versions.puzzles.check import check
from flash_versions.puzzles.puzzle import MINUTES, ORDER, PUZZLES
from tests.compile.apart import compiled
from tests.flash_versions.puzzles.wrong import WRONG
from tests.helpers import ROOT
from tests.helpers.make import make

HINTS = 3
MISTAKES = [(name, i) for name, wrong in WRONG.items() for i in range(len(wrong))]


@pytest.fixture(autouse=True)
def only_interpreted():
    """A check needs Triton's interpreter, also where there is a GPU."""
    if torch.cuda.is_available():
        pytest.skip("puzzles are checked in the interpreter")


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", PUZZLES)
def test_solutions_are_right(name, tmp_path):
    puzzle = PUZZLES[name]
    assert check(puzzle, write(tmp_path, name, puzzle.solution)) is None


@pytest.mark.parametrize("name", PUZZLES)
def test_stubs_are_files_to_fill_in(name, tmp_path):
    puzzle = PUZZLES[name]
    compile(puzzle.stub, name, "exec")
    assert "# Write here: " in puzzle.stub
    assert "HINTS" not in puzzle.stub
    assert len(puzzle.hints) == HINTS
    with pytest.raises(NotImplementedError):
        check(puzzle, write(tmp_path, name, puzzle.stub))
    assert check(puzzle, write(tmp_path, name, f"{puzzle.stub}\n# begun\n"))


@pytest.mark.parametrize("name, i", MISTAKES, ids=[f"{name}-{i}" for name, i in MISTAKES])
def test_mistakes_are_explained(name, i, tmp_path):
    puzzle, wrong = PUZZLES[name], WRONG[name][i]
    assert wrong.old in puzzle.solution
    text = puzzle.solution.replace(wrong.old, wrong.new)
    assert wrong.said in (check(puzzle, write(tmp_path, name, text)) or "right")


def test_solutions_compile_for_a_gpu():
    """What the interpreter and the emulator take need not compile."""
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


def test_the_page_lists_the_puzzles():
    page = (ROOT / "docs/learn/puzzles.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (.*) \| (\d+) \|$", page, re.MULTILINE)
    listed = {group: names.replace("*", "").split(", ") for group, names, _ in rows}
    assert listed == {group: list(names) for group, names in ORDER.items()}
    assert {group: int(minutes) for group, _, minutes in rows} == MINUTES
    assert page.startswith(f"# Puzzles\n\n{len(PUZZLES)} kernels")
    assert f"{len(PUZZLES)} kernels to write" in (ROOT / "README.md").read_text()


def run(capsys, *arguments):
    """A command's exit code and what it says."""
    code = command.main(list(arguments))
    said = capsys.readouterr()
    return code, said.out + said.err


def fill_in(file: Path, lines: list[str]) -> None:
    """Write lines in the place of the first gap of a learner's file."""
    gap = re.compile(r"^( *)# Write here: .*\n(?: *# .*\n)*? *\.\.\.\n", re.MULTILINE)
    text = file.read_text()
    indent = gap.search(text)[1]
    file.write_text(gap.sub("".join(f"{indent}{line}\n" for line in lines), text, count=1))


FROM_HINTS = {
    "copy": [
        "inside = index < length",
        "tl.store(y + index, tl.load(x + index, mask=inside), mask=inside)",
    ],
    "scale_rows": [
        "inside = (row < rows)[:, None] & (column < columns)[None, :]",
        "tile = tl.load(x + row[:, None] * stride + column[None, :], mask=inside)",
        "factor = tl.load(w + row, mask=row < rows)",
        "tl.store(y + row[:, None] * columns + column[None, :], tile * factor[:, None], mask=inside)",
    ],
    "transpose": ["tl.store(y + column[None, :] * rows + row[:, None], tile, mask=inside)"],
}


def test_the_first_three_can_be_solved_from_the_hints_alone(own_folder, capsys):
    begin = make("puzzles", own_folder, XDG_STATE_HOME=str(own_folder / "state"))
    assert f"0 of {len(PUZZLES)} are solved." in begin
    assert "Next: python -m flash_versions.puzzles start copy" in begin
    for number, (name, lines) in enumerate(FROM_HINTS.items(), 1):
        assert run(capsys, "start")[0] == 0
        assert run(capsys, "check") == (
            1,
            f"{name}: not written yet.\nA hint: python -m flash_versions.puzzles hint {name}\n",
        )
        for shown in range(1, HINTS + 1):
            said = run(capsys, "hint")[1]
            assert f"{shown} of {HINTS}: " in said
        plain = " ".join(said.replace("inside = ", "").split())
        assert [x for x in lines if x.replace("inside = ", "") not in plain] == []
        fill_in(own_folder / "puzzles" / f"{name}.py", lines)
        code, said = run(capsys, "check")
        assert (code, said) == (0, f"{name}: right.\n{number} of {len(PUZZLES)} are solved.\n")
    said = make("puzzles", own_folder, XDG_STATE_HOME=str(own_folder / "state"))
    assert f"3 of {len(PUZZLES)} are solved." in said
    assert "[x]  3 transpose" in said and "[ ]  4 row_sum" in said
    assert "Next: python -m flash_versions.puzzles start row_sum" in said


def test_an_endless_loop_is_stopped(own_folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "SECONDS", 8)
    puzzle = PUZZLES["copy"]
    Path("puzzles").mkdir()
    write(
        Path("puzzles"),
        "copy",
        puzzle.solution.replace("    y = torch", "    while True: pass\n    y = torch"),
    )
    code, said = run(capsys, "check", "copy")
    assert code == 1
    assert "It takes more than 8 s: does every loop end?" in said


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
        ("def copy(x):\n    return 3\n", "no kernel stores anything."),
    ],
)
def test_what_is_no_solution_gets_a_sentence(text, said, tmp_path):
    assert said in check(PUZZLES["copy"], write(tmp_path, "copy", text))


@pytest.mark.parametrize("name", ["dk_dv", "dq", "backward"])
def test_gradients_asked_for_are_those_of_autograd(name):
    """Of `spec`, which is what the checks compare with."""
    module = importlib.import_module(f"flash_versions.puzzles.backward.{name}")
    torch.manual_seed(0)
    for inputs in module.cases().values():
        q, k, v, do = (
            inputs[i].double() for i in ((0, 1, 2, 5) if name == "backward" else range(4))
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        m, n = len(q), len(k)
        hidden = torch.arange(n)[None, :] > torch.arange(m)[:, None] + n - m
        s = q @ k.T * q.shape[1] ** -0.5
        if name == "backward":
            s = s.masked_fill(hidden, -1e30)
        o = torch.softmax(s, 1) @ v
        if name == "backward":
            o = torch.where((~hidden).any(1)[:, None], o, 0.0)
        truth = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do)))
        exact = [x.double() for x in inputs]
        found = module.spec(*exact)
        found = found if isinstance(found, tuple) else (found,)
        for result, gradient in zip(module.RESULTS, found):
            # The cases' lse, delta and o are rounded to fp32; all else here is fp64.
            torch.testing.assert_close(gradient, truth[result], rtol=1e-5, atol=1e-5)
