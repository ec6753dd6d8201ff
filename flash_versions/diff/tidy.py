"""Statements put in order and written as text: results that nothing reads go, what is read once
stands where it is read, names become short again, lines have 100 characters.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

LONGEST = 90  # characters of a statement that takes in another
WIDTH = 100
INDENT = "    "
Block = list[ast.stmt]


def tidy(body: Block, parameters: set[str], wanted: Mapping[str, str], merged: set[str]) -> Block:
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
    for node in mentions(body):
        node.id = names.get(node.id, node.id)
    return without_dead(body, reads(body))


def mentions(body: Iterable[ast.AST]) -> list[ast.Name]:
    """Every mention of a variable."""
    return [x for s in body for x in ast.walk(s) if isinstance(x, ast.Name)]


def reads(body: Iterable[ast.AST]) -> Counter[str]:
    """How often each variable is read."""
    return Counter(x.id for x in mentions(body) if isinstance(x.ctx, ast.Load))


def targets(s: ast.stmt) -> list[ast.Name]:
    """The variables that an assignment sets."""
    return mentions(s.targets) if isinstance(s, ast.Assign) else []


def without_dead(body: Block, read: Counter[str]) -> Block:
    """The statements without assignments that nothing reads, without `x = x`, and without blocks
    that do nothing.
    """
    found = []
    for s in body:
        if isinstance(s, ast.Assign):
            own = reads([s.value])
            for target in targets(s):
                if read[target.id] == own[target.id]:
                    target.id = "_"
            names = [target.id for target in targets(s)]
            if {*names} == {"_"} or (isinstance(s.value, ast.Name) and names == [s.value.id]):
                continue
        elif isinstance(s, ast.If | ast.For):
            s.body, s.orelse = without_dead(s.body, read), without_dead(s.orelse, read)
            if not s.body and not s.orelse:
                continue
        found.append(s)
    return found


def merge(body: Block, name: str) -> Block:
    """Put a variable's value where it is read: if once, by a statement of the same block, with
    nothing but assignments in between, and if the line stays short.
    """
    if reads(body)[name] != 1:
        return body
    for number, s in enumerate(body):
        if isinstance(s, ast.If | ast.For):
            s.body, s.orelse = merge(s.body, name), merge(s.orelse, name)
        elif isinstance(s, ast.Assign) and [x.id for x in targets(s)] == [name]:
            used = {x.id for x in mentions([s.value])}
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
    return len(re.sub(r"@\d+", "", head_of(s)))


class Put(ast.NodeTransformer):
    """Puts an expression in the place of a variable."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression, where the variable is read."""
        return self.value if node.id == self.name else node


# Names: variables whose lives do not meet may share one.


def events(body: Block, start: int = 0) -> Iterator[tuple[int, ast.Name, list[range]]]:
    """Every mention of a variable, in order: (position, name, the loops around it, each as its
    positions). A statement reads before it assigns.
    """
    for s in body:
        head = s.test if isinstance(s, ast.If) else s.iter if isinstance(s, ast.For) else s
        for node in sorted(mentions([head]), key=lambda x: isinstance(x.ctx, ast.Store)):
            yield start + isinstance(node.ctx, ast.Store), node, []
        first, start = start, start + 2
        if isinstance(s, ast.If | ast.For):
            inside = [*events([*s.body, *s.orelse], start + 2)]
            if isinstance(s, ast.For):
                inside.insert(0, (start + 1, s.target, []))  # type: ignore[arg-type]
            start = max((x for x, _, _ in inside), default=start) // 2 * 2 + 2
            for position, node, loops in inside:
                own = [range(first, start)] if isinstance(s, ast.For) else []
                yield position, node, [*own, *loops]


def short_names(body: Block, parameters: set[str], wanted: Mapping[str, str]) -> dict[str, str]:
    """A name for each variable. A variable lives from its first assignment to its last read, or to
    the end of a loop that reads what was there before it.
    """
    lives: dict[str, tuple[int, int]] = dict.fromkeys(sorted(parameters), (-1, -1))
    for position, node, loops in events(body):
        if "@" in node.id or node.id in parameters:
            begin, end = lives.get(node.id, (position, position))
            ends = [loop.stop - 1 for loop in loops if begin < loop.start]
            lives[node.id] = begin, max(end, position, *ends)
    taken: dict[str, list[tuple[int, int]]] = {}
    names: dict[str, str] = {}
    for variable, (begin, end) in sorted(lives.items(), key=lambda item: item[1][0]):
        base = variable.partition("@")[0]
        base = base if variable in parameters else wanted.get(variable, base)
        wishes = [base, *(f"{base}_{number}" for number in range(1, 100))]
        names[variable] = next(
            x for x in wishes if all(begin > b or end < a for a, b in taken.get(x, []))
        )
        taken.setdefault(names[variable], []).append((begin, end))
    return names


# Text


def comments_of(text: str) -> dict[int, list[str]]:
    """The comments of a source text by the line in which their statement begins: those above it,
    and those behind it, which begin with two spaces.
    """
    found: dict[int, list[str]] = {}
    above: list[str] = []
    line = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if "fmt:" not in token.string and line is None:
                above.append(token.string)
            elif "fmt:" not in token.string:
                found.setdefault(line or 0, []).append(f"  {token.string}")
        elif token.type == tokenize.NEWLINE:
            line = None
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and line is None:
            line = token.start[0]
            if above:
                found[line], above = above, []
    return found


def function(name: str, parameters: Iterable[str], body: Block, jit: str) -> list[str]:
    """The lines of a function.

    Args:
        name: of the function.
        parameters: with their annotations; constants begin a line of their own.
        body: its statements; their attribute `comments` is what `comments_of` found.
        jit: its decorator.
    """
    parameters = list(parameters)
    lines = [f"def {name}({', '.join(parameters)}):"]
    if len(lines[0]) > WIDTH:
        values = [f"{x}," for x in parameters if ":" not in x]
        constants = ", ".join(x for x in parameters if ":" in x)
        lines = [f"def {name}(", *filled(" ".join(values), INDENT)]
        lines += [*filled(constants, INDENT), "):"]
    return [f"@{jit}", *lines, *block(body, INDENT)]


def block(body: Block, indent: str) -> list[str]:
    """The lines of statements."""
    lines = []
    for s in body:
        comments = getattr(s, "comments", [])
        lines += [indent + x for x in comments if not x.startswith(" ")]
        behind = "".join(x for x in comments if x.startswith(" "))
        lines += statement(head_of(s), indent, behind)
        if isinstance(s, ast.If | ast.For | ast.While):
            lines += block(s.body, indent + INDENT)
            if s.orelse:
                lines += [f"{indent}else:", *block(s.orelse, indent + INDENT)]
    return lines


def head_of(s: ast.stmt) -> str:
    """The first line of a statement, with the quotes that the project has."""
    if isinstance(s, ast.Return) and isinstance(s.value, ast.Tuple):
        return f"return {', '.join(map(ast.unparse, s.value.elts))}".replace("'", '"')
    text = ast.unparse(ast.fix_missing_locations(s))
    return text.partition("\n")[0].replace("'", '"')


def statement(text: str, indent: str, behind: str) -> list[str]:
    """The lines of a simple statement or of a head: where it does not fit into one, the arguments
    of its call have lines of their own.
    """
    if len(indent + text + behind) <= WIDTH:
        return [indent + text + behind]
    above = [indent + behind.strip()] if behind else []
    if len(indent + text) <= WIDTH:
        return [*above, indent + text]
    opened, closed = text.index("(") + 1, text.rindex(")")
    lines = filled(text[opened:closed], indent + INDENT)
    return [*above, indent + text[:opened], *lines, indent + text[closed:]]


def filled(text: str, indent: str) -> list[str]:
    """Arguments of a call in as few lines as they need; one that is too long for a line has lines
    of its own.
    """
    depth, marked = 0, ""
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        marked += "\n" if sign == " " and depth == 0 and marked.endswith(",") else sign
    lines: list[str] = []
    for item in marked.splitlines():
        if lines and len(f"{lines[-1]} {item}") <= WIDTH:
            lines[-1] += f" {item}"
        elif len(indent + item) <= WIDTH or not (opened := re.search(r"[(\[]", item)):
            lines.append(indent + item)
        else:
            first, last = opened.end(), len(item.rstrip(",")) - 1
            lines += [indent + item[:first], *filled(item[first:last], indent + INDENT)]
            lines.append(indent + item[last:])
    return lines
