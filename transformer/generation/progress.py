"""Progress of long work on standard error: a bar on a terminal, lines in a log, or nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from transformer.model.kernels.startup import progress_bar


@dataclass
class Progress:
    """How far a command is.

    On a terminal this is tqdm's bar, with the rate and the time left. Elsewhere it is a line for
    each call of `step` that has something to show, without control characters.

    Attributes:
        quiet: say nothing at all.
    """

    quiet: bool = False
    _bar: Any = None
    _total: int = 0

    def start(self, total: int) -> None:
        """Begin. The first step that is reported may be a later one, of work that goes on."""
        self._total = total
        self._bar = progress_bar(total, "step", self.quiet)

    def step(self, step: int, shown: Mapping[str, str] | None, seconds: float) -> None:
        """A step was taken.

        Args:
            step: how many were taken so far.
            shown: measurements by name; without them, a log gets no line.
            seconds: that all steps took so far, without what was done between them.
        """
        if self.quiet:
            return
        if self._bar is not None:
            if not self._bar.n:  # steps before this one were taken by another process
                self._bar.initial = self._bar.n = step - 1
            if shown is not None:
                self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif shown is not None:
            seconds /= step
            parts = [f"step {step}/{self._total}", *(f"{x} {y}" for x, y in shown.items())]
            left = tqdm.format_interval(seconds * (self._total - step))
            parts += [f"{seconds:.3g} s/step", f"{left} left"]
            sys.stderr.write("  ".join(parts) + "\n")

    def say(self, line: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")

    def close(self) -> None:
        """End the bar; may be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
