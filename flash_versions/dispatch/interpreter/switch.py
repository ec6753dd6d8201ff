"""Whether kernels are interpreted: Triton decides it at its own import, by `TRITON_INTERPRET`.

`enable_without_gpu` therefore has to run before anything imports triton; the package calls it first
of all.
"""

import os
import sys
from functools import cache

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


at_import = {"interpreted": False}  # what the kernels of this package were told


def enable_without_gpu() -> None:
    """Turn the interpreter on where there is no GPU, and say so once on stderr.

    Too late if triton was imported before: then nothing changes here, and `attention` refuses CPU
    tensors. An explicit TRITON_INTERPRET in the environment is respected. Without triton, the
    kernels can be imported from here on, and refuse to run: see `absent`.
    """
    if absent.triton_missing():
        absent.import_kernels_without_triton()
        return
    chosen = os.environ.get("TRITON_INTERPRET")
    if chosen is None and "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        if "--quiet" not in sys.argv[1:]:  # a command that imports this has not read it yet
            sys.stderr.write(NOTICE)
    import triton

    at_import["interpreted"] = bool(triton.knobs.runtime.interpret)
    if at_import["interpreted"]:
        faithful.make_faithful()
