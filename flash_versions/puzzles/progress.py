"""What a learner has solved and which hints were shown, kept in the user's folder."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from flash_versions.files import write


class Progress(NamedTuple):
    """Of all puzzles: what is solved, in this order, and how many hints of each were shown."""

    solved: list[str]
    hints: dict[str, int]


def file() -> Path:
    """Where progress is kept; XDG_STATE_HOME moves it."""
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "flash-versions" / "puzzles.json"


def load() -> Progress:
    """What was kept; ValueError if the file is no progress."""
    if not file().exists():
        return Progress([], {})
    try:
        found = json.loads(file().read_text())
        return Progress(list(found["solved"]), dict(found["hints"]))
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file()} is not as it was written; remove it to begin anew.") from None


def save(progress: Progress) -> None:
    """Keep it: all of it, or what was there before."""
    file().parent.mkdir(parents=True, exist_ok=True)
    write(file(), json.dumps(progress._asdict(), indent=1))
