"""Changes of a puzzle's solution, by which other files, wrong and right ones, are written down."""

from textwrap import dedent, indent
from typing import NamedTuple

from flash_versions.puzzles.puzzle import WRITTEN

# A pair (old text, new text), or (number of the region that a learner writes, new lines).
Change = tuple[str, str] | tuple[int, str]


class File(NamedTuple):
    """The solution with changes. `about` says how a right file differs; of a wrong one it is an
    expression that a good sentence matches, in either case, . with line ends, too.
    """

    about: str
    changes: tuple[Change, ...]


def file(about: str, *changes: Change) -> File:
    return File(about, changes)


def changed(solution: str, changes: tuple[Change, ...]) -> str:
    """The solution with changes, in turn; regions are numbered as they are in the solution."""
    for change in changes:
        if isinstance(change[0], int):
            region = list(WRITTEN.finditer(solution))[change[0]]
            body = indent(dedent(change[1]).strip("\n"), region[1])
            new = f"{region[1]}# write: {region[2]}\n{body}\n{region[1]}# end\n"
            solution = solution[: region.start()] + new + solution[region.end() :]
        else:
            if change[0] not in solution:
                raise ValueError(f"the solution has no {change[0]!r}")
            solution = solution.replace(*change)
    return solution
