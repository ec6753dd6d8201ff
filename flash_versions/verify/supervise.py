"""Run trials in processes of their own: what hangs is ended and named, and the rest goes on."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import Any, NamedTuple

TRIAL = "flash_versions.verify.trial"
Task = tuple[str, int | None]  # a version and the number of a case; None: its timing


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
        """How many cases passed, were refused, failed, were not tried."""
        return Counter(row["outcome"] for row in self.cases)

    @property
    def passed(self) -> bool:
        """Whether no case failed and at least one passed."""
        return not self.outcomes["failed"] and bool(self.outcomes["passed"])


class Trial:
    """A process that tries one task after another."""

    def __init__(self, module: str, small: bool) -> None:
        self.errors = TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(int(small))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.said = SimpleQueue[str]()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Put what the process says into a queue, and "" at its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.put(line)
        self.said.put("")

    def ask(self, task: Task, limit: float) -> dict[str, Any]:
        """What the process finds; a failure if it ends, or says nothing for `limit` seconds."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{json.dumps(task)}\n")
            self.process.stdin.flush()
            if line := self.said.get(timeout=limit):
                return json.loads(line)
            code = self.process.wait()
        except Empty:
            return {"outcome": "failed", "why": f"did not end within {limit:g} s"}
        except OSError:  # it ended before it read the task
            code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines() or ["no reason given"]
        return {"outcome": "failed", "why": f"the process ended with {code}: {said[-1]}"}

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def answers(
    tasks: Iterable[Task],
    workers: int,
    small: bool,
    limit: float,
    seconds: float,
    trial: str = TRIAL,
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Each task with what was found, in the order in which they end. A failure may damage the
    process, so the next task gets another one.

    Args:
        tasks: begun in this order.
        workers: how many processes work at the same time.
        small: cases that are simulated.
        limit: a process that says nothing for so many seconds is ended.
        seconds: later than this no task is begun: it is "not tried".
        trial: the module that tries.
    """
    waiting, found = deque(tasks), SimpleQueue[tuple[Task, dict[str, Any]]]()
    latest, left = time.monotonic() + seconds, len(waiting)

    def work() -> None:
        process: Trial | None = None
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:  # another worker took the last one
                break
            answer: dict[str, Any] = {"outcome": "not tried"}
            if time.monotonic() < latest:
                try:
                    process = process or Trial(trial, small)
                    answer = process.ask(task, limit)
                except (OSError, ValueError) as error:  # it did not start, or said what is no JSON
                    answer = {"outcome": "failed", "why": str(error)}
            if process is not None and answer["outcome"] == "failed":
                process.end()
                process = None
            found.put((task, answer))
        if process is not None:
            process.end()

    for _ in range(min(workers, left)):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(left):
        yield found.get()
