"""A kernel's text as Python that does what Triton's compiler makes of it.

Python and the compiler read a kernel differently: an assigned number is one at run time, `and` and
`not` are operators, both branches of an `if` at run time have to agree about the names they bind, a
loop carries names whose types must not change, and much of Python is refused. `Rewriter` puts calls
of the functions in `RUNTIME` where that matters; lines keep their numbers.
"""

import ast
import builtins
from collections.abc import Iterable
from typing import Any

import numpy as np

from flash_versions.simulator import language
from flash_versions.simulator.dtypes import int1
from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.loops import Loop, LoopSite, Returns, Ways, at_run_time, either, test
from flash_versions.simulator.values import Pointer, Tile, described, to_tensor

ALLOWED = "len", "list", "float", "int", "isinstance", "getattr"
REFUSED = {
    ast.Try: "try", ast.With: "with", ast.Raise: "raise", ast.Delete: "del", ast.Global: "global",
    ast.Nonlocal: "nonlocal", ast.Import: "import", ast.ImportFrom: "import", ast.ClassDef: "class",
    ast.FunctionDef: "a function in a function", ast.AsyncFunctionDef: "async", ast.Match: "match",
    ast.Break: "break", ast.Continue: "continue", ast.Lambda: "lambda", ast.Dict: "a dict",
    ast.Set: "a set", ast.DictComp: "a dict", ast.SetComp: "a set", ast.GeneratorExp: "a generator",
    ast.Yield: "yield", ast.YieldFrom: "yield", ast.Await: "await", ast.NamedExpr: ":=",
}  # fmt: skip
INSTEAD = {
    "break": "; let a `while` ask for it, or mask what is too much",
    "continue": "; put what follows into an `if`",
}
ELEMENTS = "the elements of a tile cannot be assigned; use tl.where or a mask"


def refusal(node: ast.AST) -> str | None:
    """What the compiler has against a node, whatever its values are."""
    if what := REFUSED.get(type(node)):
        return f"Triton has no `{what}`{INSTEAD.get(what, '')}"
    match node:
        case ast.Assign(targets=[_, _, *_]):
            return "Triton assigns to one name at a time; write two lines"
        case ast.Assign(targets=[target]) if has(target, ast.Subscript):
            return ELEMENTS
        case ast.Assign(targets=[target]) if has(target, ast.Attribute):
            return "an attribute cannot be assigned in a kernel"
        case ast.AugAssign(target=ast.Subscript() | ast.Attribute()):
            return ELEMENTS
        case ast.AnnAssign(value=None) | ast.AnnAssign(target=ast.Subscript() | ast.Attribute()):
            return "a declaration needs a value"
        case ast.For(orelse=[_, *_]) | ast.While(orelse=[_, *_]):
            return "Triton has no `else` of a loop"
        case ast.For(target=target) if not isinstance(target, ast.Name):
            return "a loop has one index; range, tl.range or tl.static_range gives it"
        case ast.ListComp(generators=[_, _, *_] | [ast.comprehension(ifs=[_, *_])]):
            return "Triton makes lists of one tuple's elements only"
        case ast.Compare(ops=[_, _, *_]):
            return "a comparison has two operands in Triton; write (a < b) & (b < c)"
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return "Triton has no `in`; compare with =="
    return None


def has(node: ast.AST, kind: type) -> bool:
    """Whether a node of a kind is in another one."""
    return any(isinstance(x, kind) for x in ast.walk(node))


def assigned_names(nodes: Iterable[ast.AST]) -> tuple[str, ...]:
    """The names that statements bind."""
    walked = (x for node in nodes for x in ast.walk(node))
    found = {x.id for x in walked if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return tuple(sorted(found))


def is_constexpr_text(annotation: Any) -> bool:
    """Whether an annotation makes a compile-time constant."""
    text = ast.unparse(annotation) if isinstance(annotation, ast.AST) else str(annotation)
    return "constexpr" in text


def name_of(name: str) -> ast.Name:
    """A name that is read."""
    return ast.Name(name, ast.Load())


def call(function: str, *arguments: Any) -> ast.Call:
    """A call of one of the functions below; arguments are nodes, or constants."""
    nodes: Any = [x if isinstance(x, ast.AST) else ast.Constant(x) for x in arguments]
    return ast.Call(name_of(function), nodes, [])


def assign(name: str, value: ast.expr) -> ast.Assign:
    """A statement that gives a name a value."""
    return ast.Assign([ast.Name(name, ast.Store())], value)


def statements(text: str) -> list[Any]:
    """Parsed statements, which have no place in the kernel's text yet."""
    tree = ast.parse(text)
    for x in ast.walk(tree):
        for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            x.__dict__.pop(name, None)
    return tree.body


def left(block: str, names: Iterable[str]) -> list[ast.stmt]:
    """What comes after a step of a loop or a way of an `if`: names have the values that its `Block`
    keeps, or none.
    """
    kept = "".join(
        f"if {x!r} in {block}.values: {x} = {block}.values[{x!r}]\n"
        f"elif {x!r} in locals(): del {x}\n"
        for x in names
    )
    return statements(f"{block}.leave(locals())\n{kept}")


class Rewriter(ast.NodeTransformer):
    """Rewrites one function.

    Args:
        function: its syntax tree.
        checked: also compare types, as the compiler does when it visits loops and both branches of
            an `if`; without, only what changes values is rewritten.

    Attributes:
        sites: what the rewritten text calls besides `RUNTIME`, by name.
    """

    def __init__(self, function: ast.FunctionDef, checked: bool) -> None:
        self.function, self.checked = function, checked
        self.sites: dict[str, Any] = {}
        self.loops = self.number = 0  # loops: those at run time around a node

    def name(self, kind: str) -> str:
        """A new name."""
        self.number += 1
        return f"__{kind}_{self.number}{'_checked' * self.checked}"

    def refuse(self, node: ast.AST, what: str) -> Any:
        """A call that raises, in the place of a node."""
        made = call("__refuse", what)
        return ast.Expr(made) if isinstance(node, ast.stmt) else made

    def visit(self, node: ast.AST) -> Any:
        """Rewrite a node; new nodes get its place in the text."""
        what = None if node is self.function else refusal(node)
        made = self.refuse(node, what) if what else super().visit(node)
        if hasattr(node, "lineno"):
            for x in made if isinstance(made, list) else [made]:
                if not hasattr(x, "lineno"):
                    ast.copy_location(x, node)
        return made

    # ------------------------------------------------------------------------------- statements
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:  # noqa: N802, D102
        node.decorator_list, node.returns = [], None
        arguments = node.args
        for one in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs):
            one.annotation = None
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [x and ast.Constant(None) for x in arguments.kw_defaults]
        node.body = self.block(node.body)
        if self.checked:
            node.body.insert(0, assign("__returns", call("__Returns")))
        return node

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite statements up to a return, behind which nothing is compiled."""
        made: list[ast.stmt] = []
        for statement in body:
            new = self.visit(statement)
            made += new if isinstance(new, list) else [new]
            if isinstance(statement, ast.Return):
                break
        return made

    def visit_Assign(self, node: ast.Assign) -> Any:  # noqa: N802, D102
        node.value = call("__assigned", self.visit(node.value))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:  # noqa: N802, D102
        name = node.target.id  # type: ignore[union-attr]
        value = ast.BinOp(ast.copy_location(name_of(name), node), node.op, node.value)
        return self.visit(ast.copy_location(assign(name, ast.copy_location(value, node)), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:  # noqa: N802, D102
        name, value = node.target.id, node.value  # type: ignore[union-attr]
        assert value is not None
        if not is_constexpr_text(node.annotation):
            return self.visit(ast.copy_location(assign(name, value), node))
        made = [assign(name, call("__constant", self.visit(value), name))]
        if self.checked:
            what = f"{name} has a value already, and a compile-time constant gets one only"
            return [*statements(f"if {name!r} in locals(): __refuse({what!r})"), *made]
        return made

    def visit_Return(self, node: ast.Return) -> Any:  # noqa: N802, D102
        if self.loops:
            return self.refuse(node, "Triton has no `return` in a loop")
        self.generic_visit(node)
        if not self.checked:
            return node
        [made] = statements("if __returns.end(None): return __returns.value")
        made.test.args = [node.value or ast.Constant(None)]
        return made

    def visit_If(self, node: ast.If) -> Any:  # noqa: N802, D102
        test, names = self.visit(node.test), assigned_names((*node.body, *node.orelse))
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        if not self.checked:
            node.test = call("__test", test)
            return node
        # Both branches, the one that is not taken first.
        ways = self.name("ways")
        node.test = name_of(f"{ways}_taken")
        [loop] = statements(f"for {ways}_taken in {ways}: pass")
        loop.body = [node, *left(ways, names)]
        return [assign(ways, call("__Ways", test, names, call("locals"))), loop]

    def visit_For(self, node: ast.For | ast.While) -> Any:  # noqa: N802
        """A loop; checked, its first steps are compared, and its own names end with each."""
        site, loop, static = self.name("site"), self.name("loop"), False
        self.sites[site] = known = LoopSite(self.function.name, node)
        steps: ast.expr = ast.Constant(None)
        if isinstance(node, ast.While):
            node.test = call("__goes_on", name_of(loop), self.visit(node.test))
        else:  # the compiler unrolls a static one
            static = "static_range" in ast.unparse(node.iter)
            steps, node.iter = self.visit(node.iter), name_of(loop)
        self.loops += not static
        node.body = self.block(node.body)
        self.loops -= not static
        compared = self.checked and not static
        if compared:
            node.body += left(loop, known.names)
        bound = call("locals") if compared else None
        return [assign(loop, call("__Loop", steps, name_of(site), bound)), node]

    visit_While = visit_For  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        return ast.Expr(call("__assert", node.test, node.msg or "an assert failed"))

    # ------------------------------------------------------------------------------ expressions
    def visit_List(self, node: ast.List) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        return ast.Tuple(node.elts, node.ctx)

    def visit_ListComp(self, node: ast.ListComp) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        node.generators[0].iter = call("__tuple", node.generators[0].iter)
        return call("__tuple", call("list", node))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        node.value = call("__constant", node.value, "a part of an f-string")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        return call("__value", node.value) if node.attr == "value" else node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:  # noqa: N802, D102
        first, *rest = map(self.visit, node.values)
        is_and = isinstance(node.op, ast.And)
        for other in rest:
            kept = self.name("value")
            test = call("__at_run_time", ast.NamedExpr(ast.Name(kept, ast.Store()), first))
            plain = ast.BoolOp(node.op, [name_of(kept), other])
            first = ast.IfExp(test, call("__combined", name_of(kept), other, is_and), plain)
        return first

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        return call("__not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        if not self.checked:
            node.test = call("__test", node.test)
            return node
        nothing = ast.arguments([], [], None, [], [], None, [])
        arms = [ast.Lambda(nothing, x) for x in (node.body, node.orelse)]
        return call("__either", node.test, *arms)


# ---------------------------------------------------------------------- what rewritten kernels call
def refuse(what: str) -> None:
    """Raise what the compiler would."""
    raise CompileError(what)


def assigned(x: Any) -> Any:
    """What a name is after an assignment: numbers become ones at run time."""
    if type(x) is Tile:
        return x
    if isinstance(x, bool | int | float | np.generic):
        return to_tensor(x)
    if type(x) is tuple:
        return tuple(map(assigned, x))
    if isinstance(x, str):
        raise CompileError(f"{x!r} needs a name that is annotated with tl.constexpr")
    return x


def constant_of(x: Any, name: str) -> Any:
    """The value of a name that is annotated with tl.constexpr."""
    if isinstance(x, Tile | Pointer):
        raise CompileError(f"{name} is tl.constexpr, and its value is known at run time only")
    return x


def truth(x: Tile) -> Tile:
    """An operand of `and`, `or` and `not`."""
    if x.dtype is not int1:
        raise CompileError(
            f"and, or, not need a comparison, and this is {described(x)}; write != 0"
        )
    return x


def combined(x: Tile, y: Any, is_and: bool) -> Any:
    """x and y, or x or y, of a tile x."""
    if not isinstance(y, Tile):
        return x if bool(y) == is_and else y
    return truth(x) & truth(y) if is_and else truth(x) | truth(y)


def negated(x: Any) -> Any:
    """not x."""
    return ~truth(x) if isinstance(x, Tile) else not x


def value_of(x: Any) -> Any:
    """x.value: of a compile-time constant, itself."""
    return getattr(x, "value", x) if not isinstance(x, int | float | str) else x


def only_tuple(x: Any) -> Any:
    """The elements of a tuple, as a tuple."""
    if not isinstance(x, tuple | list):
        raise CompileError("a list is made of a tuple's elements only")
    return tuple(x)


RUNTIME: dict[str, Any] = {
    "__refuse": refuse, "__assigned": assigned, "__constant": constant_of, "__test": test,
    "__Ways": Ways, "__at_run_time": at_run_time, "__combined": combined, "__not": negated,
    "__either": either, "__value": value_of, "__tuple": only_tuple, "__Returns": Returns,
    "__Loop": Loop, "__goes_on": Loop.goes_on, "__assert": language.device_assert,
    "range": language.range, "print": language.device_print, "locals": locals,
    "max": language.builtin_extreme(builtins.max, language.maximum),
    "min": language.builtin_extreme(builtins.min, language.minimum),
    "__builtins__": {name: getattr(builtins, name) for name in ALLOWED},
}  # fmt: skip
