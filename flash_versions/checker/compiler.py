"""What Triton's compiler says about kernels: the last word, where triton is installed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_versions.dispatch.extras import triton_missing

ARCH = "sm_90"


def refusal(function: Callable[..., Any], inputs: tuple, file: str) -> str | None:
    """Why the kernels that a function of a file launches do not compile for sm_90, with the line,
    or None: they do, or there is no compiler.
    """
    if triton_missing():
        return None
    from triton.errors import TritonError

    from flash_versions.inspect.compiled import compiling

    try:
        with compiling(ARCH):
            function(*inputs)
    except TritonError as error:
        return f"Triton's compiler refuses it for {ARCH}: {sentence_of(error, file)}"
    except Exception as error:  # the compiler fails in many ways
        lines = str(error).strip().splitlines()
        return f"Triton's compiler fails for {ARCH}: {lines[-1] if lines else type(error).__name__}"
    return None


def sentence_of(error: Any, file: str) -> str:
    """A compiler's error in a line: where in the file, and the reason that is innermost."""
    while error.__cause__ is not None and type(error.__cause__) is type(error):
        error = error.__cause__
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    said = lines[-1] if lines else type(error).__name__
    place = re.match(r"at (\d+):", lines[0]) if lines else None
    if place is None:
        return said
    text, number = Path(file).read_text(), int(place[1])
    before, found, _ = text.partition(getattr(error, "src", None) or "\0")
    if not found:  # it is in a function of this package
        return f"line {number} of a function that it calls, {said}"
    number += before.count("\n")
    return f"line {number}, `{text.splitlines()[number - 1].strip()}`: {said}"
