"""Optional packages: which are missing, the command that installs them, and tqdm's bar."""

import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any, TextIO

WITH_TRITON = (
    "pip install triton"
    if sys.platform == "linux"
    else f"it has no wheels for {sys.platform}, so use Linux, WSL, a container or Colab"
)


@cache
def triton_missing() -> str:
    """One sentence that says that Triton's compiler is not installed; "" if it is."""
    if find_spec("triton"):
        return ""
    return f"this needs Triton's compiler, and triton is not installed: {WITH_TRITON}."


def missing(extra: str, *packages: str) -> str:
    """One sentence that names the packages of an extra that are not installed; "" if all are."""
    names = [package for package in packages if find_spec(package) is None]
    if not names:
        return ""
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed; "
        f"pip install 'flash-versions[{extra}]' does that."
    )


def progress_bar(total: int, unit: str, quiet: bool = False) -> Any:
    """tqdm's bar on standard error, with the rate and the time left. None if it is not wanted, on
    no terminal, or without tqdm: lines take its place.
    """
    if quiet or find_spec("tqdm") is None or not has_a_bar(sys.stderr):
        return None
    from tqdm import tqdm

    return tqdm(total=total, desc=unit, unit=unit, file=sys.stderr, dynamic_ncols=True)


def has_a_bar(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which tqdm shows a bar: it shows none where the size is
    said to be 0, as in a container that a script started with a terminal.
    """
    try:
        return stream.isatty() and 0 not in os.get_terminal_size(stream.fileno())
    except OSError:  # a terminal that cannot be asked
        return True
