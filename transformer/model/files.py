"""Files: JSON that is read with one sentence about what is wrong, writing at once or not at all."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if all goes well, and vanishes if not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep a folder, made if it is not there, for this process; a kill of it gives the folder free.

    Raises:
        NotADirectoryError: it is something else.
        ValueError: another process has it.
    """
    made = not folder.exists()
    if made:
        folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a file system without locks cannot tell
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(
                    f"another process is writing to {folder}; wait for it or use another --out"
                ) from error
        yield
    finally:
        os.close(handle)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing what was there at once."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def parse_json(text: str, name: str) -> Any:
    """A JSON value; a ValueError calls the text by its name."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{name} is not valid JSON: it is nested too deeply") from error


def read_json(path: Path, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object from a file; {} for a missing one if that is fine.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file, not UTF-8, not JSON or not an object.
    """
    if not path.exists():
        if missing_ok:
            return {}
        raise FileNotFoundError(f"there is no file {path}")
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; ValueError if it is not a file or not UTF-8."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; it should be a file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
