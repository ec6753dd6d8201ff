"""Loops of a kernel: those that the compiler unrolls, and those that run."""

import ast
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from flash_versions.simulator.dtypes import dtype
from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.state import here
from flash_versions.simulator.values import (
    Pointer,
    Tile,
    TileType,
    described,
    promoted_integer,
    to_tensor,
)

MOST_STEPS = 250_000  # of one loop: more would take minutes, or never end
MOST_WATCHED = 5_000  # of a kernel that is checked: its inputs are small


def most_steps() -> int:
    """Steps that a loop may have."""
    return MOST_STEPS if here.memory is None else MOST_WATCHED


class static_range:  # noqa: N801
    """A loop that the compiler unrolls, whose index is a compile-time constant."""

    def __init__(self, *bounds: Any) -> None:
        for x in bounds:
            if not isinstance(x, int):
                raise CompileError(
                    f"static_range needs what is known when the kernel is compiled, and this is "
                    f"{described(x)}"
                )
        self.range = range(*bounds)

    def __iter__(self) -> Iterator[int]:
        return iter(self.range)


class RunTimeRange:
    """A loop that runs, whose index is a number at run time."""

    def __init__(self, *bounds: Any) -> None:
        numbers = [to_tensor(x) for x in bounds]
        for x in numbers:
            if not isinstance(x, Tile) or x.dtype.kind == 2 or x.shape:
                raise CompileError(
                    f"a loop goes from and to whole numbers, and this is {described(x)}"
                )
        kind = to_tensor(0).dtype
        for x in numbers:
            kind = promoted_integer(kind, x.dtype)
        self.kind, self.range = kind, range(*(int(x.a) for x in numbers))

    def __iter__(self) -> Iterator[Tile]:
        number, kind = self.kind.np, self.kind
        for i in self.range:
            yield Tile(number(i), kind)


@functools.cache
def name_of_type(kind: dtype, shape: tuple[int, ...]) -> str:
    """A tile's type, as Triton prints it."""
    return f"{TileType(kind, shape)!r}"


def type_of(x: Any) -> Any:
    """What must stay the same of a value that a loop carries from step to step."""
    if isinstance(x, Tile):
        return name_of_type(x.dtype, x.shape)
    if isinstance(x, tuple):
        return tuple(map(type_of, x))
    if isinstance(x, Pointer):
        return f"{x.type!r}"
    if fields := getattr(x, "fields", None):
        return type(x).__name__, *(type_of(getattr(x, name)) for name in fields)
    if isinstance(x, int | float | bool | np.generic):
        return f"the constant {x!r}"
    return type(x).__name__


class LoopSite:
    """A loop in the text of a kernel.

    Attributes:
        place: its function and line.
        lines: the names that its body assigns, and where.
        copies: of these, those that are plain copies of another name: Triton carries a name only if
            the first visit of the body gives it another value.
    """

    def __init__(self, function: str, node: ast.For | ast.While) -> None:
        self.function, self.line = function, node.lineno
        index = ast.unparse(node.target) if isinstance(node, ast.For) else ""
        self.lines = {
            x.id: x.lineno
            for x in ast.walk(ast.Module(node.body, []))
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id != index
        }
        self.copies = {
            ast.unparse(x.targets[0]): x.value.id
            for x in node.body
            if isinstance(x, ast.Assign) and isinstance(x.value, ast.Name)
        }

    def at(self, name: str) -> str:
        """Where a name is assigned."""
        return f"line {self.lines[name]} of {self.function}: "


class Loop:
    """A loop that runs.

    Attributes:
        checking: whether the types of the first two steps are still to be compared.
        before: what was bound of the names that its body assigns; bound: all names.
        is_dry: whether the step is only looked at, because there is none.
    """

    def __init__(self, steps: Any, site: LoopSite, checking: bool) -> None:
        if steps is not None and not isinstance(steps, RunTimeRange | static_range):
            raise CompileError(
                "a loop goes over range, tl.range or tl.static_range, and nothing else"
            )
        self.steps, self.site, self.count = steps, site, 0
        self.checking, self.is_dry = checking, False

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.steps, static_range):
            yield from self.steps
        if not isinstance(self.steps, RunTimeRange):
            return
        number = len(self.steps.range)
        if number > (most := most_steps()):
            raise CompileError(f"this loop has {number} steps; {most} are simulated")
        if number < 2 and self.checking:
            here.unsure[0] = True
        if number == 0 and self.checking and here.may_be_dry:
            with self.dry():
                yield Tile(self.steps.kind.np(0), self.steps.kind)
        elif here.is_dry:
            yield Tile(self.steps.kind.np(0), self.steps.kind)
        else:
            yield from self.steps

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Inside, a step stores nothing and is forgotten."""
        outer, self.is_dry, here.is_dry = here.is_dry, True, True
        try:
            yield
        finally:
            self.is_dry, here.is_dry = False, outer

    @staticmethod
    def goes_on(condition: Any, loop: "Loop") -> bool:
        """Whether a `while` goes on; it ends after very many steps, and if it is dry after one."""
        if not isinstance(condition, Tile | bool | int) or (
            isinstance(condition, Tile) and condition.shape
        ):
            raise CompileError(f"`while` needs one number, and this is {described(condition)}")
        loop.count += 1
        if loop.count > (most := most_steps()):
            raise CompileError(f"this loop does not end within {most} steps")
        if here.is_dry:
            if loop.is_dry:
                loop.is_dry = here.is_dry = False
            return loop.count == 1
        if loop.count == 1 and not condition and loop.checking and here.may_be_dry:
            loop.is_dry = here.is_dry = True
            return True
        return bool(condition)

    def enter(self, values: dict[str, Any]) -> None:
        """Note what is known before the first step."""
        self.before = {name: x for name, x in values.items() if name in self.site.lines}
        self.bound = set(values)
        self.still: dict[str, Any] = {}
        self.seen = 0

    def leave(self, values: dict[str, Any]) -> None:
        """Compare what is known after a step.

        Raises:
            CompileError: Triton would refuse the loop, or compile it to another one.
        """
        self.seen += 1
        if self.seen == 2:
            self.checking = False
            for name, source in self.site.copies.items():
                if name in self.still and values[name] is not self.still[name]:
                    raise CompileError(
                        f"{self.site.at(name)}{name} = {source} also comes before the loop of "
                        f"line {self.site.line}, so Triton would keep that value of {name} in all "
                        f"steps; give {name} a value of its own there, such as {source} + 0"
                    )
            return
        for name, old in self.before.items():
            new = values.get(name, old)
            if new is old:
                self.still[name] = old
                continue
            a, b = type_of(old), type_of(new)
            if str(a).startswith("the constant"):
                raise CompileError(
                    f"{self.site.at(name)}{name} is a compile-time constant and changes in the "
                    f"loop of line {self.site.line}; give another name its value before the loop"
                )
            if a != b:
                raise CompileError(
                    f"{self.site.at(name)}{name} changes its type or shape in the loop of line "
                    f"{self.site.line}, from {a} to {b}; give it the type {b} before the loop, or "
                    "convert it with .to in the loop"
                )
