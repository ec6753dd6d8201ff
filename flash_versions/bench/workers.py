"""Do tasks in processes of their own: what hangs is ended and named, and the rest goes on.

A kernel that deadlocks cannot be stopped from within its process, and one that reads past its
memory leaves the GPU unusable for it. So a process reads tasks, a line of JSON each, and answers
each with another line (`work`). Before that, it may say what it is about to run.
"""

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import Any

START_SECONDS = 90.0  # at most, in which a worker imports what it needs
Task = tuple[Any, ...]  # of what JSON knows
Answer = dict[str, Any]  # a failed task's has the outcome "failed", and why


def reason(error: Exception) -> str:
    """The first line of an error, after its name where it is not one of ours."""
    line = next(iter(str(error).strip().splitlines()), "")
    known = isinstance(error, ValueError | ArithmeticError | MemoryError)
    return line if known and line else f"{type(error).__name__}: {line}"


def tell(answer: Answer) -> None:
    """Say something to the process that asked; {"running": NAME} is not yet the answer. What was
    printed before it may have no end of line.
    """
    print(f"\n{json.dumps(answer)}", flush=True)  # noqa: T201


def work(do: Callable[..., Answer]) -> None:
    """In a worker: answer tasks, the arguments of `do`, until there are no more."""
    tell({"ready": True})
    for line in sys.stdin:
        try:
            answer = do(*json.loads(line))
        except Exception as error:  # reported, as every other outcome
            answer = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
        tell(answer)


class Worker:
    """A process that does one task after another: a module that calls `work`, and arguments."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.errors = TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.said = SimpleQueue[Answer | None]()
        self.is_ready = False
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Put what the process says into a queue, and None at its end; what else is printed in it
        is no JSON.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                with suppress(ValueError):
                    self.said.put(json.loads(line))
        self.said.put(None)

    def ask(self, task: Task, limit: float) -> Answer:
        """The answer to a task; a failure if the process ends, or says nothing for `limit` seconds,
        with what it said last that it is running, if it did.
        """
        assert self.process.stdin is not None
        failure: Answer = {"outcome": "failed"}
        try:
            self.process.stdin.write(f"{json.dumps(task)}\n")
            self.process.stdin.flush()
            most = limit if self.is_ready else max(limit, START_SECONDS)
            while (answer := self.said.get(timeout=most)) is not None:
                self.is_ready, most = True, limit
                if "running" in answer:
                    failure |= answer
                elif "ready" not in answer:
                    return answer
            code = self.process.wait()
        except Empty:
            return failure | {"why": f"did not end within {most:g} s"}
        except OSError:  # it ended before it read the task
            code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines() or ["no reason given"]
        return failure | {"why": f"the process ended with {code}: {said[-1]}"}

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def answers(
    tasks: Iterable[Task], workers: int, command: tuple[str, ...], limit: float, seconds: float
) -> Iterator[tuple[Task, Answer]]:
    """Each task with its answer, in the order in which they end. A failure may damage the process,
    so the next task gets another one.

    Args:
        tasks: begun in this order.
        workers: how many processes work at the same time.
        command: the module of a worker, and its arguments.
        limit: a process that says nothing for so many seconds is ended.
        seconds: later than this no task is begun: its outcome is "not tried".
    """
    waiting, found = deque(tasks), SimpleQueue[tuple[Task, Answer]]()
    latest, left = time.monotonic() + seconds, len(waiting)
    live: set[Worker] = set()

    def serve() -> None:
        worker: Worker | None = None
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:  # another thread took the last one
                break
            answer: Answer = {"outcome": "not tried"}
            if time.monotonic() < latest:
                try:
                    worker = worker or Worker(*command)
                    live.add(worker)
                    answer = worker.ask(task, limit)
                except OSError as error:  # it did not start
                    answer = {"outcome": "failed", "why": str(error)}
            if worker is not None and answer["outcome"] == "failed":
                live.discard(worker)
                worker.end()
                worker = None
            found.put((task, answer))
        if worker is not None:
            live.discard(worker)
            worker.end()

    for _ in range(min(workers, left)):
        threading.Thread(target=serve, daemon=True).start()
    try:
        for _ in range(left):
            yield found.get()
    finally:  # after Ctrl-C, what hangs would run on
        waiting.clear()
        for worker in [*live]:
            worker.process.kill()
