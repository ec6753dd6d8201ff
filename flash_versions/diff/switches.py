"""Gluon kernels without the branches that a plain call switches off, and without what only these
used. Their records and helpers stay as they are: this is a view to read, not a kernel to run.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from flash_versions.diff import tidy
from flash_versions.diff.names import IDLE, RETURNED, SWITCHES

UNKNOWN = object()


class Fold(ast.NodeTransformer):
    """Takes the branches that the switches choose.

    Attributes:
        switches: values by the name of a parameter or field.
    """

    def __init__(self, switches: dict[str, Any]) -> None:
        self.switches = switches

    def known(self, e: ast.expr) -> Any:
        """The value of an expression, or UNKNOWN."""
        match e:
            case ast.Constant(value):
                return value
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name)):
                return self.switches.get(name, UNKNOWN)
            case ast.UnaryOp(ast.Not(), operand):
                value = self.known(operand)
                return value if value is UNKNOWN else not value
            case ast.BoolOp(op, values):
                found = [self.known(x) for x in values]
                decides = isinstance(op, ast.Or)
                if any(x is not UNKNOWN and bool(x) == decides for x in found):
                    return decides
                return UNKNOWN if UNKNOWN in found else not decides
            case ast.Compare(left, [op], [right]):
                a, b = self.known(left), self.known(right)
                if UNKNOWN in (a, b) or not isinstance(op, ast.Eq | ast.Gt):
                    return UNKNOWN
                return a == b if isinstance(op, ast.Eq) else a > b
        return UNKNOWN

    def visit_If(self, node: ast.If) -> Any:
        """The branch that is taken, or both."""
        value = self.known(node.test)
        if value is UNKNOWN:
            return self.generic_visit(node)
        return [found for x in (node.body if value else node.orelse) for found in self.each(x)]

    def each(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement's successors."""
        found = self.visit(node)
        return found if isinstance(found, list) else [found] if found else []

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """The value that is taken, or both."""
        value = self.known(node.test)
        if value is UNKNOWN:
            return self.generic_visit(node)
        return self.visit(node.body if value else node.orelse)

    def visit_Expr(self, node: ast.Expr) -> Any:
        """Nothing of a docstring, nor of a call that does nothing."""
        if isinstance(node.value, ast.Constant):
            return None
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in IDLE:
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Nothing of `x = f(x)` where f returns x."""
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in RETURNED:
            return None
        return self.generic_visit(node)


Definition = ast.FunctionDef | ast.ClassDef


def switched(module_name: str, kernels: tuple[str, ...], causal: bool = True) -> dict[str, str]:
    """The text of each definition that kernels of a module use there, by name.

    Args:
        module_name: such as "flash_versions.versions.fa3.hopper.forward".
        kernels: the functions to begin with.
        causal: whether the call is.
    """
    text = inspect.getsource(importlib.import_module(module_name))
    comments = tidy.comments_of(text)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            node.comments = comments.get(node.lineno, [])  # type: ignore[attr-defined]
    fold = Fold({**SWITCHES, "RIGHT": causal})
    found = {x.name: fold.visit(x) for x in tree.body if isinstance(x, Definition)}
    before = -1
    while before != (before := sum(len(ast.unparse(x)) for x in found.values())):
        found = used(found, kernels)
        for definition in list(found.values()):
            without_unused(definition, found, is_kernel=definition.name in kernels)
    return {name: "\n".join(lines(x)) for name, x in found.items()}


def used(found: dict[str, Definition], kernels: tuple[str, ...]) -> dict[str, Definition]:
    """The definitions that kernels need, in their order."""
    needed: set[str] = set()
    pending = list(kernels)
    while pending:
        name = pending.pop()
        if name in found and name not in needed:
            needed.add(name)
            pending += [x.id for x in ast.walk(found[name]) if isinstance(x, ast.Name)]
            pending += [x.attr for x in ast.walk(found[name]) if isinstance(x, ast.Attribute)]
    return {name: x for name, x in found.items() if name in needed}


def without_unused(node: Definition, found: dict[str, Definition], is_kernel: bool) -> None:
    """Take from a definition the parameters, fields and results that nothing reads, and the
    arguments for them from its calls. A kernel is called from outside.
    """
    if isinstance(node, ast.ClassDef):
        attributes = {
            x.attr for d in found.values() for x in ast.walk(d) if isinstance(x, ast.Attribute)
        }
        fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
        unused = [i for i, x in enumerate(fields) if ast.unparse(x.target) not in attributes]
        node.body = [x for x in node.body if x not in [fields[i] for i in unused]]
        methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
        node.body = [x for x in node.body if x not in methods or x.name in attributes]
    else:
        read = tidy.reads(node.body)
        node.body = [
            x
            for x in tidy.without_dead(node.body, read)
            if not (isinstance(x, ast.AnnAssign) and not read[ast.unparse(x.target)])
        ]
        given = node.args.args
        unused = [i for i, x in enumerate(given) if not tidy.reads(node.body)[x.arg]]
        node.args.args = [x for i, x in enumerate(given) if i not in unused]
        unused = [] if is_kernel else unused
    for arguments in calls_of(node.name, found):
        arguments[:] = [x for i, x in enumerate(arguments) if i not in unused]


def calls_of(name: str, found: dict[str, Definition]) -> Iterator[list[ast.expr]]:
    """The arguments of each call of a function, also of those that partitions begin with:
    `(function, (argument, ...))`.
    """
    for node in (x for d in found.values() for x in ast.walk(d)):
        match node:
            case ast.Call(func=ast.Name(id=called), args=arguments) if called == name:
                yield arguments
            case ast.Tuple([ast.Name(id=called), ast.Tuple(arguments)]) if called == name:
                yield arguments


def lines(node: Definition) -> list[str]:
    """The lines of a definition."""
    decorator = ast.unparse(node.decorator_list[0])
    if isinstance(node, ast.FunctionDef):
        return tidy.function(
            node.name, map(ast.unparse, node.args.args), node.body, decorator.split("(")[0]
        )
    fields = [x for x in node.body if not isinstance(x, ast.FunctionDef)]
    made = [f"@{decorator}", f"class {node.name}:", *tidy.block(fields, tidy.INDENT)]
    for method in (x for x in node.body if isinstance(x, ast.FunctionDef)):
        made += ["", *(f"{tidy.INDENT}{line}" for line in lines(method))]
    return made
