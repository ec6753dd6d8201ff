"""What the simulator says: errors with the line of the kernel that they come from."""

from typing import NoReturn


class CompileError(Exception):
    """Triton's compiler refuses this kernel."""


class AccessError(Exception):
    """A kernel reads or writes what it must not."""


class Deadlock(RuntimeError):
    """No partition of a program can go on; says which waits where."""


def refuse(what: str) -> NoReturn:
    """Raise what Triton's compiler would."""
    raise CompileError(what)
