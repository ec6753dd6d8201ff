"""Where numbers come from that are none: the operations whose result has the first NaN, or an
infinity, though no operand has.
"""

import ast
import linecache
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from flash_versions.simulator.launch import OWN
from flash_versions.simulator.values import Pointer, Tile

Place = tuple[int, int, int, int]  # first line and column of an expression, last line and column
KINDS: dict[str, Callable[[Any], Any]] = {"NaN": np.isnan, "inf": np.isposinf, "-inf": np.isneginf}
SUMS = "dot", "sum", "warpgroup_mma", "warpgroup_mma_wait"


class Birth(NamedTuple):
    """An operation whose result has such a number, though no operand has.

    Attributes:
        line, text: its place in the file.
        function: of the simulator, that computes it.
        kind: the type of its result.
        operands: those of the first element that is such a number.
        element: of a tensor, that is loaded there.
    """

    line: int
    text: str
    function: str
    kind: str
    operands: tuple[Any, ...]
    element: str

    def has(self, is_bad: Callable[[Any], Any]) -> bool:
        """Whether an operand is such a number."""
        return any(is_bad(x) for x in self.operands if isinstance(x, float | np.floating))


def traced(
    run: Callable[[], float], file: str, kind: str, healed: Collection[Place] = ()
) -> tuple[dict[Place, Birth], float]:
    """The births in the kernels of a file, and what a function returns that launches them. Each
    tile that is made is looked at, which is slow.

    Args:
        kind: "NaN", "inf" or "-inf".
        healed: places whose births become 0, to see what becomes of the result.
    """
    births, make = dict[Place, Birth](), Tile.__init__

    def made(tile: Tile, a: Any, type: Any) -> None:
        make(tile, a, type)
        if type.kind == 2 and (bad := KINDS[kind](a)).any():
            place = born(births, bad, f"{type}", file, kind)
            if place in healed:
                tile.a = np.where(bad, type.np(0), a)[()]

    Tile.__init__ = made  # type: ignore[method-assign, assignment]
    try:
        return births, run()
    finally:
        Tile.__init__ = make  # type: ignore[method-assign]


def born(births: dict[Place, Birth], bad: Any, type: str, file: str, kind: str) -> Place | None:
    """Note the operation of the kernel that makes a tile; None if an operand is bad already."""
    frame, inner = sys._getframe(2), None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        inner, frame = frame, frame.f_back  # at the end the function that the kernel calls
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or inner is None:
        return None
    code, given = inner.f_code, inner.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = [given[name] for name in names if name in given]
    arguments = [y for x in arguments for y in (x if isinstance(x, tuple) else (x,))]
    operands = [x for x in arguments if isinstance(x, Tile | float | int | Pointer)]
    checked = Tile if kind == "NaN" else (Tile, float)  # nan is one where it is written, too
    numbers = [numbers_of(x) for x in operands if isinstance(x, checked)]
    if any(x.dtype.kind == "f" and KINDS[kind](x).any() for x in numbers):
        if not (kind == "NaN" and code.co_name == "load"):
            return None
    line, last, column, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    place = line or frame.f_lineno, column or 0, last or frame.f_lineno, end or 0
    if place not in births:
        shape = np.shape(bad)
        first = np.unravel_index(int(np.argmax(bad)), shape)
        values = tuple(at(x, first, shape) for x in operands if not isinstance(x, Pointer))
        mask, name, element = given.get("mask"), code.co_name, ""
        if name == "load" and isinstance(mask, Tile) and not at(mask, first, shape):
            name = "load without other"
        if operands and isinstance(operands[0], Pointer):
            memory, offset = operands[0].memory, at(operands[0], first, shape)
            is_named = offset is not None and hasattr(memory, "element")
            element = memory.element(offset) if is_named else memory.name
        births[place] = Birth(place[0], text_of(file, place), name, type, values, element)
    return place


def numbers_of(x: Any) -> np.ndarray:
    """The numbers of an operand; none of a product of Hopper's, which is looked at when it is
    waited for.
    """
    if x.__class__.__name__ == "Product":
        return np.empty(0)
    return np.asarray(x.offset if isinstance(x, Pointer) else getattr(x, "a", x))


def at(x: Any, index: Any, shape: tuple[int, ...]) -> Any:
    """An operand's element that belongs to one of the result; None if it has no such."""
    try:
        return np.broadcast_to(numbers_of(x), shape)[index]
    except ValueError:
        return None


def text_of(file: str, place: Place) -> str:
    """An expression as the file has it, on one line; the whole line if it is not there."""
    line, column, last, end = place
    lines = [linecache.getline(file, i).rstrip("\n") for i in range(line, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    text = " ".join(x.strip() for x in lines)
    try:
        ast.parse(text.strip())
    except SyntaxError:
        return linecache.getline(file, line).strip()
    return text.strip()


# ------------------------------------------------------------------------------- in a sentence
SYMBOLS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# What to do about an operation of numbers, as it is said, by how that begins.
ADVICE: dict[str | tuple[str, ...], str] = {
    "-inf - -inf": "nothing was seen yet there: subtract 0 where the maximum is -inf",
    "0 / 0": "the sum is 0 there: divide by 1 instead",
    "exp": "it overflows: subtract the largest number so far, the maximum, before",
    ("log(0)", "log2(0)"): "no exponential is left: what was subtracted is not the maximum",
}


def origin_of(run: Callable[[], float], file: str, value: float) -> str | None:
    """Where a NaN or an infinity of a result comes from, or None.

    Args:
        run: computes the element of the result once more.
        file: whose lines are named.
        value: what the element is.
    """
    kind = "NaN" if value != value else str(value)
    is_bad = KINDS[kind]
    births, _ = traced(run, file, kind)
    alone = [x for x in births if not is_bad(traced(run, file, kind, {x})[1])]
    if not births or not (alone or not is_bad(traced(run, file, kind, births)[1])):
        return None  # it is written as a number, or handed on as one
    birth, cause = births[(alone or list(births))[0]], ""
    if kind != "inf" and (birth.function in SUMS or birth.has(np.isposinf)):
        found = sorted(traced(run, file, "inf")[0].values(), key=lambda x: x.has(np.isinf))
        cause = "".join(f"; its inf comes from {said_of(x)}" for x in found[:1])
    return f"the {kind} comes from {said_of(birth)}{cause}"


def said_of(birth: Birth) -> str:
    """An operation, with its operands and what to do about it."""
    where = f"`{birth.text}` in line {birth.line}"
    if birth.function == "load without other":
        if "other=" in birth.text:
            return f"{where}, a load whose `other` is what counts where the mask is false"
        return f"{where}, a load without `other`: where the mask is false, it gives any number"
    if birth.function == "load":
        return (
            f"{where}: {birth.element or 'what it loads'} is NaN; 0 * NaN is NaN, so what weighs "
            "nothing must not be loaded, or be replaced with tl.where"
        )
    numbers = [f"{x:.4g}" for x in birth.operands if isinstance(x, float | int | np.number)]
    tree: Any = ast.parse(birth.text).body[0]
    tree = tree.value if isinstance(tree, ast.Expr | ast.Assign) else tree
    symbol = SYMBOLS.get(type(getattr(tree, "op", None)))
    name = ast.unparse(tree.func).rpartition(".")[2] if isinstance(tree, ast.Call) else "it"
    if birth.function in SUMS:
        said = "a sum of numbers with inf among them"
    elif symbol and len(numbers) == 2:
        said = f"{numbers[0]} {symbol} {numbers[1]}"
    else:
        said = f"{name}({', '.join(numbers)})"
    if birth.kind == "fp16" and "inf" not in said:
        said += ", which overflows in fp16 behind 65504: compute it in fp32"
    advice = [text for begin, text in ADVICE.items() if said.startswith(begin)]
    return f"{where}, which is {said}{''.join(f': {x}' for x in advice[:1])}"
