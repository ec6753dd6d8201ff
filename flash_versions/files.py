"""Files that are written whole or not at all."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = re.compile(r"\..+\.\d+\.unfinished")


def temporary_of(path: Path) -> Path:
    """The name of a file or a folder while this process writes it."""
    return path.with_name(f".{path.name}.{os.getpid()}.unfinished")


def regular_file(path: Path) -> Path | None:
    """The file that can take the place of `path`, of a link what it leads to; it need not be there.

    None: what is there is a pipe, a device or a folder, which a file must not replace.

    Raises:
        OSError: it is a link that leads back to itself.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return None if path.exists() and not target.is_file() else target


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place, and the permissions of what was there,
    if all goes well, and vanishes if not.

    Of a pipe or a device, itself: its reader waits for what is written to it.
    """
    target = regular_file(path)
    if target is None:
        yield path
        return
    temporary = temporary_of(target)
    try:
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Replace a file completely, or leave it as it is if writing fails."""
    with replacing(path) as file:
        file.write_text(text)
