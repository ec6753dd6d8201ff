"""The puzzles of `flash_versions.puzzles` in Jupyter: a cell for each, checked when it runs.

`%%puzzle NAME` writes its cell to puzzles/NAME.py and checks it there; importing `lessons` brings
it. A cell of a notebook that says only `# puzzle: NAME` becomes the puzzle's. `puzzles.ipynb`
has all of them.
"""

from pathlib import Path

import nbformat
from IPython.core.getipython import get_ipython
from nbformat import NotebookNode

from flash_versions.puzzles import __main__ as command
from flash_versions.puzzles.puzzle import MINUTES, PUZZLES, find_puzzle
from lessons.practice.folded import display_help
from transformer.model.files import write_text

NAME = "puzzles"
FOLDER = Path("puzzles")  # in `notebooks`, where notebooks run
MARK = "# puzzle: "
BEGIN = """# Puzzles: write the kernels yourself

{count} kernels, from a masked copy to FlashAttention 1, 2, the backward and a small
FlashAttention 3. A cell has lines to fill in where it says `Write here`. Run it: the check takes
some seconds, counts loads and stores, and says what is wrong. Three hints and a solution are folded
below. No GPU is needed.

What the checks look at: [docs/learn/puzzles.md](../docs/learn/puzzles.md). The same puzzles as
files: `python -m flash_versions.puzzles`."""


def puzzle(line: str, cell: str) -> None:
    """`%%puzzle NAME`: say whether the cell solves the puzzle, and keep it in a file if it is more
    than the task.
    """
    one = find_puzzle(line.strip())
    if cell.strip() == one.stub.strip():
        print(f"{one.name}: not written yet")
    else:
        FOLDER.mkdir(exist_ok=True)
        write_text(FOLDER / f"{one.name}.py", cell)
        if command.check_and_keep(one, FOLDER / f"{one.name}.py"):
            return
    where = f"A solution: python -m flash_versions.puzzles solution {one.name}"
    display_help(one.hints, one.solution, where)


def register() -> None:
    """Let the running IPython know `%%puzzle`."""
    shell = get_ipython()
    if shell is not None:
        shell.register_magic_function(puzzle, "cell")  # type: ignore[arg-type]


def cell_of(name: str) -> str:
    """What a notebook has where its text says `# puzzle: NAME`."""
    return f"%%puzzle {name}\n{PUZZLES[name].stub.rstrip()}"


def notebook() -> NotebookNode:
    """The notebook with all puzzles, nothing of it solved or run."""
    new = nbformat.v4
    cells = [
        new.new_markdown_cell(BEGIN.format(count=len(PUZZLES))),
        new.new_code_cell("import lessons"),
    ]
    group = ""
    for one in PUZZLES.values():
        if one.group != group:
            group = one.group
            text = f"## {group.capitalize()}\n\nAbout {MINUTES[group]} minutes."
            cells.append(new.new_markdown_cell(text))
        cells.append(new.new_markdown_cell(f"### {one.number}. {one.title}"))
        cells.append(new.new_code_cell(cell_of(one.name)))
    for number, cell in enumerate(cells):
        cell.id = f"{number:02}"
    return new.new_notebook(cells=cells)
