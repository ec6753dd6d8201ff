"""Files: JSON that is read with one sentence about what is wrong, and one writer at a time."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flash_versions import files

try:
    import fcntl
except ImportError:  # Windows: no file is locked there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """`flash_versions.files.replacing`; an error of the system names the file."""
    with files.replacing(path) as temporary, writing(path, temporary):
        yield temporary


@contextmanager
def writing(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Name the file in the OSError that its writing raises, such as that of a full disk. torch and
    safetensors raise errors of their own, from which the system's is taken. The file may have
    another name while it is written.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number, named = _error_number(error), getattr(error, "filename", None)
        if number is None or named not in (None, str(temporary)):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _error_number(error: BaseException | None) -> int | None:
    """What the system said, if it is the reason of an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # as Rust writes it
            return int(found[1])
        error = error.__cause__ or error.__context__
    return None


_locks: set[int] = set()  # open descriptors; a lock lasts until all copies of its own are closed


def _drop_locks() -> None:
    """Close a forked process's copies of the locks: the lock is the parent's and ends with it."""
    for handle in _locks:
        os.close(handle)
    _locks.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_drop_locks)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep a folder, made if it is not there, for this process; a kill of it gives the folder free.
    What a process that was killed had begun to write in it is deleted.

    Raises:
        NotADirectoryError: it is something else.
        ValueError: another process has it.
    """
    made = not folder.exists()
    if made:
        folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
    try:
        with _locked(folder, flags, "--out") as handle:
            for path in folder.iterdir() if handle is not None else ():
                if files.UNFINISHED.fullmatch(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield
    finally:
        if made and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def only_writer_of(file: Path) -> Iterator[None]:
    """Keep a file, made if it is not there, for this process, which may also delete it.

    Raises:
        ValueError: another process has it.
    """
    with _locked(file, os.O_RDWR | os.O_CREAT, "--output") as handle:
        try:
            # It may have been deleted between the opening and the lock.
            if handle is not None and not os.fstat(handle).st_nlink:
                raise ValueError(f"another process has just finished {file}; repeat the command")
            yield
        finally:
            if file.exists() and not file.stat().st_size:
                file.unlink()


@contextmanager
def _locked(path: Path, flags: int, option: str) -> Iterator[int | None]:
    """Open a file or folder and lock it till the end; ValueError if it is locked. Where nothing can
    be locked, it is not opened: None.
    """
    if fcntl is None:
        yield None
        return
    handle = os.open(path, flags, 0o666)
    _locks.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a file system without locks cannot tell
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(
                    f"another process is writing to {path}; wait for it or use another {option}"
                ) from error
        yield handle
    finally:
        _locks.discard(handle)
        os.close(handle)


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


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, see `parse_jsonl` and `read_text`."""
    return parse_jsonl(read_text(path), str(path))


def parse_jsonl(text: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of JSON lines, each with the name of its line for messages; no blank lines. One
    JSON document works as well: a list of objects, or an object over several lines.

    Raises:
        ValueError: a line is no JSON object.
    """
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    lines: Iterable[tuple[str, Any]]
    if isinstance(whole, list):
        lines = ((f"{name}, item {i}", x) for i, x in enumerate(whole, start=1))
    elif isinstance(whole, dict) and "\n" in text.strip():
        lines = [(name, whole)]
    else:
        lines = _parse_lines(text, name)
    for which, line in lines:
        if not isinstance(line, dict):
            raise ValueError(f"{which} must be a JSON object, not {json.dumps(line):.40}")
        yield which, line


def _parse_lines(text: str, name: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        which = f"{name}, line {number}"
        if line.strip() in ("{", "["):
            raise ValueError(
                f"{which} is not valid JSON: it is only the beginning of a value; each line must"
                " hold a whole object, or the file a list of them"
            )
        if line.strip():
            yield which, parse_json(line, which)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without the byte order mark that some editors write; ValueError
    if it is not a file or not UTF-8.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; it should be a file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
