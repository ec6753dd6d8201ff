"""Whether kernels are interpreted: Triton decides it at its own import, by `TRITON_INTERPRET`.

`enable_without_gpu` therefore has to run before anything imports triton; the package calls it first
of all.
"""

import importlib
import os
import sys
from functools import cache
from typing import Any

import torch

from flash_versions.dispatch.interpreter import absent, faithful

NOTICE = (
    "flash_versions: no GPU found, so the Triton kernels run in Triton's CPU interpreter: "
    "faithful, for reading and testing, not for speed.\n"
)


@cache
def enabled() -> bool:
    """Whether this process interprets Triton kernels, which CPU tensors need.

    Triton's own functions decide when triton is imported, the kernels of this package when the
    package is. The environment may have changed in between, and after.
    """
    if not at_import["interpreted"]:  # nor is there a triton to ask where it is missing
        return False
    from triton.language import cdiv
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(cdiv, InterpretedFunction)


# What the kernels of this package were told, and whether the user still has to be told.
at_import = {"interpreted": False, "unsaid": False}


def enable_without_gpu() -> None:
    """Turn the interpreter on where there is no GPU. The first kernel says so on stderr.

    Too late if triton was imported before: then nothing changes here, and `attention` refuses CPU
    tensors. An explicit TRITON_INTERPRET in the environment is respected. Without triton, the
    kernels can be imported from here on, and refuse to run: see `absent`.
    """
    if absent.triton_missing():
        absent.import_kernels_without_triton()
        return
    turned_on = (
        "TRITON_INTERPRET" not in os.environ
        and "triton" not in sys.modules
        and not torch.cuda.is_available()
    )
    if turned_on:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    at_import["interpreted"] = bool(triton.knobs.runtime.interpret)
    if at_import["interpreted"]:
        faithful.make_faithful()
        if turned_on:
            at_import["unsaid"] = True
            say_at_first_launch()


def say_at_first_launch() -> None:
    """Let the first kernel that is interpreted call `say`."""
    executor: Any = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launch = executor.__call__

    def say_and_launch(self: Any, *arguments: Any, **options: Any) -> Any:
        executor.__call__ = launch
        say()
        return launch(self, *arguments, **options)

    executor.__call__ = say_and_launch


def say() -> None:
    """Say once on stderr that kernels are interpreted, if that is because there is no GPU."""
    if at_import["unsaid"]:
        at_import["unsaid"] = False
        if "--quiet" not in sys.argv[1:]:  # of a command of ours
            sys.stderr.write(NOTICE)
