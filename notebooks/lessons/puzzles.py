"""`puzzles.ipynb`: the puzzles of `flash_versions.puzzles`, each in a cell that is checked.

    %load_ext lessons.puzzles

brings `%%puzzle NAME`, which writes the cell to puzzles/NAME.py and checks it, and `%hint NAME`.
"""

from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from flash_versions.puzzles import command
from flash_versions.puzzles.puzzle import MINUTES, PUZZLES, find_puzzle
from transformer.model.files import write_text

NAME = "puzzles"
FOLDER = Path("puzzles")  # in `notebooks`, where notebooks run
BEGIN = """# Puzzles: write the kernels yourself

{count} kernels, from a masked copy to FlashAttention 1, 2, the backward and a small
FlashAttention 3.
A cell has lines to fill in where it says `Write here`. Run it: the check takes some seconds, counts
loads and stores, and says what is wrong. `%hint NAME` shows one more of three hints. No GPU is
needed.

What the checks look at: [docs/puzzles.md](../docs/puzzles.md). The same puzzles as files:
`python -m flash_versions.puzzles`."""


def puzzle(line: str, cell: str) -> None:
    """`%%puzzle NAME`: write the cell to a file, and say whether it solves the puzzle."""
    name = find_puzzle(line.strip()).name
    FOLDER.mkdir(exist_ok=True)
    write_text(FOLDER / f"{name}.py", cell)
    command.main(["check", name, "--folder", str(FOLDER)])


def hint(line: str) -> None:
    """`%hint NAME`: one more hint."""
    command.main(["hint", *line.split()])


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext`."""
    shell.register_magic_function(puzzle, "cell")
    shell.register_magic_function(hint, "line")


def notebook() -> NotebookNode:
    """The notebook, with nothing solved."""
    new = nbformat.v4
    cells = [
        new.new_markdown_cell(BEGIN.format(count=len(PUZZLES))),
        new.new_code_cell("%load_ext lessons.puzzles"),
    ]
    group = ""
    for one in PUZZLES.values():
        if one.group != group:
            group = one.group
            text = f"## {group.capitalize()}\n\nAbout {MINUTES[group]} minutes."
            cells.append(new.new_markdown_cell(text))
        cells.append(new.new_markdown_cell(f"### {one.number}. {one.title}"))
        cells.append(new.new_code_cell(f"%%puzzle {one.name}\n{one.stub.rstrip()}"))
    for number, cell in enumerate(cells):
        cell.id = f"{number:02}"
    return new.new_notebook(cells=cells)
