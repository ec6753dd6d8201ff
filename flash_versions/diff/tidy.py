"""What the partial evaluator leaves behind is put in order: results that nothing reads go, what is
read once stands where it is read, and names become short again.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LONGEST = 90  # characters of a statement that takes in another


def tidy(
    body: list[ast.stmt], parameters: set[str], wanted: Mapping[str, str], merged: set[str]
) -> list[ast.stmt]:
    """Put the statements of a function in order.

    Args:
        body: the statements; every variable is called `name@number`.
        parameters: names that are taken from the start.
        wanted: what variables are called if nothing stands in the way; otherwise as before the @.
        merged: variables that may be put where they are read.

    Returns:
        the statements that are left, of the same effect.
    """
    before = None
    while before != (before := [ast.dump(s) for s in body]):
        body = without_dead(body, reads(body))
        for name in merged:
            body = merge(body, name)
    names = short_names(body, parameters, wanted)
    for s in body:
        for node in ast.walk(s):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
    return without_copies(body)


def reads(body: list[ast.stmt] | list[ast.expr]) -> Counter[str]:
    """How often each variable is read."""
    nodes = [x for s in body for x in ast.walk(s) if isinstance(x, ast.Name)]
    return Counter(x.id for x in nodes if isinstance(x.ctx, ast.Load))


def targets(s: ast.stmt) -> list[ast.Name]:
    """The variables that an assignment sets."""
    nodes = ast.walk(s.targets[0]) if isinstance(s, ast.Assign) else []
    return [x for x in nodes if isinstance(x, ast.Name)]


def without_dead(body: list[ast.stmt], read: Counter[str]) -> list[ast.stmt]:
    """The statements without assignments that nothing reads and blocks that do nothing."""
    found = []
    for s in body:
        if isinstance(s, ast.Assign):
            own = reads([s.value])
            for target in targets(s):
                if read[target.id] == own[target.id]:
                    target.id = "_"
            if all(target.id == "_" for target in targets(s)):
                continue
        elif isinstance(s, ast.If | ast.For):
            s.body, s.orelse = without_dead(s.body, read), without_dead(s.orelse, read)
            if not s.body and not s.orelse:
                continue
        found.append(s)
    return found


def merge(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Put a variable's value where it is read: if once, by a statement of the same block, with
    nothing but assignments in between, and if the line stays short.
    """
    if reads(body)[name] != 1:
        return body
    for number, s in enumerate(body):
        if isinstance(s, ast.If | ast.For):
            s.body, s.orelse = merge(s.body, name), merge(s.orelse, name)
        elif isinstance(s, ast.Assign) and [x.id for x in targets(s)] == [name]:
            used = {x.id for x in ast.walk(s.value) if isinstance(x, ast.Name)}
            for later in body[number + 1 :]:
                head = {ast.If: "test", ast.For: "iter"}.get(type(later), "value")
                read = getattr(later, head, None)
                if read is not None and reads([read])[name]:
                    if length(later) + length(ast.Expr(s.value)) > LONGEST:
                        return body
                    setattr(later, head, Put(name, s.value).visit(read))
                    later.comments = [*s.comments, *later.comments]  # type: ignore[attr-defined]
                    return body[:number] + body[number + 1 :]
                if not isinstance(later, ast.Assign) or used & {x.id for x in targets(later)}:
                    return body
    return body


def length(s: ast.stmt) -> int:
    """Characters of a statement's first line, with short names."""
    return len(re.sub(r"@\d+", "", ast.unparse(ast.fix_missing_locations(s)).split("\n")[0]))


class Put(ast.NodeTransformer):
    """Puts an expression in the place of a variable."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression, where the variable is read."""
        return self.value if node.id == self.name and isinstance(node.ctx, ast.Load) else node


@dataclass
class Life:
    """When a variable holds a value that is still read: from the position of the first assignment
    to that of the last read, or the end of a loop that reads what was there before it.
    """

    begin: int
    end: int
    events: list[tuple[int, tuple]] = field(default_factory=list)


Loop = list[int]  # its first position, its last


def events(
    body: list[ast.stmt], clock: list[int], loops: tuple[Loop, ...]
) -> Iterator[tuple[int, ast.Name, tuple[Loop, ...]]]:
    """Every mention of a variable, in order: (position, name, the loops around it). A statement
    reads before it assigns.
    """
    for s in body:
        clock[0] += 1
        loop = [clock[0], clock[0]]
        inner = (*loops, loop) if isinstance(s, ast.For) else loops
        head = s.test if isinstance(s, ast.If) else s.iter if isinstance(s, ast.For) else s
        nodes = [x for x in ast.walk(head) if isinstance(x, ast.Name)]
        for node in sorted(nodes, key=lambda node: isinstance(node.ctx, ast.Store)):
            later = isinstance(node.ctx, ast.Store)
            yield 2 * clock[0] + later, node, loops
        if isinstance(s, ast.For):
            clock[0] += 1
            assert isinstance(s.target, ast.Name)
            yield 2 * clock[0] + 1, s.target, inner
        if isinstance(s, ast.If | ast.For):
            yield from events(s.body, clock, inner)
            yield from events(s.orelse, clock, inner)
            loop[1] = clock[0]


def lives(body: list[ast.stmt], parameters: set[str]) -> dict[str, Life]:
    """The life of each variable, those of the parameters first."""
    found = {name: Life(-1, -1) for name in sorted(parameters)}
    for position, node, loops in list(events(body, [0], ())):
        if "@" in node.id or node.id in parameters:
            found.setdefault(node.id, Life(position, position)).events.append((position, loops))
    for life in found.values():
        for position, loops in life.events:
            ends = [2 * end + 1 for begin, end in loops if life.begin < 2 * begin]
            life.end = max([life.end, position, *ends])
    return found


def short_names(
    body: list[ast.stmt], parameters: set[str], wanted: Mapping[str, str]
) -> dict[str, str]:
    """A name for each variable: variables whose lives do not meet may share one."""
    copies = {}
    for s in (x for top in body for x in ast.walk(top)):
        if isinstance(s, ast.Assign) and isinstance(s.value, ast.Name):
            copies[targets(s)[0].id] = s.value.id
    every = lives(body, parameters)
    taken: dict[str, list[Life]] = {}
    names: dict[str, str] = {}
    for variable, life in sorted(every.items(), key=lambda item: item[1].begin):
        base = variable.partition("@")[0]
        base = wanted.get(variable, base) if variable not in parameters else base
        wishes = [names.get(copies.get(variable, ""), base), base]
        wishes += [f"{base}_{number}" for number in range(1, 100)]
        names[variable] = next(
            x
            for x in wishes
            if all(life.begin > other.end or life.end < other.begin for other in taken.get(x, []))
        )
        taken.setdefault(names[variable], []).append(life)
    return names


def without_copies(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without `x = x`."""
    found = []
    for s in body:
        if isinstance(s, ast.If | ast.For):
            s.body, s.orelse = without_copies(s.body), without_copies(s.orelse)
        is_name = isinstance(s, ast.Assign) and isinstance(s.value, ast.Name)
        if not (is_name and [x.id for x in targets(s)] == [s.value.id]):  # type: ignore
            found.append(s)
    return found
