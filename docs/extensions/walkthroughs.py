"""The first page of the walkthroughs: each one's time, what it needs and what it teaches."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from nbformat import NotebookNode

from flash_versions.puzzles.puzzle import MINUTES, PUZZLES

PAGE_MINUTES = 30  # for the page of the backward
PLANS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))  # needs, goals


class Writing(NamedTuple):
    """What to write after a notebook or a page."""

    link: str
    minutes: int


def puzzles(group: str) -> Writing:
    """The puzzles of a group."""
    numbers = [x.number for x in PUZZLES.values() if x.group == group]
    text = f"[puzzles {numbers[0]} to {numbers[-1]}](../puzzles.md): {group}"
    return Writing(text, MINUTES[group])


BACKWARD = "[the backward](../../understand/backward.md)"
WRITE = {
    "00_start": puzzles("memory"),
    "01_fa1": puzzles("softmax"),
    "02_fa2": puzzles("forward"),
    BACKWARD: puzzles("backward"),
    "03_fa3": puzzles("hopper"),
    "04_fa4": Writing("[an attention of your own](../../extend/add_a_version.md)", 60),
    "05_transformer": Writing("[chats of your own](../../use/your_data.md)", 30),
    "06_grpo": Writing("[a task of your own](../grpo.md#a-task-of-your-own)", 30),
}


SHORT_PATH = (
    "For a first look, three hours: 00, 01 and 02 without their exercises, and five "
    "[puzzles](../puzzles.md): copy, row_sum, row_softmax, online_softmax and fa1."
)


def contents(titles: dict[str, str], times: dict[str, int]) -> str:
    """A table with reading and writing side by side, and minutes for each."""
    lines = ["| read | minutes | then write | minutes |", "| --- | --: | --- | --: |"]
    for name, (link, time) in WRITE.items():
        read = f"[{titles[name]}]({name}.ipynb)" if name in titles else name
        lines.append(f"| {read} | {times.get(name, PAGE_MINUTES)} | {link} | {time} |")
    return "\n".join(lines) + "\n"


def minutes(notebook: NotebookNode) -> int:
    """What a notebook's first cell says of the time that it takes."""
    (said,) = re.findall(r"about (\d+) minutes", notebook.cells[0].source)
    return int(said)


def title(notebook: NotebookNode) -> str:
    """A notebook's heading."""
    text = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return text.splitlines()[0].lstrip("# ")


def page(notebooks: dict[str, NotebookNode]) -> str:
    """The page, as Markdown.

    Args:
        notebooks: by name, in the order of reading.

    Raises:
        KeyError: walkthroughs.toml does not have a notebook.
        ValueError: the first cell of a notebook does not say how many minutes it takes.
    """
    times = {name: minutes(notebook) for name, notebook in notebooks.items()}
    writing = sum(x.minutes for x in WRITE.values())
    made = [
        "# Walkthroughs\n",
        "Each notebook is one step, shown here as it was run. To change something, open it in "
        "Jupyter with `make lab`, or in Colab; no GPU is needed. Read them in this order.\n",
        f"All together take about {round(sum(times.values()) / 60)} hours, with their exercises. "
        f"Writing kernels, data and a task yourself takes about {round(writing / 60)} hours more. "
        f"The times are estimates. {SHORT_PATH} What to write after which notebook:\n",
        contents({name: title(notebook) for name, notebook in notebooks.items()}, times),
    ]
    for name, notebook in notebooks.items():
        number = name.split("_")[0]
        made.append(f"## {number}: [{title(notebook)}]({name}.ipynb)\n")
        needs = PLANS[name]["needs"]
        made.append(f"**About {times[name]} minutes.** What you need: {needs} Afterwards you can\n")
        made.append("".join(f"* {goal}\n" for goal in PLANS[name]["goals"]))
    listed = "\n".join(notebooks)
    made.append(f"```{{toctree}}\n:maxdepth: 1\n:hidden:\n\n{listed}\n```\n")
    return "\n".join(made)
