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
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A value that the call fixes.

    Attributes:
        value: the value.
        spread: it stands for a tensor in which every element has this value.
    """

    value: Any
    spread: bool = False


@dataclass(frozen=True)
class Code:
    """A value that the kernel computes.

    Attributes:
        node: the expression that computes it.
        spread: it stands for a tensor in which every element has this value.
        width: of a `View`, the elements of a row; None of everything else.
    """

    node: ast.expr
    spread: bool = False
    width: int | None = None


@dataclass(frozen=True)
class Record:
    """A named tuple whose fields are taken apart.

    Attributes:
        kind: its class.
        fields: values by name.
        node: the name that the kernel has for it as a whole; None if it has none.
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
    """A module, function or class that the source names.

    Attributes:
        thing: what it is.
        text: how the source calls it.
    """

    thing: Any
    text: str


Value = Known | Code | Record | Items | Global
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
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
    x, y = integer(a), integer(b)
    if x is not None and y is not None and type(op) in ARITHMETIC:
        return Known(ARITHMETIC[type(op)](x, y), is_spread(a) or is_spread(b))
    match op:
        case ast.Add() if x == 0 or y == 0:
            rest, zero = (b, a) if x == 0 else (a, b)
            if isinstance(rest, Code) and is_spread(zero):
                return Code(rest.node, spread=True)
            return rest
        case ast.Add() if isinstance(a, Code) and y is not None:
            if isinstance(a.node, ast.BinOp) and isinstance(a.node.op, ast.Sub):
                if text_of(a.node.right) == str(y):  # x - 1 + 1
                    return Code(a.node.left, a.spread)
        case ast.Sub() | ast.FloorDiv() if y == (1 if isinstance(op, ast.FloorDiv) else 0):
            return a
        case ast.Mult() if x == 1 or y == 1:
            return b if x == 1 else a
        case ast.Mult() if x == 0 or y == 0:
            return Known(0, spread=True)
        case ast.FloorDiv() if x == 0:
            return a
        case ast.Mod() if y == 1:
            return Known(0, spread=True)
    return Code(ast.BinOp(to_node(a), op, to_node(b)))


def is_spread(value: Value) -> bool:
    """Whether a value stands for a tensor of equal elements."""
    return isinstance(value, Known | Code) and value.spread


def compare(op: ast.cmpop, a: Value, b: Value) -> Value:
    """a op b, also `is None`."""
    if isinstance(op, ast.Is | ast.IsNot):
        return Known((a == Known(None)) == isinstance(op, ast.Is))
    if isinstance(a, Known) and isinstance(b, Known):
        return Known(COMPARISONS[type(op)](a.value, b.value))
    return Code(ast.Compare(to_node(a), [op], [to_node(b)]))


def call(name: str, arguments: list[Value], seen: Mapping[str, ast.expr]) -> Value | None:
    """What a function of Triton returns, if a law says so: of minimum, maximum and cdiv.

    Args:
        name: such as "tl.minimum".
        arguments: of the call.
        seen: what variables were computed as.
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


def both(op: ast.boolop, values: list[Value]) -> Value:
    """`and`, `or` of values, where a known one decides or is left out."""
    decides = isinstance(op, ast.Or)
    rest: list[Value] = []
    for value in values:
        if not isinstance(value, Known):
            rest.append(value)
        elif bool(value.value) == decides:
            return Known(decides)
    if not rest:
        return Known(not decides)
    return rest[0] if len(rest) == 1 else Code(ast.BoolOp(op, [to_node(x) for x in rest]))
