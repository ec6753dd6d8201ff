"""A puzzle: one file of a group's folder, read as text, so that nothing of it runs here.

The file is a solution. Its docstring is the task: a title, then a picture and what is asked. The
lines between `# write: what` and `# end` are the ones that a learner writes. Below CHECK follow the
hints, and what check.py asks for. A learner's file is what is above CHECK without those lines.
"""

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).parent
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


@dataclass(frozen=True)
class Puzzle:
    """What a learner sees of a puzzle: the number from 1, the folder, the name of the file and of
    the function that a learner completes.
    """

    number: int
    group: str
    name: str

    @cached_property
    def text(self) -> str:
        """What the puzzle's file says."""
        return (FOLDER / self.group / f"{self.name}.py").read_text()

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


NAMES = [(group, name) for group, names in ORDER.items() for name in names]
PUZZLES = {name: Puzzle(number, group, name) for number, (group, name) in enumerate(NAMES, 1)}


def find_puzzle(name: str) -> Puzzle:
    """A puzzle by its name or number; ValueError with those that there are."""
    for puzzle in PUZZLES.values():
        if name in (puzzle.name, str(puzzle.number)):
            return puzzle
    raise ValueError(
        f"there is no puzzle {name!r}; give a number from 1 to {len(PUZZLES)}, or a name: "
        f"{', '.join(PUZZLES)}."
    )
