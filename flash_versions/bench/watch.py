"""Measure in a child process that may hang or crash without taking the results along.

A kernel that deadlocks cannot be stopped from within its process, and one that reads past its
memory leaves the GPU unusable for it. So the child says in a small file, the mark, who is about to
run; if the mark grows old or the child dies, the one that it names is to blame, and the next child
goes on without it. One child serves for everything that goes well: a process per shape would spend
its time on starting and compiling.
"""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 120  # importing torch and starting CUDA, before the first mark
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Loss:
    """Who ended a child: the place that the mark named, and why. `version` None: nobody's fault."""

    place: dict[str, Any]
    version: str | None
    reason: str


class Marker:
    """The file in which a child says what it does. Call it as a `mark` of `measure`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place: dict[str, Any] = {}

    def __call__(self, version: str | None, reason: str | None = None) -> None:
        """Say who is about to run; or, with a reason, why the process is about to end."""
        text = json.dumps({"place": self.place, "version": version, "reason": reason})
        write(self.path, text)

    def read(self) -> Loss | None:
        """What was marked last; None if nothing was."""
        try:
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        return Loss(found["place"], found["version"], found["reason"] or "")

    def age(self) -> float | None:
        """Seconds since the last mark."""
        try:
            return time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return None

    def clear(self) -> None:
        """Nothing is running any more."""
        self.path.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Replace a file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def watched(command: list[str], marker: Marker, timeout: float) -> Loss | int:
    """Run a child until it ends, or until its mark is `timeout` seconds old.

    Returns:
        Its exit code if it ended in order (with 0, or before it marked anything); else the loss.
    """
    marker.clear()
    unmarked_since = time.monotonic()
    child = subprocess.Popen(command)
    try:
        while (code := child.poll()) is None:
            age = marker.age()
            if age is not None:
                unmarked_since = time.monotonic()
            elif time.monotonic() - unmarked_since > START_SECONDS + timeout:
                return Loss({}, None, "the measuring process did not start, or did not end.")
            if age is not None and age > timeout:
                at = marker.read() or Loss({}, None, "")
                return Loss(at.place, at.version, f"did not end within {timeout:g} s")
            time.sleep(POLL_SECONDS)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    last = marker.read()
    if code == 0 or last is None:
        return code
    return Loss(last.place, last.version, last.reason or f"ended the process with code {code}")
