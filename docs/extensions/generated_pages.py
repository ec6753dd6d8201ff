"""The pages that are made before Sphinx reads: one for each version, the walkthroughs, and the
tables of what runs where.

Nothing here names a version: a folder that is added to the package gets its page. What is made is
ignored by git and rewritten only where it changed, so that a second build has little to do.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import nbformat
import version_pages
import walkthroughs
import where_it_runs
from sphinx.application import Sphinx
from sphinx.util import logging

from flash_versions import VERSIONS
from flash_versions.versions.oracle import budget

ROOT = Path(__file__).parents[2]
DOCS, NOTEBOOKS = ROOT / "docs", ROOT / "notebooks"
logger = logging.getLogger(__name__)


def write_changed(path: Path, text: str) -> None:
    """Write a file, unless it says that already."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def keep_only(folder: Path, names: Iterable[str]) -> None:
    """Remove what an earlier build made and this one did not."""
    wanted = set(names)
    for path in folder.iterdir() if folder.exists() else ():
        if path.name not in wanted:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_walkthroughs(folder: Path) -> list[str]:
    """Copy the committed notebooks into the site, and write their first page; returns names."""
    notebooks = {}
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if not any(cell.cell_type == "markdown" for cell in notebook.cells):
            logger.warning("%s has no text and so no title: left out", path.name)
            continue
        language = notebook.metadata.setdefault("language_info", {"name": "python"})
        language["pygments_lexer"] = "ipython3"  # knows %magic and !commands
        write_changed(folder / path.name, nbformat.writes(notebook) + "\n")
        notebooks[path.stem] = notebook
    write_changed(folder / "index.md", walkthroughs.page(notebooks))
    keep_only(folder, ["index.md", *(f"{name}.ipynb" for name in notebooks)])
    return list(notebooks)


def make_versions(folder: Path, notebooks: list[str]) -> None:
    """A page for each version."""
    names = list(VERSIONS)
    for before, name in zip([None, *names], names):
        notebook = next((n for n in notebooks if name in n.split("_")), None)
        write_changed(folder / f"{name}.md", version_pages.page(name, before, notebook))
    text = "Each page says what was wasted before, what the version changes, and which code is new."
    listed = "\n".join(["```{toctree}", ":maxdepth: 1", "", *names, "```\n"])
    write_changed(folder / "index.md", f"# The versions, one page each\n\n{text}\n\n{listed}")
    keep_only(folder, ["index.md", *(f"{name}.md" for name in names)])


def make_all(app: Sphinx) -> None:
    """Everything, before the first page is read."""
    made = DOCS / "_made"
    notebooks = make_walkthroughs(DOCS / "learn" / "walkthroughs")
    make_versions(DOCS / "learn" / "versions", notebooks)
    write_changed(made / "where.md", where_it_runs.tables())
    write_changed(made / "versions.md", version_pages.overview())
    write_changed(made / "budget.md", version_pages.as_markdown(budget.__doc__ or ""))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", make_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
