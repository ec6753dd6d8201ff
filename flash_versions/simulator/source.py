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
from flash_versions.simulator.errors import refuse
from flash_versions.simulator.loops import Loop, LoopSite, Returns, Ways, either, test
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


def assigned_names(nodes: Iterable[ast.AST]) -> dict[str, int]:
    """The names that statements bind, and in which lines."""
    walked = (x for node in nodes for x in ast.walk(node))
    return {
        x.id: x.lineno for x in walked if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
    }


def is_constexpr_text(annotation: Any) -> bool:
    """Whether an annotation makes a compile-time constant."""
    text = ast.unparse(annotation) if isinstance(annotation, ast.AST) else str(annotation)
    return "constexpr" in text


class Filler(ast.NodeTransformer):
    """Puts nodes in the places of names; what is made around them has no place in a text yet."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def visit(self, node: ast.AST) -> Any:
        """Fill a node."""
        if isinstance(node, ast.Name) and node.id in self.parts:
            return self.parts[node.id]
        for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            node.__dict__.pop(name, None)
        return self.generic_visit(node)


def made(text: str, **parts: Any) -> list[Any]:
    """Statements as a text has them, in which some names stand for nodes."""
    return Filler(parts).visit(ast.parse(text)).body


def call(function: str, *arguments: Any) -> ast.Call:
    """A call of one of the functions below; arguments are nodes, or constants."""
    nodes: Any = [x if isinstance(x, ast.AST) else ast.Constant(x) for x in arguments]
    return ast.Call(ast.Name(function, ast.Load()), nodes, [])


def left(block: str, names: Iterable[str]) -> list[ast.stmt]:
    """What comes after a step of a loop or a way of an `if`: names have the values that its `Block`
    keeps, or none.
    """
    kept = "".join(
        f"if {x!r} in {block}.values: {x} = {block}.values[{x!r}]\n"
        f"elif {x!r} in locals(): del {x}\n"
        for x in names
    )
    return made(f"{block}.leave(locals())\n{kept}")


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
        new = call("__refuse", what)
        return ast.Expr(new) if isinstance(node, ast.stmt) else new

    def visit(self, node: ast.AST) -> Any:
        """Rewrite a node; new nodes get its place in the text."""
        what = None if node is self.function else refusal(node)
        new = self.refuse(node, what) if what else super().visit(node)
        if hasattr(node, "lineno"):
            for x in new if isinstance(new, list) else [new]:
                if not hasattr(x, "lineno"):
                    ast.copy_location(x, node)
        return new

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:  # noqa: N802, D102
        arguments = node.args  # whose defaults the function gets once it is compiled
        node.decorator_list, arguments.defaults = [], []
        arguments.kw_defaults = [None] * len(arguments.kwonlyargs)
        node.body = self.block(node.body)
        if self.checked:
            node.body = [*made("__returns = __Returns()"), *node.body]
        return node

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite statements up to a return, behind which nothing is compiled."""
        ends = [i for i, x in enumerate(body) if isinstance(x, ast.Return)]
        holder = ast.Module(body[: ends[0] + 1] if ends else body, [])
        return super().generic_visit(holder).body  # type: ignore[attr-defined]

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:  # noqa: N802, D102
        value = ast.BinOp(ast.Name(ast.unparse(node.target), ast.Load()), node.op, node.value)
        return self.generic_visit(ast.Assign([node.target], ast.copy_location(value, node)))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:  # noqa: N802, D102
        if not is_constexpr_text(node.annotation):
            return self.generic_visit(ast.Assign([node.target], node.value))  # type: ignore[arg-type]
        name, value = ast.unparse(node.target), self.visit(node.value)  # type: ignore[arg-type]
        new = made(f"{name} = __constant(VALUE, {name!r})", VALUE=value)
        if self.checked:
            what = f"{name} has a value already, and a compile-time constant gets one only"
            return [*made(f"if {name!r} in locals(): __refuse({what!r})"), *new]
        return new

    def visit_Return(self, node: ast.Return) -> Any:  # noqa: N802, D102
        if self.loops:
            return self.refuse(node, "Triton has no `return` in a loop")
        self.generic_visit(node)
        if not self.checked:
            return node
        value = node.value or ast.Constant(None)
        return made("if __returns.end(VALUE): return __returns.value", VALUE=value)

    def visit_If(self, node: ast.If) -> Any:  # noqa: N802, D102
        test, names = self.visit(node.test), sorted(assigned_names((*node.body, *node.orelse)))
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        if not self.checked:
            node.test = call("__test", test)
            return node
        # Both branches, the one that is not taken first.
        ways = self.name("ways")
        begin, loop = made(
            f"{ways} = __Ways(TEST, {names}, locals())\nfor {ways}_taken in {ways}: pass", TEST=test
        )
        node.test = ast.Name(f"{ways}_taken", ast.Load())
        loop.body = [node, *left(ways, names)]
        return [begin, loop]

    def visit_For(self, node: ast.For | ast.While) -> Any:  # noqa: N802
        """A loop; checked, its first steps are compared, and its own names end with each."""
        site, loop, static = self.name("site"), self.name("loop"), False
        lines, names, steps = assigned_names(node.body), assigned_names([node]), ast.Constant(None)
        copies = {
            ast.unparse(x.targets[0]): x.value.id
            for x in node.body
            if isinstance(x, ast.Assign) and isinstance(x.value, ast.Name)
        }
        if isinstance(node, ast.While):
            node.test = call("__goes_on", ast.Name(loop, ast.Load()), self.visit(node.test))
        else:  # the compiler unrolls a static one
            static = "static_range" in ast.unparse(node.iter)
            lines.pop(ast.unparse(node.target), None)
            steps, node.iter = self.visit(node.iter), ast.Name(loop, ast.Load())
        self.sites[site] = LoopSite(self.function.name, node.lineno, lines, copies, [*names])
        self.loops += not static
        node.body = self.block(node.body)
        self.loops -= not static
        compared = self.checked and not static
        if compared:
            node.body += left(loop, names)
        bound = "locals()" if compared else None
        return [*made(f"{loop} = __Loop(STEPS, {site}, {bound})", STEPS=steps), node]

    visit_While = visit_For  # noqa: N815

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:  # noqa: N802, D102
        first, *rest = map(self.visit, node.values)
        word = "and" if isinstance(node.op, ast.And) else "or"
        for other in rest:
            kept = self.name("value")
            [new] = made(
                f"__combined({kept}, OTHER, {word!r}) if __at_run_time({kept} := FIRST) "
                f"else {kept} {word} OTHER",
                FIRST=first,
                OTHER=other,
            )
            first = new.value
        return first

    def generic_visit(self, node: ast.AST) -> Any:
        """Rewrite what is in a node, and then the node itself."""
        super().generic_visit(node)
        match node:
            case ast.Assign():
                node.value = call("__assigned", node.value)
            case ast.Assert():
                return ast.Expr(call("__assert", node.test, node.msg or "an assert failed"))
            case ast.List():
                return ast.Tuple(node.elts, node.ctx)
            case ast.ListComp(generators=[of]):
                of.iter = call("__tuple", of.iter)
                return call("__tuple", call("list", node))
            case ast.FormattedValue():
                node.value = call("__constant", node.value, "a part of an f-string")
            case ast.Attribute(attr="value"):
                return call("__value", node.value)
            case ast.UnaryOp(op=ast.Not()):
                return call("__not", node.operand)
            case ast.IfExp() if self.checked:
                arms = {"TEST": node.test, "BODY": node.body, "ELSE": node.orelse}
                return made("__either(TEST, lambda: BODY, lambda: ELSE)", **arms)[0].value
            case ast.IfExp():
                node.test = call("__test", node.test)
        return node


# ---------------------------------------------------------------------- what rewritten kernels call
def assigned(x: Any) -> Any:
    """What a name is after an assignment: numbers become ones at run time."""
    if type(x) is Tile:
        return x
    if isinstance(x, bool | int | float | np.generic):
        return to_tensor(x)
    if type(x) is tuple:
        return tuple(map(assigned, x))
    if isinstance(x, str):
        refuse(f"{x!r} needs a name that is annotated with tl.constexpr")
    return x


def constant_of(x: Any, name: str) -> Any:
    """The value of a name that is annotated with tl.constexpr."""
    if isinstance(x, Tile | Pointer):
        refuse(f"{name} is tl.constexpr, and its value is known at run time only")
    return x


def truth(x: Tile) -> Tile:
    """An operand of `and`, `or` and `not`."""
    if x.dtype is not int1:
        refuse(f"and, or, not need a comparison, and this is {described(x)}; write != 0")
    return x


def combined(x: Tile, y: Any, word: str) -> Any:
    """x and y, or x or y, of a tile x."""
    if not isinstance(y, Tile):
        return x if bool(y) == (word == "and") else y
    return truth(x) & truth(y) if word == "and" else truth(x) | truth(y)


def only_tuple(x: Any) -> Any:
    """The elements of a tuple, as a tuple."""
    if not isinstance(x, tuple | list):
        refuse("a list is made of a tuple's elements only")
    return tuple(x)


RUNTIME: dict[str, Any] = {
    "__refuse": refuse, "__assigned": assigned, "__constant": constant_of, "__test": test,
    "__Ways": Ways, "__at_run_time": lambda x: type(x) is Tile, "__combined": combined,
    "__not": lambda x: ~truth(x) if isinstance(x, Tile) else not x,
    "__either": either, "__tuple": only_tuple, "__Returns": Returns,
    "__value": lambda x: getattr(x, "value", x),  # of a compile-time constant, itself
    "__Loop": Loop, "__goes_on": Loop.goes_on, "__assert": language.device_assert,
    "range": language.range, "print": language.device_print, "locals": locals,
    "max": language.builtin_extreme(builtins.max, language.maximum),
    "min": language.builtin_extreme(builtins.min, language.minimum),
    "__builtins__": {name: getattr(builtins, name) for name in ALLOWED},
}  # fmt: skip
