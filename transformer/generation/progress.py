"""Progress of long work on standard error: a bar on a terminal, lines in a log, or nothing."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from transformer.model.kernels.startup import progress_bar


class Progress:
    """How far a command is.

    On a terminal this is tqdm's bar, with the rate and the time left. Elsewhere it is a line for
    each call of `step` that has something to show, without control characters.

    Args:
        quiet: say nothing at all.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._total, self._started = 0, 0.0
        self._before: int | None = None  # steps that were taken before this process began

    def start(self, total: int) -> None:
        """Begin. The first step that is reported may be a later one, of work that goes on."""
        self._total, self._before, self._started = total, None, time.perf_counter()
        self._bar = progress_bar(total, "step", self.quiet)

    def step(
        self, step: int, shown: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> None:
        """A step was taken.

        Args:
            step: how many were taken so far.
            shown: measurements by name; without them, a log gets no line.
            seconds: that all steps took so far, without what was done between them; None: since
                `start`.
        """
        if self.quiet:
            return
        if self._before is None:
            self._before = step - 1
            if self._bar is not None:
                self._bar.initial = self._bar.n = self._before
        if self._bar is not None:
            if shown is not None:
                self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif shown is not None:
            if seconds is None:
                seconds = (time.perf_counter() - self._started) / (step - self._before)
            else:
                seconds /= step
            parts = [f"step {step}/{self._total}", *(f"{x} {y}" for x, y in shown.items())]
            left = tqdm.format_interval(seconds * (self._total - step))
            parts += [f"{seconds:.3g} s/step", f"{left} left"]
            self._write("  ".join(parts))

    def say(self, line: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            self._write(line)

    def close(self) -> None:
        """End the bar; may be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
