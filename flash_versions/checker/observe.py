"""Call a function that launches kernels: watched in the simulator, or for Triton's compiler, which
has the last word where triton is installed. What is wrong is told in a sentence, with the line.
"""

import re
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from flash_versions.dispatch.extras import triton_missing
from flash_versions.simulator import AccessError, CompileError, Deadlock
from flash_versions.simulator.checking import Watch

ARCH = "sm_90"


class Fault(Exception):
    """What is wrong, in a sentence."""


def copied(x: Any) -> Any:
    """A copy of a tensor with its storage, so that what lies between its rows is there, too."""
    if not torch.is_tensor(x) or not x.numel():
        return x
    size = x.untyped_storage().nbytes() // x.element_size()
    line = x.detach().as_strided((size,), (1,), 0).clone()
    return line.as_strided(x.shape, x.stride(), x.storage_offset())


def called(
    function: Callable[..., Any], inputs: dict[str, Any], file: str, computes: bool, **options: Any
) -> tuple[Any, Watch]:
    """The results of a function of a file, and what its kernels did.

    Args:
        function: allocates its results with `torch.empty` or the like.
        inputs: by name; their tensors are copied.
        computes: whether the file may compute with PyTorch.
        options: of `Watch`.

    Raises:
        Fault: what is wrong.
    """
    given = {name: copied(x) for name, x in inputs.items()}
    tensors = {name: x for name, x in given.items() if torch.is_tensor(x)}
    watch = Watch(tensors, file=None if computes else file, **options)
    try:
        with watch.watching():
            results = function(*given.values())
    except Fault:
        raise
    except Exception as error:
        raise Fault(sentence_of(error, file)) from error
    if not any(x.stores for x in watch.seen.values()) and not computes:
        raise Fault("no kernel stores anything; is one launched?")
    for name, x in watch.inputs.items():
        if not torch.equal(x.nan_to_num(), inputs[name].nan_to_num()):
            raise Fault(f"{name} was changed; inputs must stay as they are")
    return results, watch


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


def refusal(function: Callable[..., Any], inputs: tuple, file: str) -> str | None:
    """Why the kernels that a function of a file launches do not compile for sm_90, with the line,
    or None: they do, or there is no compiler.
    """
    if triton_missing():
        return None
    from triton.errors import TritonError

    from flash_versions.inspect.compiled import compiling, last_line

    try:
        with compiling(ARCH):
            function(*inputs)
    except TritonError as error:
        while error.__cause__ is not None and type(error.__cause__) is type(error):
            error = error.__cause__  # the innermost one
        said = f"{place_of(error, file)}{last_line(error)}"
        return f"Triton's compiler refuses it for {ARCH}: {said}"
    except Exception as error:  # the compiler fails in many ways
        return f"Triton's compiler fails for {ARCH}: {last_line(error)}"
    return None


def place_of(error: Any, file: str) -> str:
    """Where in a file an error of Triton's compiler is, to be put before what it says."""
    place = re.match(r"\s*at (\d+):", str(error))
    if place is None:
        return ""
    text, number = Path(file).read_text("utf-8"), int(place[1])
    before, found, _ = text.partition(getattr(error, "src", None) or "\0")
    if not found:  # it is in a function of this package
        return f"line {number} of a function that it calls, "
    number += before.count("\n")
    return f"line {number}, `{text.splitlines()[number - 1].strip()}`: "
