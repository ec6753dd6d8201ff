"""Run notebooks and write them with their outputs: `python -m lessons.build 00_start 01_fa1`.

A person edits `_src/NAME.py`; `NAME.ipynb` beside it is made from it here, the same file from the
same sources: no times, no counters, cell names that come from their place and text. A cell whose
output may differ from run to run carries the tag "varies", one whose code is not part of the lesson
"hide-cell" (with what it shows) or "hide-input".
"""

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from lessons.build.glossary import link_first_uses
from lessons.practice import puzzles
from transformer.model.files import write_text

NOTEBOOKS = Path(__file__).parents[2]
SOURCES = NOTEBOOKS / "_src"
TIMEOUT = 600  # seconds that a cell may take
GLOSSARY = "../docs/learn/glossary.md"  # as seen from a notebook
VARIES = "varies"
FOLDED = {"hide-cell", "hide-input"}  # tags of cells whose code a page and Jupyter show on demand
ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
COLAB = """# On Google Colab only: fetch the package, and what it needs.
import os
import subprocess
import sys

if "google.colab" in sys.modules and not os.path.exists("lessons"):
    address = input("Address of the repository that this notebook is from: ")
    subprocess.run(["git", "clone", "--depth=1", address, "/content/repository"], check=True)
    os.chdir("/content/repository/notebooks")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--editable", "..[notebooks]"]
    subprocess.run(pip, check=True)
    sys.path[:0] = [os.getcwd(), os.path.dirname(os.getcwd())]"""


def notebook_names() -> list[str]:
    """All notebooks, in order."""
    return sorted(path.stem for path in SOURCES.glob("*.py"))


def read_source(name: str) -> NotebookNode:
    """A notebook without outputs, from its text, with the set-up for Colab behind its first cell.

    Raises:
        ValueError: there is no such text.
    """
    path = SOURCES / f"{name}.py"
    if not path.exists():
        raise ValueError(f"there is no {path.name}; there are {', '.join(notebook_names())}.")
    notebook = jupytext.read(path)
    colab = nbformat.v4.new_code_cell(COLAB, metadata={"tags": ["hide-cell"]})
    notebook.cells.insert(1, colab)
    linked: set[str] = set()  # terms of the glossary that the notebook has used
    for number, cell in enumerate(notebook.cells):
        if cell.source.startswith(puzzles.MARK):
            cell.source = puzzles.cell_of(cell.source.removeprefix(puzzles.MARK))
        if cell.cell_type == "markdown":
            cell.source = link_first_uses(cell.source, linked, GLOSSARY)
        if FOLDED.intersection(cell.metadata.get("tags", [])):
            cell.metadata["jupyter"] = {"source_hidden": True}
        text = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        cell.id = f"{number:02}-{text}"
    notebook.metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook: NotebookNode) -> NotebookNode:
    """Run a notebook in the folder `notebooks` in a process of its own; the same object, with
    outputs.

    Raises:
        CellExecutionError: a cell raised.
        ValueError: a cell that is not tagged "varies" printed an address.
    """
    paths = [str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("MPLBACKEND", None)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name=KERNEL["name"],
        record_timing=False,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    client.execute(env=environment, cleanup_kc=True)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
            check_outputs(cell)
    notebook.metadata["kernelspec"], notebook.metadata["language_info"] = KERNEL, LANGUAGE
    return notebook


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs in which what a cell printed in several pieces is one."""
    found: list[NotebookNode] = []
    for output in outputs:
        last = found[-1] if found else None
        if output.output_type == "stream" and last and last.get("name") == output.name:
            last.text += output.text
        else:
            found.append(output)
    return found


def check_outputs(cell: NotebookNode) -> None:
    """Refuse what no two runs have in common; ValueError."""
    if VARIES in cell.metadata.get("tags", []):
        return
    for text in texts(cell):
        if found := ADDRESS.search(text):
            raise ValueError(
                f"the cell {cell.source.splitlines()[0]!r} printed an address ({found[0].strip()}),"
                f" which differs from run to run; print something else, or tag the cell 'varies'."
            )


def texts(cell: NotebookNode) -> list[str]:
    """What a code cell says in text, as plain text, HTML or Markdown; pictures within it are left
    out.
    """
    found: list[str] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            found.append(f"{output.name}: {output.text}")
        elif output.output_type == "error":
            found.append(f"{output.ename}: {output.evalue}")
        else:
            kinds = sorted(kind for kind in output.data if kind.startswith("text/"))
            found += [f"{kind}: {without_pictures(output.data[kind])}" for kind in kinds]
    return found


def without_pictures(text: Any) -> str:
    """Text in which every embedded picture is only named."""
    return re.sub(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]+", "data:image", str(text))


def build(name: str, text_only: bool = False) -> Path:
    """Run one notebook and write it; nothing is written if a cell fails.

    Args:
        name: of the notebook.
        text_only: keep the outputs that are there and run nothing.

    Raises:
        CellExecutionError: a cell raised.
        ValueError: there is no such notebook, or `text_only` and its code has changed.
    """
    path = NOTEBOOKS / f"{name}.ipynb"
    if name == puzzles.NAME:  # made from the puzzles, and a reader's to run
        made = puzzles.notebook()
        made.metadata = {"kernelspec": KERNEL, "language_info": LANGUAGE}
        write_text(path, nbformat.writes(made) + "\n")
        return path
    notebook = read_source(name)
    notebook = with_outputs_of(path, notebook) if text_only else execute(notebook)
    write_text(path, nbformat.writes(notebook) + "\n")
    return path


def with_outputs_of(path: Path, notebook: NotebookNode) -> NotebookNode:
    """A notebook with the outputs of a committed one, whose code is the same; ValueError."""
    old = nbformat.read(path, as_version=4) if path.exists() else nbformat.v4.new_notebook()
    code, before = (
        [cell for cell in cells if cell.cell_type == "code"]
        for cells in (notebook.cells, old.cells)
    )
    if [cell.source for cell in code] != [cell.source for cell in before]:
        raise ValueError("a cell of code has changed; build without --text.")
    for cell, committed in zip(code, before):
        cell.outputs, cell.execution_count = committed.outputs, committed.execution_count
    return notebook


def main(arguments: list[str] | None = None) -> int:
    """Build what is named, or everything; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lessons.build", description="run notebooks and write them with outputs"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 00_start; none: all")
    parser.add_argument(
        "--text", action="store_true", help="only text or tags have changed: keep all outputs"
    )
    options = parser.parse_args(arguments)
    for name in options.names or [*notebook_names(), puzzles.NAME]:
        try:
            path = build(name.removesuffix(".py").removesuffix(".ipynb"), options.text)
        except (CellExecutionError, ValueError) as error:
            sys.stderr.write(f"error: {name}: {error}\n")
            return 1
        sys.stderr.write(f"wrote {path.name}, {path.stat().st_size:,} bytes\n")
    return 0
