"""The half of the partial evaluator that reads functions and evaluates their expressions; `inline`
has the statements.
"""

import ast
import builtins
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flash_versions.diff import fold
from flash_versions.diff.fold import Code, Global, Items, Known, Record, Value, named, text_of
from flash_versions.diff.fold import to_node as node_of
from flash_versions.diff.names import KEPT, RECORDS, SHARED
from flash_versions.diff.render import comments_of


@dataclass(frozen=True)
class Source:
    """A function of a kernel as it is written.

    Attributes:
        node: its syntax tree.
        names: what its module defines.
        module: the name of that module.
        comments: of each statement, by line.
    """

    node: ast.FunctionDef
    names: Mapping[str, Any]
    module: str
    comments: Mapping[int, list[str]]

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters, in order."""
        return [argument.arg for argument in self.node.args.args]


@dataclass
class Made:
    """A specialised function.

    Attributes:
        name: as in the source.
        parameters: for each parameter that is left, where its value comes from: the name of the
            original parameter, then the fields to follow.
        constants: those of them that are compile-time constants.
        body: its statements.
    """

    name: str
    parameters: dict[str, tuple[str, ...]]
    constants: set[str]
    body: list[ast.stmt]


@dataclass
class Frame:
    """A function that is being evaluated.

    Attributes:
        source: the function.
        variables: their values by name.
        is_own: its statements stay statements; those of other functions may be merged.
        is_kept: its return is the return of the specialised function.
        mutable: of variables that a loop or a run-time branch assigns, the name they keep.
        caller: the function that calls it, if it is inlined.
    """

    source: Source
    variables: dict[str, Any]
    is_own: bool = False
    is_kept: bool = False
    mutable: dict[str, str] = field(default_factory=dict)
    caller: "Frame | None" = None


@cache
def source_of(function: Any) -> Source:
    """The source of what Triton calls `fn`: a plain Python function."""
    text = textwrap.dedent(inspect.getsource(function))
    node = next(x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef))
    return Source(node, function.__globals__, function.__module__, comments_of(text))


def is_kernel_code(thing: Any) -> bool:
    """Whether Triton compiles a function of this package."""
    return hasattr(thing, "fn") and thing.fn.__module__.startswith(__package__.partition(".")[0])


def is_short(node: ast.expr) -> bool:
    """Whether code needs no name: a variable plus or minus a constant."""
    if not isinstance(node, ast.BinOp):
        return False
    return isinstance(node.left, ast.Name) and isinstance(node.right, ast.Constant)


class Expressions:
    """What a function's expressions are worth in a call.

    Attributes:
        kernel: the kernel that the function belongs to.
        frame: the function that is being evaluated.
        seen: what variables were computed as.
    """

    kernel: Any
    frame: Frame
    seen: dict[str, ast.expr]

    def let(self, base: str, value: Value, even_short: bool = False) -> Value:
        """The value by a name."""
        raise NotImplementedError

    def run(self, statements: list[ast.stmt]) -> Any:
        """Evaluate statements."""
        raise NotImplementedError

    def value(self, e: ast.expr, is_own: bool = False) -> Value:
        """Evaluate an expression; `is_own` says that the statements of a function called here stay
        statements.
        """
        found = self.call(e, is_own) if isinstance(e, ast.Call) else self.operation(e)
        return self.kernel.facts.get(text_of(found), found) if isinstance(found, Code) else found

    def operation(self, e: ast.expr) -> Value:
        """Evaluate what is no call."""
        match e:
            case ast.Constant(value):
                return Known(value)
            case ast.Name(id=name):
                return self.variable(name)
            case ast.Attribute(base, attribute):
                return self.attribute(self.value(base), attribute)
            case ast.Tuple(items):
                return Items([self.value(x) for x in items])
            case ast.List(items):
                return Code(ast.List([node_of(self.value(x)) for x in items], ast.Load()))
            case ast.Slice():
                return Code(e)
            case ast.Subscript(base, index):
                found = self.value(base)
                if isinstance(found, Known) or (isinstance(found, Code) and found.spread):
                    return found  # of equal elements: it broadcasts without new axes
                return Code(ast.Subscript(node_of(found), node_of(self.value(index)), ast.Load()))
            case ast.UnaryOp(op, operand):
                found = self.value(operand)
                if isinstance(found, Known) and isinstance(op, ast.Not):
                    return Known(not found.value)
                return Code(ast.UnaryOp(op, node_of(found)))
            case ast.BinOp(left, op, right):
                return fold.binary(op, self.value(left), self.value(right))
            case ast.Compare(left, [op], [right]):
                return fold.compare(op, self.value(left), self.value(right))
            case ast.BoolOp(op, values):
                return fold.both(op, [self.value(x) for x in values])
            case ast.IfExp(test, body, orelse):
                condition = self.value(test)
                if isinstance(condition, Known):
                    return self.value(body if condition.value else orelse)
        raise NotImplementedError(ast.unparse(e))

    def variable(self, name: str) -> Value:
        """What a name means: a variable, something of the module, something of Python."""
        source = self.frame.source
        if name in self.frame.variables:
            return self.frame.variables[name]
        if name not in source.names:
            return Global(getattr(builtins, name), name)
        thing = source.names[name]
        if inspect.ismodule(thing) or inspect.isclass(thing) or is_kernel_code(thing):
            return Global(thing, name)
        return Code(self.kernel.import_name(source.module, name))

    def attribute(self, base: Value, name: str) -> Value:
        """A field of a record, an attribute of a module, or of what the kernel computes."""
        if isinstance(base, Record):
            return base.fields[name]
        if isinstance(base, Global):
            return Global(getattr(base.thing, name), f"{base.text}.{name}")
        if isinstance(base, Code) and base.width is not None and name in ("DIM", "PADDED"):
            return Known(base.width)
        return Code(ast.Attribute(node_of(base), name, ast.Load()))

    def call(self, e: ast.Call, is_own: bool) -> Value:
        """Evaluate a call."""
        function = self.value(e.func)
        arguments = [self.value(x) for x in e.args]
        keywords = {str(k.arg): self.value(k.value) for k in e.keywords}
        thing: Any = function.thing if isinstance(function, Global) else None
        if is_kernel_code(thing) and f"{thing.fn.__module__}.{thing.fn.__name__}" not in SHARED:
            source = source_of(thing.fn)
            values = dict(zip(source.parameters, arguments)) | keywords
            if thing.fn.__name__ in KEPT:
                return self.call_kept(thing.fn, values, set(keywords))
            return self.call_inlined(source, values, is_own)
        if inspect.isclass(thing) and thing.__name__ in RECORDS:
            fields = dict(zip(thing._fields, arguments)) | keywords  # type: ignore[attr-defined]
            fields = {name: self.let(name, x, even_short=True) for name, x in fields.items()}
            return self.let(thing.__name__.lower(), Record(thing.__name__, fields))
        text = getattr(function, "text", "")
        if found := fold.call(text, [] if keywords else arguments, self.seen):
            return found
        if is_kernel_code(thing):
            called: ast.expr = self.kernel.import_name(thing.fn.__module__, thing.fn.__name__)
        else:
            called = node_of(function)
        named_ones = [ast.keyword(name, node_of(x)) for name, x in keywords.items()]
        return Code(ast.Call(called, [*map(node_of, arguments)], named_ones))

    def call_inlined(self, source: Source, values: dict[str, Value], is_own: bool) -> Value:
        """Evaluate a call by the function's statements."""
        variables = {p: self.let(p, values[p]) for p in source.parameters}
        caller = self.frame
        self.frame = Frame(source, variables, is_own=is_own, caller=caller)
        found = self.run(source.node.body)
        self.frame = caller
        return Known(None) if found is None else found

    def call_kept(self, function: Any, values: dict[str, Value], by_keyword: set[str]) -> Value:
        """A call of a function that stays one. Keyword arguments are what its calls differ in."""
        name = function.__name__
        if name not in self.kernel.functions:
            given = {
                p: named(p) if p in by_keyword else values[p]
                for p in source_of(function).parameters
            }
            type(self)(self.kernel, function, given)  # type: ignore[call-arg]
        arguments, keywords = [], []
        for path in self.kernel.functions[name].parameters.values():
            value = values[path[0]]
            for part in path[1:]:
                assert isinstance(value, Record)
                value = value.fields[part]
            if path[0] in by_keyword:
                keywords.append(ast.keyword(path[0], node_of(value)))
            else:
                arguments.append(node_of(value))
        return Code(ast.Call(ast.Name(name, ast.Load()), arguments, keywords))
