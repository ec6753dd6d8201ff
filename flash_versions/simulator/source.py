"""A kernel's text as Python that does what Triton's compiler makes of it.

Python and the compiler read a kernel differently: an assigned number is one at run time, `and` and
`not` are operators, both branches of an `if` at run time have to agree about the names they bind, a
loop carries names whose types must not change, and much of Python is refused. `Rewriter` puts calls
of the functions in `RUNTIME` where that matters; lines keep their numbers.
"""

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.language import builtin_extreme, device_print, maximum, minimum
from flash_versions.simulator.language import range as run_time_range
from flash_versions.simulator.loops import Loop, LoopSite, type_of
from flash_versions.simulator.state import here
from flash_versions.simulator.values import (
    Pointer,
    Tile,
    constant,
    described,
    int1,
    to_tensor,
    type_of_number,
)

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


def assigned_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that statements bind."""
    return {
        x.id
        for node in nodes
        for x in ast.walk(node)
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
    }


def is_static(loop: ast.For | ast.While) -> bool:
    """Whether the compiler unrolls a loop."""
    return isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)


def is_constexpr_text(annotation: Any) -> bool:
    """Whether an annotation makes a compile-time constant."""
    return "constexpr" in (
        ast.unparse(annotation) if isinstance(annotation, ast.AST) else str(annotation)
    )


def call(function: str, *arguments: Any) -> ast.Call:
    """A call of one of the functions below; arguments are nodes, or constants."""
    nodes: Any = [x if isinstance(x, ast.AST) else ast.Constant(x) for x in arguments]
    return ast.Call(ast.Name(function, ast.Load()), nodes, [])


def name_of(name: str, store: bool = False) -> ast.Name:
    """A name, loaded or stored."""
    return ast.Name(name, ast.Store() if store else ast.Load())


def statements(text: str) -> list[ast.stmt]:
    """Parsed statements, which have no place in the kernel's text yet."""
    tree = ast.parse(text)
    for x in ast.walk(tree):
        for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            x.__dict__.pop(name, None)
    return tree.body


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
        self.returns = sum(isinstance(x, ast.Return) for x in ast.walk(function))
        self.ways: list[str] = []  # of the ifs around a node

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
        if (what := REFUSED.get(type(node))) and node is not self.function:
            made = self.refuse(node, f"Triton has no `{what}`{INSTEAD.get(what, '')}")
        else:
            made = super().visit(node)
        if hasattr(node, "lineno"):
            found = made if isinstance(made, list) else [made]
            left = [x for x in found if isinstance(x, ast.AST)]
            while left:  # what has a place is done, but for what this visit has put into it
                one = left.pop()
                new = isinstance(one, ast.expr | ast.stmt) and not hasattr(one, "lineno")
                if new:
                    ast.copy_location(one, node)
                if new or one is node or one in found or not hasattr(one, "lineno"):
                    left += ast.iter_child_nodes(one)
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
            node.body = [*statements("__returns = []"), *node.body]
            for x in node.body[0], *ast.walk(node.body[0]):
                ast.copy_location(x, node)
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
        if len(node.targets) != 1:
            return self.refuse(node, "Triton assigns to one name at a time; write two lines")
        for one in ast.walk(node.targets[0]):
            if isinstance(one, ast.Subscript):
                return self.refuse(
                    node, "the elements of a tile cannot be assigned; use tl.where or a mask"
                )
            if isinstance(one, ast.Attribute):
                return self.refuse(node, "an attribute cannot be assigned in a kernel")
        node.value = call("__assigned", self.visit(node.value))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:  # noqa: N802, D102
        if not isinstance(node.target, ast.Name):
            return self.refuse(
                node, "the elements of a tile cannot be assigned; use tl.where or a mask"
            )
        left = ast.copy_location(name_of(node.target.id), node)
        value = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
        return self.visit(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:  # noqa: N802, D102
        if node.value is None or not isinstance(node.target, ast.Name):
            return self.refuse(node, "a declaration needs a value")
        if not is_constexpr_text(node.annotation):
            plain = ast.Assign([node.target], node.value)
            return self.visit(ast.copy_location(plain, node))
        value = call("__constant", self.visit(node.value), node.target.id)
        made: list[ast.stmt] = [ast.Assign([node.target], value)]
        if self.checked:
            what = (
                f"{node.target.id} has a value already, and a compile-time constant gets one only"
            )
            made = [*statements(f"if {node.target.id!r} in locals(): __refuse({what!r})"), *made]
        return made

    def visit_Return(self, node: ast.Return) -> Any:  # noqa: N802, D102
        if self.loops:
            return self.refuse(node, "Triton has no `return` in a loop")
        self.generic_visit(node)
        if not self.checked or (not self.ways and self.returns == 1):
            return node
        keep = self.name("returned")
        value = call("__returned", node.value or ast.Constant(None), name_of("__returns"))
        made = [ast.Assign([name_of(keep, store=True)], value)]
        if self.ways:  # of a branch that is only looked at, nothing returns
            dry = " or ".join(f"{ways}.is_dry" for ways in self.ways)
            return [*made, *statements(f"if not ({dry}): return {keep}")]
        return [*made, ast.Return(name_of(keep))]

    def visit_If(self, node: ast.If) -> Any:  # noqa: N802, D102
        test = self.visit(node.test)
        names = sorted(assigned_names((*node.body, *node.orelse)))
        self.ways.append(ways := self.name("ways"))
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        self.ways.pop()
        if not self.checked:
            node.test = call("__test", test)
            return node
        # Both branches, the one that is not taken first; what that binds is forgotten.
        node.test = name_of(f"{ways}_taken")
        begin = ast.Assign(
            [name_of(ways, store=True)], call("__ways", test, tuple(names), call("locals"))
        )
        forget = "".join(
            f"        if {x!r} in {ways}.before: {x} = {ways}.before[{x!r}]\n"
            f"        elif {x!r} in locals(): del {x}\n"
            for x in names
        )
        [loop] = statements(
            f"for {ways}_taken in {ways}:\n    pass\n    {ways}.leave(locals())\n"
            f"    if {ways}.is_dry:\n        pass\n{forget}"
        )
        loop.body[0] = node  # type: ignore[attr-defined]
        drop = "".join(f"if {x!r} in {ways}.gone and {x!r} in locals(): del {x}\n" for x in names)
        return [begin, loop, *statements(drop)]

    def visit_For(self, node: ast.For) -> Any:  # noqa: N802, D102
        if not isinstance(node.target, ast.Name):
            return self.refuse(
                node, "a loop has one index; range, tl.range or tl.static_range gives it"
            )
        return self.loop(node, self.visit(node.iter))

    def visit_While(self, node: ast.While) -> Any:  # noqa: N802, D102
        return self.loop(node, ast.Constant(None))

    def loop(self, node: ast.For | ast.While, steps: ast.expr) -> Any:
        """A loop; checked, its first steps are compared, and its own names end with it."""
        if node.orelse:
            return self.refuse(node, "Triton has no `else` of a loop")
        is_for, static = isinstance(node, ast.For), is_static(node)
        names = assigned_names(node.body)
        index = {node.target.id} if isinstance(node, ast.For) else set()  # type: ignore[attr-defined]
        site, loop = self.name("site"), self.name("loop")
        self.sites[site] = LoopSite(self.function.name, node)
        if isinstance(node, ast.While):
            node.test = call("__while", self.visit(node.test), name_of(loop))
        self.loops += not static
        node.body = self.block(node.body)
        self.loops -= not static
        begin = ast.Assign(
            [name_of(loop, store=True)], call("__loop", steps, name_of(site), self.checked)
        )
        if is_for:
            node.iter = name_of(loop)  # type: ignore[union-attr]
        if static or not self.checked:
            return [begin, node]
        forget = "".join(
            f"    if {x!r} in {loop}.before: {x} = {loop}.before[{x!r}]\n" for x in sorted(names)
        )
        own = "".join(  # what a step binds, the next one does not know
            f"if {x!r} not in {loop}.bound and {x!r} in locals(): del {x}\n"
            for x in sorted(names | index)
        )
        leave = f"if {loop}.checking: {loop}.leave(locals())\n"
        node.body += statements(f"{leave}if {loop}.is_dry:\n    pass\n{forget}{own}")
        return [begin, *statements(f"{loop}.enter(locals())"), node, *statements(own)]

    def visit_Assert(self, node: ast.Assert) -> Any:  # noqa: N802, D102
        message = self.visit(node.msg) if node.msg else ast.Constant("")
        return ast.Expr(call("__device_assert", self.visit(node.test), message))

    # ------------------------------------------------------------------------------ expressions
    def visit_List(self, node: ast.List) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        return ast.Tuple(node.elts, node.ctx)

    def visit_ListComp(self, node: ast.ListComp) -> Any:  # noqa: N802, D102
        if len(node.generators) != 1 or node.generators[0].ifs:
            return self.refuse(node, "Triton makes lists of one tuple's elements only")
        self.generic_visit(node)
        node.generators[0].iter = call("__tuple", node.generators[0].iter)
        return call("__tuple", call("list", node))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        node.value = call("__constant", node.value, "a part of an f-string")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802, D102
        self.generic_visit(node)
        if node.attr == "value" and isinstance(node.ctx, ast.Load):
            return call("__value", node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:  # noqa: N802, D102
        first, *rest = map(self.visit, node.values)
        function = "__and" if isinstance(node.op, ast.And) else "__or"
        for other in rest:
            kept = self.name("value")
            keep = ast.NamedExpr(name_of(kept, store=True), first)
            plain = ast.BoolOp(node.op, [name_of(kept), other])
            test = call("__at_run_time", keep)
            first = ast.IfExp(test, call(function, name_of(kept), other), plain)
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

    def visit_Compare(self, node: ast.Compare) -> Any:  # noqa: N802, D102
        if len(node.ops) > 1:
            return self.refuse(
                node, "a comparison has two operands in Triton; write (a < b) & (b < c)"
            )
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            return self.refuse(node, "Triton has no `in`; compare with ==")
        self.generic_visit(node)
        return node


# ---------------------------------------------------------------------- what rewritten kernels call
def refuse(what: str) -> None:
    """Raise what the compiler would."""
    raise CompileError(what)


def assigned(x: Any) -> Any:
    """What a name is after an assignment: numbers become ones at run time."""
    if type(x) is Tile:
        return x
    if isinstance(x, bool | int | float | np.generic):
        return constant(x, type_of_number(x))
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


def test(condition: Any) -> bool:
    """Whether an `if` or a `while` goes on."""
    if type(condition) is Tile:
        if condition.shape:
            raise CompileError(
                f"an `if` needs one number, and this is {described(condition)}; reduce it, or use "
                "tl.where"
            )
        return bool(condition.a)
    if isinstance(condition, Pointer):
        return bool(condition)
    if condition is not None and type(condition) not in (bool, int):
        raise CompileError(f"an `if` needs a truth, and this is {described(condition)}")
    return bool(condition)


def at_run_time(x: Any) -> bool:
    """Whether a value is known at run time only."""
    return type(x) is Tile


def truth(x: Tile) -> Tile:
    """An operand of `and`, `or` and `not`."""
    if x.dtype is not int1:
        raise CompileError(
            f"and, or, not need a comparison, and this is {described(x)}; write != 0"
        )
    return x


def both(x: Any, y: Any) -> Any:
    """x and y, of a tile x."""
    if not isinstance(y, Tile):
        return x if y else y
    return truth(x) & truth(y)


def one_of(x: Any, y: Any) -> Any:
    """x or y, of a tile x."""
    if not isinstance(y, Tile):
        return y if y else x
    return truth(x) | truth(y)


def negated(x: Any) -> Any:
    """not x."""
    return ~truth(x) if isinstance(x, Tile) else not x


def either(condition: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """x if condition else y, where both are compiled: the one that is not chosen is dry."""
    chosen, other = (first, second) if test(condition) else (second, first)
    if not at_run_time(condition) or not here.may_be_dry:
        return chosen()
    outer, here.is_dry = here.is_dry, True
    x = to_tensor(other())
    here.is_dry = outer
    y = to_tensor(chosen())
    if type_of(x) != type_of(y):
        raise CompileError(
            f"the values of this `if ... else` differ: {described(x)}, {described(y)}"
        )
    return y


def value_of(x: Any) -> Any:
    """x.value: of a compile-time constant, itself."""
    return getattr(x, "value", x) if not isinstance(x, int | float | str) else x


def only_tuple(x: Any) -> Any:
    """The elements of a tuple, as a tuple."""
    if not isinstance(x, tuple | list):
        raise CompileError("a list is made of a tuple's elements only")
    return tuple(x)


def returned(x: Any, earlier: list[Any]) -> Any:
    """What a function returns, which has one type in all of its branches."""
    kind = type_of(to_tensor(x) if type(x) in (bool, int, float) else x)
    if earlier and earlier[0] != kind:
        raise CompileError(f"the function returns {kind} here and {earlier[0]} in another branch")
    earlier.append(kind)
    return x


class Ways:
    """The ways that an `if` goes: at run time both, of which the one that is not taken is dry: it
    stores nothing. Iterating gives whether the condition holds.

    Attributes:
        before: what was bound.
        gone: the names that are not bound behind it.
    """

    def __init__(self, condition: Any, names: tuple[str, ...], values: dict[str, Any]) -> None:
        self.taken, self.at_run_time = test(condition), at_run_time(condition)
        self.names, self.before = names, {x: values[x] for x in names if x in values}
        self.gone: set[str] = set()
        self.types: dict[str, Any] = {}
        self.is_dry = False

    def __iter__(self) -> Iterator[bool]:
        if self.at_run_time and here.may_be_dry:
            outer, self.is_dry, here.is_dry = here.is_dry, True, True
            yield not self.taken
            self.is_dry, here.is_dry = False, outer
        yield self.taken

    def leave(self, values: dict[str, Any]) -> None:
        """Compare what one way binds with what was bound before, and with the other way.

        Raises:
            CompileError: a type changes.
        """
        if not self.at_run_time:
            return
        for name in self.names:
            kind = type_of(values[name]) if name in values else None
            if name in self.before:
                old = self.before[name]
                if kind != type_of(old) and values.get(name) is not old:
                    raise CompileError(
                        f"{name} changes its type or shape in one branch of an `if`, from "
                        f"{type_of(old)} to {kind}; convert it with .to"
                    )
            elif self.is_dry:
                self.types[name] = kind
            elif here.may_be_dry and self.types[name] != kind:
                if None not in (kind, self.types[name]):
                    other = self.types[name]
                    raise CompileError(
                        f"{name} is {kind} in one branch of an `if` and {other} in the other"
                    )
                self.gone.add(name)


def asserted(condition: Any, message: Any) -> None:
    """The assert statement, which counts when a kernel is debugged: here."""
    if not here.is_dry and not np.all(to_tensor(condition).a):
        raise AssertionError(message or "an assert failed")


RUNTIME: dict[str, Any] = {
    "__refuse": refuse, "__assigned": assigned, "__constant": constant_of, "__test": test,
    "__ways": Ways, "__at_run_time": at_run_time, "__and": both, "__or": one_of, "__not": negated,
    "__either": either, "__value": value_of, "__tuple": only_tuple, "__device_assert": asserted,
    "__returned": returned, "__loop": Loop, "__while": Loop.goes_on,
    "range": run_time_range, "print": device_print, "locals": locals,
    "max": builtin_extreme(builtins.max, maximum), "min": builtin_extreme(builtins.min, minimum),
    "__builtins__": {name: getattr(builtins, name) for name in ALLOWED},
}  # fmt: skip
