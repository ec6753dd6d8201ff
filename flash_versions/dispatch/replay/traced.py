"""Numbers that note what is computed from them, so that it can be computed again of others.

What a call does with its lengths and strides is arithmetic: how many programs there are, how large
a temporary is, which configuration fits. A recording gives the host's code a `Traced` for each of
these numbers. What is computed becomes a line of Python. What is compared becomes a check, because
the host goes another way where the comparison has another result. `range` or a dictionary needs the
number itself: it gets the number, and a check that later calls have the same one.

Equal numbers get one name, and a number that has to be 1 is 1 from there on.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class Line(NamedTuple):
    """A line of a trace: a name and its expression, or without a name what has to be true."""

    name: str | None
    expression: str
    needs: tuple[str, ...]  # names in it


class Trace:
    """What was computed from the numbers of a call, in order.

    Attributes:
        given: the expressions of the call's own numbers, by name.
        lines: noted so far.
        names: of expressions, so that none is computed twice.
        same: by a name, the number or the other name that it is equal to.
        is_open: whether lines are noted. A number that outlives its recording, in a cache, only
            computes.
    """

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.lines: list[Line] = []
        self.names: dict[str, str] = {}
        self.same: dict[str, Any] = {}
        self.is_open = True

    def take(self, value: int, expression: str) -> "Traced":
        """A number of the call."""
        name = f"g{len(self.given)}"
        self.given[name] = expression
        return Traced(value, name, self)

    def number(self, value: Any, expression: str, needs: tuple[str, ...]) -> "Traced":
        """The value of an expression in this call."""
        if (name := self.names.get(expression)) is None:
            name = self.names[expression] = f"n{len(self.lines)}"
            self.lines.append(Line(name, expression, needs))
        return Traced(value, name, self)

    def known(self, x: Any) -> Any:
        """The name, or the number, of an operand."""
        if type(x) is not Traced or x.trace is not self:
            return x.value if type(x) is Traced else x
        name = x.name
        while name in self.same:
            name = self.same[name]
        return name

    def compare(self, symbol: str, a: Any, b: Any, holds: bool) -> None:
        """Note that a < b, or a == b, holds or does not."""
        needs = tuple(x for x in (a, b) if isinstance(x, str))
        shown = {("<", False): ">=", ("==", False): "!="}.get((symbol, holds), symbol)
        text = f"{written(a)} {shown} {written(b)}"
        if a == b or not needs or text in self.names:
            return
        self.names[text] = ""  # of no number
        self.lines.append(Line(None, text, needs))
        if symbol == "==" and holds:
            one, other = (a, b) if isinstance(a, str) else (b, a)
            self.same[one] = other

    def source(self, used: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """What of the given numbers is needed, and the lines that compute what is used, with all
        checks: one that fails returns None. What is used once, in another line, is written there.
        """
        used = [self.known(Traced(None, name, self)) for name in used]
        uses, found = Counter(x for x in used for _ in range(2)), []
        for line in reversed(self.lines):
            if line.name is None or uses[line.name]:
                found.append(line)
                uses.update(line.needs)
        inlined: dict[str, str] = {}
        lines: list[str] = []
        checks: list[str] = []
        for name, expression, _ in reversed(found):
            text = NAME.sub(lambda x: inlined.get(x[0], x[0]), expression)
            if name is None:
                checks.append(text)
            elif uses[name] == 1:
                inlined[name] = text
            else:
                lines += refused(checks)
                checks = []
                lines.append(f"{name} = {text}")
        given = {name: text for name, text in self.given.items() if uses[name]}
        return given, lines + refused(checks)


NAME = re.compile(r"\bn\d+\b")


def refused(checks: list[str]) -> list[str]:
    """The line for checks in a row, if there are any."""
    return [f"if not ({' and '.join(checks)}): return None"] if checks else []


class Traced(torch.SymInt):
    """A number of a call. That it is a `SymInt` lets torch take it for a size without asking for
    its value.

    Attributes:
        value: of this call.
        name: of the variable in the trace.
        trace: where it is noted what is computed.
    """

    def __init__(self, value: Any, name: str, trace: Trace) -> None:
        self.value, self.name, self.trace = value, name, trace

    def pinned(self) -> Any:
        """The number itself; the trace then holds for it alone."""
        compared("==", True, self, self.value)
        return self.value

    def bit_length(self) -> Any:
        """Of an integer."""
        return applied(int.bit_length, "{0}.bit_length()", self)

    def __bool__(self) -> bool:
        return self != 0

    def __format__(self, form: str) -> str:  # in a sentence for people, which decides nothing
        return format(self.value, form)

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__


def pinned(x: Any) -> Any:
    """A number itself; see `Traced.pinned`."""
    return x.pinned() if type(x) is Traced else x


def written(x: Any) -> str:
    """An operand in the source."""
    if isinstance(x, str):
        return x
    return repr(x) if abs(x) != math.inf and x == x else f"float('{x}')"


def noted(*operands: Any) -> tuple[list, Trace | None]:
    """The values of operands, and the trace in which an operation on them is noted, if one is; the
    values are empty if an operand is no number.
    """
    values = [x.value if type(x) is Traced else x for x in operands]
    if not all(isinstance(x, int | float) for x in values):
        return [], None
    traces = [x.trace for x in operands if type(x) is Traced and x.trace.is_open]
    return values, traces[0] if traces else None


def applied(compute: Callable, form: str, *operands: Any) -> Any:
    """The result of an operation on numbers of which one is traced."""
    values, trace = noted(*operands)
    if not values:
        return NotImplemented
    result = compute(*values)
    if trace is None:
        return result
    known = [trace.known(x) for x in operands]
    if not any(isinstance(x, str) for x in known):
        return result
    for i, neutral in NEUTRAL.get(form, ()):
        if type(known[i]) is int and known[i] == neutral:
            return operands[1 - i]
    if form in COMMUTATIVE:
        known.sort(key=written)
    needs = tuple(x for x in known if isinstance(x, str))
    return trace.number(result, form.format(*map(written, known)), needs)


def compared(symbol: str, wanted: bool, *operands: Any) -> Any:
    """Whether a < b, or a == b, is as wanted."""
    values, trace = noted(*operands)
    if not values:
        return NotImplemented
    holds = values[0] < values[1] if symbol == "<" else values[0] == values[1]
    if trace is not None:
        first, second = map(trace.known, operands)
        trace.compare(symbol, first, second, holds)
    return holds == wanted


SUM, PRODUCT = "({0} + {1})", "({0} * {1})"
# Of an operation, (place, what changes no number there).
NEUTRAL: dict[str, tuple] = {SUM: ((0, 0), (1, 0)), PRODUCT: ((0, 1), (1, 1))}
COMMUTATIVE = NEUTRAL.keys()


def define(name: str, compute: Callable, form: str) -> None:
    """Give `Traced` an operation, and its reverse."""
    setattr(Traced, f"__{name}__", lambda *x: applied(compute, form, *x))
    if "{1}" in form:
        setattr(Traced, f"__r{name}__", lambda x, y: applied(compute, form, y, x))


for name, symbol in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%",
                     "truediv": "/", "and": "&", "or": "|", "xor": "^", "lshift": "<<",
                     "rshift": ">>", "pow": "**"}.items():  # fmt: skip
    define(name, getattr(operator, f"__{name}__"), f"({{0}} {symbol} {{1}})")
for name, symbol in {"neg": "-", "pos": "+", "invert": "~"}.items():
    define(name, getattr(operator, name), f"({symbol}{{0}})")
define("abs", abs, "abs({0})")
for name, symbol, wanted, swapped in (("lt", "<", True, False), ("gt", "<", True, True),
                                      ("ge", "<", False, False), ("le", "<", False, True),
                                      ("eq", "==", True, False), ("ne", "==", False, False),
                                      ):  # fmt: skip
    setattr(
        Traced,
        f"__{name}__",
        lambda x, y, symbol=symbol, wanted=wanted, swapped=swapped: (
            compared(symbol, wanted, y, x) if swapped else compared(symbol, wanted, x, y)
        ),
    )
for name, to in {"index": operator.index, "int": int, "float": float, "hash": hash,
                 "round": round, "trunc": math.trunc, "ceil": math.ceil, "floor": math.floor,
                 }.items():  # fmt: skip
    setattr(Traced, f"__{name}__", lambda x, *given, to=to: to(x.pinned(), *given))
