"""Values of the partial evaluator, and the arithmetic on them: what is known is computed, the rest
stays code.

Only laws that hold for all integers are used, so a folded kernel computes the same positions and
never touches a floating-point number.
"""

import ast
import copy
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Known:
    """A value that the call fixes; `spread` if it stands for a tensor of equal elements."""

    value: Any
    spread: bool = False


@dataclass(frozen=True)
class Code:
    """An expression that the kernel computes; `spread` as of `Known`."""

    node: ast.expr
    spread: bool = False


@dataclass(frozen=True)
class Record:
    """A named tuple whose fields are taken apart: its class, the fields, and the name that the
    kernel has for it as a whole, if it has one.
    """

    kind: str
    fields: Mapping[str, Any]
    node: ast.expr | None = None


@dataclass(frozen=True)
class Items:
    """A tuple whose items are taken apart."""

    values: list[Any]


@dataclass(frozen=True)
class Global:
    """A module, function or class, and how the source calls it."""

    thing: Any
    text: str


Value = Known | Code | Record | Items | Global
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
NEUTRAL = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.FloorDiv: 1}  # on the right
COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
COMPARE = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
COMPARISONS = dict(zip(COMPARED, COMPARE, strict=True))
# A length in blocks, which is not negative.
BLOCKS = re.compile(r"(q|kv)_length // \w+|tl\.cdiv\((q|kv)_length, \w+\)")
DUAL = {"tl.minimum": "tl.maximum", "tl.maximum": "tl.minimum"}


def named(name: str) -> Code:
    """The code that reads a variable."""
    return Code(ast.Name(name, ast.Load()))


def to_node(value: Value) -> ast.expr:
    """The expression for a value.

    Raises:
        TypeError: a record has no expression of its own.
    """
    match value:
        case Known():
            return ast.Constant(value.value)
        case Code(node) | Record(node=ast.expr() as node):
            return copy.deepcopy(node)
        case Items(values):
            return ast.Tuple([to_node(x) for x in values], ast.Load())
        case Global(text=text):
            return ast.parse(text, mode="eval").body
    raise TypeError(f"the kernel keeps no {value.kind} as a whole.")


def text_of(value: Value | ast.AST) -> str:
    """A value or a piece of code as text."""
    return ast.unparse(value if isinstance(value, ast.AST) else to_node(value))


def integer(value: Value) -> int | None:
    """The value of a known integer, else None."""
    known = isinstance(value, Known) and type(value.value) is int
    return value.value if known else None  # type: ignore[union-attr]


def binary(op: ast.operator, a: Value, b: Value) -> Value:
    """a op b."""
    x, y, kind = integer(a), integer(b), type(op)
    spread = any(isinstance(v, Known | Code) and v.spread for v in (a, b))
    if x is not None and y is not None and kind in ARITHMETIC:
        return Known(ARITHMETIC[kind](x, y), spread)
    for rest, constant in ((a, y), (b, x if kind in (ast.Add, ast.Mult) else None)):
        if constant is not None and constant == NEUTRAL.get(kind):
            return replace(rest, spread=True) if spread and isinstance(rest, Code) else rest
    if (kind is ast.Mult and 0 in (x, y)) or (kind is ast.Mod and y == 1):
        return Known(0, spread=True)
    match op, a:
        case ast.FloorDiv(), Known(0):
            return a
        case ast.Add(), Code(ast.BinOp(left, ast.Sub(), ast.Constant(one))) if y == one:
            return Code(left, a.spread)  # x - 1 + 1
    return Code(ast.BinOp(to_node(a), op, to_node(b)))


def compare(op: ast.cmpop, a: Value, b: Value) -> Value:
    """a op b, also `is None`."""
    if isinstance(op, ast.Is | ast.IsNot):
        return Known((a == Known(None)) == isinstance(op, ast.Is))
    if isinstance(a, Known) and isinstance(b, Known):
        return Known(COMPARISONS[type(op)](a.value, b.value))
    return Code(ast.Compare(to_node(a), [op], [to_node(b)]))


def both(op: ast.boolop, values: list[Value]) -> Value:
    """`and`, `or` of values, where a known one decides or is left out."""
    decides = isinstance(op, ast.Or)
    if any(isinstance(x, Known) and bool(x.value) == decides for x in values):
        return Known(decides)
    rest = [x for x in values if not isinstance(x, Known)]
    if len(rest) < 2:
        return rest[0] if rest else Known(not decides)
    return Code(ast.BoolOp(op, [to_node(x) for x in rest]))


def call(name: str, arguments: list[Value], seen: Mapping[str, ast.expr]) -> Value | None:
    """What tl.minimum, tl.maximum or tl.cdiv returns, if a law says so; `seen` is what variables
    were computed as.
    """
    if name not in ("tl.minimum", "tl.maximum", "tl.cdiv") or len(arguments) != 2:
        return None
    a, b = arguments
    x, y = integer(a), integer(b)
    if name == "tl.cdiv":
        return a if x == 0 or y == 1 else None
    if x is not None and y is not None:
        return Known(min(x, y) if name == "tl.minimum" else max(x, y))
    for one, other in ((a, b), (b, a)):
        node = to_node(other)
        node = seen.get(text_of(node), node)
        if integer(one) == 0 and BLOCKS.fullmatch(text_of(node)):
            return one if name == "tl.minimum" else other
        # The smaller of a and of the larger of a and c is a.
        if isinstance(node, ast.Call) and text_of(node.func) == DUAL[name]:
            if text_of(one) in map(text_of, node.args):
                return one
    return None
