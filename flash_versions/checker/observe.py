"""Call a function that launches kernels, watched: its results, or the first fault in a sentence."""

import ast
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flash_versions.simulator import AccessError, CompileError, Deadlock
from flash_versions.simulator.checking import ALLOCATE, ASK, Watch
from flash_versions.simulator.origins import Birth, Origins, is_kind

SYMBOLS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# What to do about an operation of numbers, as it is said, by how that begins or ends.
ADVICE = {
    "-inf - -inf": "nothing was seen yet there: subtract 0 where the maximum is -inf",
    "0 / 0": "the sum is 0 there: divide by 1 instead",
    "exp": "it overflows: subtract the largest number so far, the maximum, before",
    "log(0)": "no exponential is left: what was subtracted is not the maximum of these scores",
    "log2(0)": "no exponential is left: what was subtracted is not the maximum of these scores",
}


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
    lines = [x.lineno for x in extract_tb(error.__traceback__) if Path(x.filename) == Path(file)]
    where = f"line {lines[-1]}: " if lines else ""
    kind = "" if isinstance(error, CompileError | AccessError) else f"{type(error).__name__}: "
    return f"{where}{kind}{said[-1]}"


def origin_of(run: Callable[[], float], file: str, value: float) -> str | None:
    """Where a NaN or an infinity of a result comes from, or None.

    Args:
        run: computes the element of the result once more.
        value: what it is.
    """
    kind = "NaN" if value != value else str(value)
    births, _ = traced(run, file, kind)
    alone = [x for x in births if not is_kind(kind, traced(run, file, kind, {x})[1])]
    if not births or not (alone or not is_kind(kind, traced(run, file, kind, set(births))[1])):
        return None  # it is written as a number, or handed on as one
    birth, cause = births[(alone or list(births))[0]], ""
    if kind != "inf" and birth.has_inf:
        found = sorted(traced(run, file, "inf")[0].values(), key=lambda x: x.has_infinities)
        cause = "".join(f"; its inf comes from {said_of(x)}" for x in found[:1])
    return f"the {kind} comes from {said_of(birth)}{cause}"


def traced(
    run: Callable[[], float], file: str, kind: str, healed: Collection[Any] = ()
) -> tuple[dict[Any, Birth], float]:
    """The operations that such numbers come from, and the result if those of some were 0."""
    with Origins(file, kind, frozenset(healed)).tracing() as origins:
        result = run()
    return origins.births, result


def said_of(birth: Birth) -> str:
    """An operation, with its operands and what to do about it."""
    where = f"`{birth.text}` in line {birth.line}"
    if birth.function == "load without other":
        if "other=" in birth.text:
            return f"{where}, a load whose `other` is what counts where the mask is false"
        return f"{where}, a load without `other`: where the mask is false, it gives any number"
    if birth.function == "load":
        return (
            f"{where}: {birth.element} is NaN; 0 * NaN is NaN, so what weighs nothing must not be "
            "loaded, or be replaced with tl.where"
        )
    numbers = [f"{x:.4g}" for x in birth.operands if isinstance(x, float | int | np.number)]
    tree: Any = ast.parse(birth.text).body[0]
    tree = tree.value if isinstance(tree, ast.Expr | ast.Assign) else tree
    symbol = SYMBOLS.get(type(getattr(tree, "op", None)))
    name = ast.unparse(tree.func).rpartition(".")[2] if isinstance(tree, ast.Call) else "it"
    if birth.sums:
        said = "a sum of numbers with inf among them"
    elif symbol and len(numbers) == 2:
        said = f"{numbers[0]} {symbol} {numbers[1]}"
    else:
        said = f"{name}({', '.join(numbers)})"
    if birth.kind == "fp16" and "inf" not in said:
        said += ", which overflows in fp16 behind 65504: compute it in fp32"
    advice = [text for begin, text in ADVICE.items() if said.startswith(begin)]
    return f"{where}, which is {said}{''.join(f': {x}' for x in advice[:1])}"
