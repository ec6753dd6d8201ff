"""Answers on their way to a file: safe after every batch, in place only when all are there."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from transformer.files import write_text


class AnswerFile:
    """A file of lines that a killed run leaves half-finished beside its place, and a next one ends.

    Args:
        path: where the finished file goes.
        run: whatever the answers depend on; another run's lines are not mixed with these.

    Attributes:
        lines: the answers so far, in order; an earlier attempt at the same run gave the first ones.

    Raises:
        ValueError: an unfinished file of another run is in the way.
    """

    def __init__(self, path: Path, run: object):
        self.path = path
        self.partial = path.with_name(f".{path.name}.partial")
        self.lines: list[str] = []
        header = sha256(repr(run).encode()).hexdigest() + "\n"
        kept = self.partial.read_text(encoding="utf-8") if self.partial.exists() else header
        if not kept.startswith(header):
            raise ValueError(
                f"{self.partial} holds the answers of an unfinished run with other prompts or"
                " options; repeat its command, delete it, or use another --output"
            )
        # A line that a kill cut off has no end and is answered again. Not splitlines: JSON may hold
        # other characters that it takes for the end of a line.
        self.lines = [f"{line}\n" for line in kept.split("\n")[1:-1]]
        self.partial.write_text(header + "".join(self.lines), encoding="utf-8")

    def add(self, lines: Sequence[str]) -> None:
        """Keep some more answers, each a line with its end."""
        with open(self.partial, "a", encoding="utf-8") as file:
            file.writelines(lines)
        self.lines += lines

    def finish(self) -> None:
        """Put the complete file in its place."""
        write_text(self.path, "".join(self.lines))
        self.partial.unlink()
