"""Syntax trees as text: in lines of 100 characters, each statement with its comments."""

import ast
import io
import tokenize
from collections.abc import Iterable

WIDTH = 100
INDENT = "    "


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


def function(name: str, parameters: Iterable[str], body: list[ast.stmt], jit: str) -> list[str]:
    """The lines of a function.

    Args:
        name: of the function.
        parameters: with their annotations; constants begin a line of their own.
        body: its statements; their attribute `comments` is what `comments_of` found.
        jit: its decorator.
    """
    parameters = list(parameters)
    values = [x for x in parameters if ":" not in x]
    line = f"def {name}({', '.join(parameters)}):"
    lines = [line]
    if len(line) > WIDTH:
        lines = [f"def {name}(", *filled(values, INDENT, ",")]
        constants = [x for x in parameters if ":" in x]
        lines += [*filled(constants, INDENT, ""), "):"]
    return [f"@{jit}", *lines, *block(body, INDENT)]


def block(body: list[ast.stmt], indent: str) -> list[str]:
    """The lines of statements."""
    lines = []
    for s in body:
        comments = getattr(s, "comments", [])
        lines += [indent + x for x in comments if not x.startswith(" ")]
        behind = "".join(x for x in comments if x.startswith(" "))
        match s:
            case ast.If(test, inner, orelse):
                lines += statement(f"if {as_text(test)}:", indent, behind)
                lines += block(inner, indent + INDENT)
                if orelse:
                    lines += [f"{indent}else:", *block(orelse, indent + INDENT)]
            case ast.For(target, steps, inner) | ast.While(test=target as steps, body=inner):
                head = f"for {as_text(target)} in {as_text(steps)}:"
                if isinstance(s, ast.While):
                    head = f"while {as_text(s.test)}:"
                lines += statement(head, indent, behind)
                lines += block(inner, indent + INDENT)
            case ast.Return(ast.Tuple(items)):
                lines += statement(f"return {', '.join(map(as_text, items))}", indent, behind)
            case _:
                lines += statement(as_text(s), indent, behind)
    return lines


def as_text(node: ast.AST) -> str:
    """A piece of code with the quotes that the project has."""
    return ast.unparse(ast.fix_missing_locations(node)).replace("'", '"')


def statement(text: str, indent: str, behind: str) -> list[str]:
    """The lines of a simple statement or of a head: the arguments of its call are filled where they
    do not fit into one; so is what follows an equals sign.
    """
    if len(indent + text) <= WIDTH:
        line = indent + text + behind
        return [line] if len(line) <= WIDTH else [indent + behind.strip(), indent + text]
    above = [indent + behind.strip()] if behind else []
    opened = text.index("(")
    tail = ")" if text.endswith(")") else text[text.rindex(")") :]
    if not text.endswith((")", "):")):
        left, right = text.split(" = ", 1)
        return [*above, f"{indent}{left} = (", indent + INDENT + right, f"{indent})"]
    inside = text[opened + 1 : len(text) - len(tail)]
    lines = filled(split(inside), indent + INDENT, "")
    return [*above, indent + text[: opened + 1], *lines, indent + tail]


def split(arguments: str) -> list[str]:
    """The arguments of a call, at the commas that are in no brackets."""
    parts, depth, quoted = [""], 0, False
    for sign in arguments:
        quoted ^= sign == '"'
        depth += 0 if quoted else (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return [x.strip() for x in parts]


def filled(items: list[str], indent: str, end: str) -> list[str]:
    """Items in as few lines as they need; `end` follows the last."""
    lines = [indent]
    for number, item in enumerate(items):
        text = item + (end if number == len(items) - 1 else ",")
        gap = "" if lines[-1] == indent else " "
        if len(indent + text) > WIDTH and item.endswith(("]", ")")):
            opened = min(x for x in (item.find("("), item.find("[")) if x >= 0) + 1
            lines[-1:] = [x for x in lines[-1:] if x != indent]
            lines += [indent + item[:opened], *filled(split(item[opened:-1]), indent + INDENT, "")]
            lines.append(indent + text[len(item) - 1 :])
        elif len(lines[-1] + gap + text) > WIDTH and lines[-1] != indent:
            lines.append(indent + text)
        else:
            lines[-1] += gap + text
    return lines if items else []
