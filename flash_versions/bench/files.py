"""Write files that another process reads, and mark which competitor is running."""

import faulthandler
import json
from pathlib import Path
from typing import Any

from flash_versions.files import replacing


def write(path: Path, text: str) -> None:
    """Replace a file completely, or leave it as it is if writing fails."""
    with replacing(path) as file:
        file.write_text(text)


class Mark:
    """A small file that says which competitor is about to run. Call it as a `mark` of `measure`.

    A kernel that deadlocks cannot be stopped from within its process, and one that reads past its
    memory leaves the GPU unusable for it. So each mark arms a watchdog that ends the process if no
    other mark follows in time; the parent process reads which competitor was the last, records it
    as lost, and starts a process that goes on without it.
    """

    def __init__(self, path: Path, seconds: float = 0.0) -> None:
        self.path, self.seconds = path, seconds  # 0: no watchdog
        self.place: dict[str, Any] = {}

    def __call__(self, version: str | None, reason: str | None = None) -> None:
        """Say what is about to run; or, with a reason, why the process is about to end."""
        reason = reason or f"did not end within {self.seconds:g} s, or ended the process"
        found = {"place": self.place, "version": version, "reason": reason}
        write(self.path, json.dumps(found))
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, exit=True)

    def read(self) -> dict[str, Any] | None:
        """What was marked last: place, version (None: no competitor's fault) and reason."""
        return json.loads(self.path.read_text()) if self.path.exists() else None

    def clear(self) -> None:
        """Remove the mark: nothing is running."""
        faulthandler.cancel_dump_traceback_later()
        self.path.unlink(missing_ok=True)
