"""Loops and branches of a kernel as they run, with what the compiler compares in them."""

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from flash_versions.simulator.dtypes import int32
from flash_versions.simulator.errors import refuse
from flash_versions.simulator.state import here
from flash_versions.simulator.values import (
    Pointer,
    Tile,
    check_known,
    described,
    promoted_integer,
    to_tensor,
)

MOST_STEPS = 250_000  # of one loop: more would take minutes, or never end
MOST_WATCHED = 5_000  # of a kernel that is checked: its inputs are small


class static_range:  # noqa: N801
    """A loop that the compiler unrolls, whose index is a compile-time constant."""

    def __init__(self, *bounds: Any) -> None:
        for x in bounds:
            check_known(x, "a bound of static_range")
        self.range = range(*bounds)


class RunTimeRange:
    """A loop that runs, whose index is a number at run time; options are the compiler's."""

    def __init__(self, *bounds: Any, **options: Any) -> None:
        numbers = [to_tensor(x) for x in bounds]
        for x in numbers:
            if not isinstance(x, Tile) or x.dtype.kind == 2 or x.shape:
                refuse(f"a loop goes from and to whole numbers, and this is {described(x)}")
        kinds = (x.dtype for x in numbers)
        self.kind = functools.reduce(promoted_integer, kinds, int32)
        self.range = range(*(int(x.a) for x in numbers))


def type_of(x: Any) -> Any:
    """What must stay the same of a value that a loop carries from step to step."""
    if isinstance(x, Tile | Pointer):
        return f"{x.type!r}"
    if isinstance(x, tuple):
        return tuple(map(type_of, x))
    if fields := getattr(x, "fields", None):
        return type(x).__name__, *(type_of(getattr(x, name)) for name in fields)
    if isinstance(x, int | float | bool | np.generic):
        return f"the constant {x!r}"
    return type(x).__name__


def test(condition: Any) -> bool:
    """Whether an `if` or a `while` goes on."""
    if isinstance(condition, Tile):
        if condition.shape:
            refuse(
                f"a condition is one number, and this is {described(condition)}; reduce it, or use "
                "tl.where"
            )
        return bool(condition.a)
    if condition is not None and not isinstance(condition, bool | int | Pointer):
        refuse(f"a condition is true or false, and this is {described(condition)}")
    return bool(condition)


class Block:
    """A loop or an `if` that is checked: its names are compared after each step or way.

    Attributes:
        names: those that it binds; before: their values before it.
        values: after a step or a way, the values of those names that are bound behind it.
        is_dry: whether a step or a way is only looked at: it stores nothing and is forgotten.
    """

    def __init__(self, names: Collection[str], bound: dict[str, Any]) -> None:
        self.names = names
        self.before = self.values = {x: value for x, value in bound.items() if x in names}
        self.is_dry = False

    def set_dry(self, dry: bool) -> None:
        """Begin or end what is only looked at. An error leaves it to the launch to end it."""
        self.is_dry = dry
        here.dry += 1 if dry else -1

    def leave(self, bound: dict[str, Any]) -> None:
        """Compare what is bound after a step or a way, and choose what of it stays bound.

        Raises:
            CompileError: a type changes.
        """
        self.compare(bound)
        if self.is_dry:
            self.values = self.before
        else:
            self.values = {x: bound[x] for x in self.names if x in bound and self.keeps(x)}

    compare: Callable[[dict[str, Any]], None]  # refuses what the compiler would

    def keeps(self, name: str) -> bool:
        """Whether a name that has been bound is known behind."""
        return name in self.before


class Ways(Block):
    """The ways that an `if` goes: at run time both, of which the one that is not taken is dry.
    Iterating gives whether the condition holds.
    """

    def __init__(self, condition: Any, names: tuple[str, ...], bound: dict[str, Any]) -> None:
        super().__init__(names, bound)
        self.taken, self.at_run_time = test(condition), type(condition) is Tile
        self.other: dict[str, Any] | None = None  # the types of what the way not taken binds

    def __iter__(self) -> Iterator[bool]:
        if self.at_run_time and here.may_be_dry:
            self.set_dry(True)
            yield not self.taken
            self.set_dry(False)
        yield self.taken

    def compare(self, bound: dict[str, Any]) -> None:
        """See `Block.compare`: with what was bound before, and with the other way."""
        if not self.at_run_time:
            return
        types = {x: type_of(bound[x]) for x in self.names if x in bound}
        for name, old in self.before.items():
            if bound.get(name) is not old and types.get(name) != type_of(old):
                refuse(
                    f"{name} changes its type or shape in one branch of an `if`, from "
                    f"{type_of(old)} to {types.get(name)}; convert it with .to"
                )
        for name, other in (self.other or {}).items():
            if name not in self.before and types.get(name, other) != other:
                refuse(f"{name} is {types[name]} in one branch of an `if` and {other} in the other")
        if self.is_dry:
            self.other = types

    def keeps(self, name: str) -> bool:
        """See `Block.keeps`: what both ways bind, if both were looked at."""
        return self.other is None or name in self.before or name in self.other


def either(condition: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """x if condition else y, where both are compiled: the one that is not chosen is dry."""
    ways = Ways(condition, (), {})
    for taken in ways:
        value = first() if taken else second()
        if ways.is_dry:
            other = to_tensor(value)
        elif ways.at_run_time and here.may_be_dry:
            value = to_tensor(value)
            if type_of(other) != type_of(value):
                refuse(
                    f"the values of this `if ... else` differ: {described(other)}, "
                    f"{described(value)}"
                )
    return value


class Returns:
    """What a function returns, which has one type in all of its branches."""

    def __init__(self) -> None:
        self.dry, self.kind = here.dry, None

    def end(self, value: Any) -> bool:
        """Whether the function ends with this value: not in a branch that is only looked at."""
        kind = type_of(to_tensor(value) if type(value) in (bool, int, float) else value)
        if self.kind not in (None, kind):
            refuse(f"the function returns {kind} here and {self.kind} in another branch")
        self.kind, self.value = kind, value
        return here.dry == self.dry


class LoopSite(NamedTuple):
    """A loop in the text of a kernel.

    Attributes:
        function, line: its place.
        lines: the names that its body assigns, and where.
        copies: of these, those that are plain copies of another name: Triton carries a name only if
            the first visit of the body gives it another value.
        names: these and the loop's index.
    """

    function: str
    line: int
    lines: dict[str, int]
    copies: dict[str, str]
    names: list[str]

    def at(self, name: str) -> str:
        """Where a name is assigned."""
        return f"line {self.lines[name]} of {self.function}: "


class Loop(Block):
    """A loop that runs.

    Attributes:
        checking: whether the types of the first two steps are still to be compared.
    """

    def __init__(self, steps: Any, site: LoopSite, bound: dict[str, Any] | None) -> None:
        if steps is not None and not isinstance(steps, RunTimeRange | static_range):
            refuse("a loop goes over range, tl.range or tl.static_range, and nothing else")
        self.site, self.count = site, 0
        self.steps: Any = steps
        self.checking, self.is_dry = bound is not None, False
        self.most = MOST_STEPS if here.memory is None else MOST_WATCHED
        if bound is not None:
            super().__init__(site.names, bound)
            self.still: dict[str, Any] = {}
            self.seen = 0

    def __iter__(self) -> Iterator[Any]:
        indices: range = self.steps.range
        if isinstance(self.steps, static_range):
            yield from indices
            return
        if len(indices) > self.most:
            refuse(f"this loop has {len(indices)} steps; {self.most} are simulated")
        if len(indices) < 2 and self.checking:
            here.unsure[0] = True
        if not indices and not here.dry and self.checking and here.may_be_dry:
            self.set_dry(True)
        kind = self.steps.kind
        for i in range(1) if here.dry else indices:
            yield Tile(kind.np(i), kind)
        if self.is_dry:
            self.set_dry(False)

    def goes_on(self, condition: Any) -> bool:
        """Whether a `while` goes on; it ends after very many steps, and if it is dry after one."""
        holds = test(condition)
        self.count += 1
        if self.count > self.most:
            refuse(f"this loop does not end within {self.most} steps")
        if self.is_dry:
            self.set_dry(False)
            return False
        if here.dry:
            return self.count == 1
        if self.count == 1 and not holds and self.checking and here.may_be_dry:
            self.set_dry(True)
            return True
        return holds

    def compare(self, bound: dict[str, Any]) -> None:
        """See `Block.compare`; Triton would refuse the loop, or compile it to another one."""
        self.seen += 1
        if self.seen == 2:
            self.checking = False
            for name, source in self.site.copies.items():
                if name in self.still and bound[name] is not self.still[name]:
                    refuse(
                        f"{self.site.at(name)}{name} = {source} also comes before the loop of "
                        f"line {self.site.line}, so Triton would keep that value of {name} in all "
                        f"steps; give {name} a value of its own there, such as {source} + 0"
                    )
        if self.seen > 1:
            return
        for name in filter(self.site.lines.get, self.before):
            old = self.before[name]
            new = bound.get(name, old)
            if new is old:
                self.still[name] = old
                continue
            a, b = type_of(old), type_of(new)
            if str(a).startswith("the constant"):
                refuse(
                    f"{self.site.at(name)}{name} is a compile-time constant and changes in the "
                    f"loop of line {self.site.line}; give another name its value before the loop"
                )
            if a != b:
                refuse(
                    f"{self.site.at(name)}{name} changes its type or shape in the loop of line "
                    f"{self.site.line}, from {a} to {b}; give it the type {b} before the loop, or "
                    "convert it with .to in the loop"
                )
