"""What the simulator says: once that there is no GPU, and errors."""

import sys
from typing import NoReturn

import torch

NOTICE = (
    "flash_versions: no GPU found, so kernels are simulated on the CPU: for reading and testing, "
    "not for speed.\n"
)
unsaid = {"notice"}


def say() -> None:
    """Say once on stderr that kernels are simulated, if that is because there is no GPU."""
    if unsaid and not torch.cuda.is_available():
        unsaid.clear()
        if "--quiet" not in sys.argv[1:]:  # of a command of ours
            sys.stderr.write(NOTICE)


class CompileError(Exception):
    """Triton's compiler refuses this kernel."""


class AccessError(Exception):
    """A kernel reads or writes what it must not."""


class Deadlock(RuntimeError):
    """No partition of a program can go on; says which waits where."""


def refuse(what: str) -> NoReturn:
    """Raise what Triton's compiler would."""
    raise CompileError(what)
