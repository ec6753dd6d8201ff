"""A puzzle: a file, read as text, so that nothing of it runs here.

The first kernels are files of their own, in `kernels`. Such a file is a solution. Its docstring is
the task: a title, then a picture and what is asked. The lines between `# write: what` and `# end`
are the ones that a learner writes. Below CHECK follow the hints, and what check.py asks for.

Later ones are lessons with lines taken out: `of_lessons.toml` has the task, the hints, and which
statements go. A learner's file is always a whole one, that runs when it is filled in.
"""

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import Any

from flash_versions.lessons import code_of

FOLDER = Path(__file__).with_name("kernels")
ORDER = {
    "memory": ("copy", "scale_rows", "transpose", "row_sum"),
    "softmax": ("row_softmax", "online_softmax", "running_average", "fa1"),
    "forward": ("fa2", "causal", "heads", "split_keys", "combine"),
    "backward": ("delta", "dk_dv", "dq", "backward"),
    "hopper": ("ring", "producer", "overlap", "ping_pong", "rescale", "fa3"),
}  # the file of a puzzle has its name
# Of a group, estimated for someone who has read the walkthrough before it.
MINUTES = {"memory": 40, "softmax": 80, "forward": 100, "backward": 100, "hopper": 150}
CHECK = "\n\n# ---- check ----\n"
WRITTEN = re.compile(r"^( *)# write: (.*(?:\n\1# .*)*?)\n(?:.*\n)*?\1# end\n", re.MULTILINE)
WIDTH = 100
OF_LESSONS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("of_lessons.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Puzzle:
    """What a learner sees of a puzzle: the number from 1, the group, the name of the file and of
    the function that a learner completes.
    """

    number: int
    group: str
    name: str

    @cached_property
    def text(self) -> str:
        """What the puzzle's file says."""
        return (FOLDER / f"{self.name}.py").read_text()

    @property
    def solution(self) -> str:
        """A solution, with the marks of what a learner writes."""
        return self.text.partition(CHECK)[0] + "\n"

    @property
    def stub(self) -> str:
        """The file that a learner begins with."""
        return WRITTEN.sub(r"\1# Write here: \2\n\1...\n", self.solution)

    @property
    def task(self) -> str:
        """The title, and what is asked."""
        return ast.get_docstring(ast.parse(self.text)) or ""

    @property
    def title(self) -> str:
        """The first line of the task."""
        return self.task.partition("\n")[0]

    @property
    def hints(self) -> tuple[str, ...]:
        """Each says more than the one before it."""
        return ast.literal_eval(re.findall(r"^HINTS = (\(.*?^\))", self.text, re.M | re.S)[0])


class LessonPuzzle(Puzzle):
    """A lesson with lines taken out."""

    @cached_property
    def text(self) -> str:
        """The task, and the code of the lesson."""
        asked = OF_LESSONS[self.name]
        return f'"""{asked["task"]}"""\n{code_of(asked["lesson"])}'

    @property
    def solution(self) -> str:
        """The lesson's code."""
        return self.text

    @property
    def stub(self) -> str:
        """The same without the lines that a learner writes."""
        stub = self.text
        for taken in OF_LESSONS[self.name]["taken"]:
            stub = without(stub, **taken)
        return stub

    @property
    def hints(self) -> tuple[str, ...]:
        """Each says more than the one before it."""
        return tuple(OF_LESSONS[self.name]["hints"])


def without(source: str, function: str, what: str, first: str = "", last: str = "") -> str:
    """A source in which a comment says what to write in the place of some statements of a function:
    all behind its docstring, or from the one that begins with `first` to the one with `last`.
    """
    lines = source.split("\n")
    [body] = [x.body for x in ast.parse(source).body if getattr(x, "name", "") == function]  # type: ignore[attr-defined]
    begin, end = body[1], body[-1]
    if first:
        begin, end = (
            next(x for x in body if lines[x.lineno - 1].strip().startswith(beginning))
            for beginning in (first, last or first)
        )
    indent = " " * begin.col_offset
    said = fill(f"Write here: {what}", WIDTH - begin.col_offset - 2)
    stub = [*(f"{indent}# {line}" for line in said.split("\n")), f"{indent}..."]
    return "\n".join([*lines[: begin.lineno - 1], *stub, *lines[end.end_lineno :]])


NAMES = [(group, name) for group, names in ORDER.items() for name in names]
PUZZLES = {
    name: (LessonPuzzle if name in OF_LESSONS else Puzzle)(number, group, name)
    for number, (group, name) in enumerate(NAMES, 1)
}


def find_puzzle(name: str) -> Puzzle:
    """A puzzle by its name or number; ValueError with those that there are."""
    for puzzle in PUZZLES.values():
        if name in (puzzle.name, str(puzzle.number)):
            return puzzle
    raise ValueError(
        f"there is no puzzle {name!r}; give a number from 1 to {len(PUZZLES)}, or a name: "
        f"{', '.join(PUZZLES)}."
    )
