"""Call a function that launches kernels, watched: its results, or the first fault in a sentence."""

import sys
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flash_versions.simulator import AccessError, CompileError, Deadlock
from flash_versions.simulator.checking import ALLOCATE, ASK, Watch


class Fault(Exception):
    """What is wrong, in a sentence."""


class KernelsOnly(TorchFunctionMode):
    """Inside, the code of a file may allocate with PyTorch and not compute with it.

    Args:
        file: whose calls are looked at; those of Triton and of the check are not.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        name = func.__name__.strip("_")
        if caller.f_code.co_filename == self.file and name not in ALLOCATE | ASK:
            raise Fault(
                f"line {caller.f_lineno}: `{name}` of PyTorch is called; the kernel has to compute"
            )
        return func(*args, **kwargs or {})


def copied(x: Any) -> Any:
    """A copy of a tensor with its storage, so that what lies between its rows is there, too."""
    if not torch.is_tensor(x) or not x.numel():
        return x
    size = x.untyped_storage().nbytes() // x.element_size()
    line = x.detach().as_strided((size,), (1,), 0).clone()
    return line.as_strided(x.shape, x.stride(), x.storage_offset())


def called(
    function: Callable[..., Any], inputs: dict[str, Any], file: str, **options: Any
) -> tuple[Any, Watch]:
    """The results of a function of a file, and what its kernels did.

    Args:
        function: allocates its results with `torch.empty` or the like.
        inputs: by name; their tensors are copied.
        options: of `Watch`.

    Raises:
        Fault: what is wrong.
    """
    given = {name: copied(x) for name, x in inputs.items()}
    watch = Watch({name: x for name, x in given.items() if torch.is_tensor(x)}, **options)
    try:
        with watch.watching(), KernelsOnly(file):
            return function(*given.values()), watch
    except Fault:
        raise
    except Exception as error:
        raise Fault(sentence_of(error, file)) from error


def sentence_of(error: BaseException, file: str) -> str:
    """An error with the line of a file that it came through last."""
    said = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, Deadlock) or said[0].startswith("line "):
        return str(error)
    frames, own = extract_tb(error.__traceback__), Path(file).resolve()
    lines = [x.lineno for x in frames if Path(x.filename).resolve() == own]
    where = f"line {lines[-1]}: " if lines else ""
    kind = "" if isinstance(error, CompileError | AccessError) else f"{type(error).__name__}: "
    return f"{where}{kind}{said[-1]}"
