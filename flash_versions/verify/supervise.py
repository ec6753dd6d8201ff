"""Run trials in processes of their own: what hangs is ended and named, and the rest goes on."""

import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from flash_versions.verify.cases import draw

TRIAL = "flash_versions.verify.trial"


class Verdict(NamedTuple):
    """What became of a version.

    Attributes:
        version: its name.
        cases: a row for each case: number, case, outcome and what was found.
        timing: rows with shape, ms and sdpa_ms; none where nothing was timed.
    """

    version: str
    cases: list[dict[str, Any]]
    timing: list[dict[str, Any]]

    @property
    def outcomes(self) -> Counter[str]:
        """How many cases passed, were refused, failed."""
        return Counter(row["outcome"] for row in self.cases)

    @property
    def passed(self) -> bool:
        """Whether no case failed and at least one passed."""
        return not self.outcomes["failed"] and bool(self.outcomes["passed"])


def try_version(
    version: str,
    cases: int,
    small: bool,
    timed: bool,
    limit: float,
    tell: Callable[[str], object],
    trial: str = TRIAL,
    step: Callable[[], object] = lambda: None,
) -> Verdict:
    """Try a version; a process that says nothing for `limit` seconds is ended.

    Args:
        version: its name.
        cases: how many.
        small: cases that are simulated.
        timed: whether to time it, too.
        limit: in seconds.
        tell: is given a sentence about each failure.
        trial: the module that tries.
        step: is called for each case that has ended.
    """
    rows: list[dict[str, Any]] = []
    timing: list[dict[str, Any]] = []
    first = 0
    while True:
        command = [sys.executable, "-m", trial, version, str(first), str(cases)]
        process = subprocess.Popen(
            [*command, str(int(small)), str(int(timed))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun: Any = first
        for found in lines(process, limit):
            if "begins" in found:
                begun = found["begins"]
            elif "number" in found:
                rows.append({"case": str(draw(found["number"], small)), **found})
                step()
                if found["outcome"] == "failed":
                    tell(f"{version}, case {rows[-1]['case']}: {found['why']}")
            elif "timing" in found:
                timing = found["timing"]
            else:
                return Verdict(version, rows, timing)
        why = ended(process, limit)
        case = str(draw(begun, small)) if isinstance(begun, int) else "timing"
        rows.append({"case": case, "number": begun, "outcome": "failed", "why": why})
        step()
        tell(f"{version}, case {case}: {why}")
        if not isinstance(begun, int) or begun + 1 >= cases:
            return Verdict(version, rows, timing)
        first = begun + 1


def lines(process: subprocess.Popen[str], limit: float) -> Any:
    """What a process says, until it ends or says nothing for `limit` seconds."""
    said: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    stdout = process.stdout

    def read() -> None:
        for line in stdout:
            said.put(line)
        said.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = said.get(timeout=limit)
        except queue.Empty:
            return
        if line is None:
            return
        if line.startswith("{"):
            yield json.loads(line)


def ended(process: subprocess.Popen[str], limit: float) -> str:
    """Why a process did not say that it is done; it is ended if it runs."""
    if process.poll() is None:
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"did not end within {limit:g} s"
    _, errors = process.communicate()
    said = (errors or "").strip().splitlines()
    return f"the process ended with {process.returncode}: {said[-1] if said else 'no reason given'}"
