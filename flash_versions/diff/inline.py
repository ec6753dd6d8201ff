"""The partial evaluator: a kernel, run over its syntax tree with what one call fixes.

Values that the call fixes fold away, with the branches that they rule out. Functions in `KEPT` stay
functions and are specialised themselves; those in `SHARED` stay as they are; all others are put in
the place of their calls. Every variable that this makes has a name of its own (`name@number`), so
nothing is confused on the way; `tidy` gives short names back.

What it relies on: no function has an effect but its stores, a returned branch is decided by the
call, the calls of a kept function differ in run-time values and in keyword arguments only, and no
function put in the place of its call returns variables of a loop in another order.
"""

import ast
import builtins
import inspect
import textwrap
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from flash_versions.diff import fold, tidy
from flash_versions.diff.files import VERSIONS
from flash_versions.diff.fold import Code, Global, Items, Known, Record, Value, named, text_of
from flash_versions.diff.fold import to_node as node_of

PACKAGE = __name__.partition(".")[0]
# A plain kernel takes these functions from the package as they are, ...
ROWS, EXP2 = f"{VERSIONS}.tiles.rows", f"{VERSIONS}.fa4.exp2"
SHARED = {f"{ROWS}.{x}" for x in ("load_rows", "store_rows", "load_row_values", "store_row_values")}
SHARED |= {f"{EXP2}.mixed_exp2"}
# ... has these of its own, specialised to the call, and the statements of all others in place.
KEPT = {"load_rows", "softmax_step", "raise_reference", "fold_block", "heavy_first"}
KEPT |= {"probabilities", "fold_queries", "fold_keys"}
WHOLE = {"Rows": ROWS}  # named tuples that it keeps; others are taken apart
RECORDS = {"Rows", "Queries"}  # named tuples that kernels construct
# What is left of a parameter is called as its last field, or so.
RENAMED = {("kv_heads",): "heads", ("queries", "dq"): "dq_out"}
STOP = object()  # the kernel has returned


@dataclass(frozen=True)
class Source:
    """A function of a kernel as it is written: its syntax tree, the names of its parameters, and
    its comments by the line of their statement.
    """

    node: ast.FunctionDef
    parameters: list[str]
    comments: Mapping[int, list[str]]
    names: Mapping[str, Any]  # that its module defines
    module: str


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
    """A function that is being evaluated, and the values of its variables.

    Attributes:
        is_own: its statements stay statements; those of other functions may be merged.
        is_kept: its return is the return of the specialised function.
        mutable: of variables that a loop or a run-time branch assigns, the name they keep.
    """

    source: Source
    variables: dict[str, Any]
    is_own: bool = False
    is_kept: bool = False
    mutable: dict[str, str] = field(default_factory=dict)


@cache
def source_of(function: Any) -> Source:
    """The source of what Triton calls `fn`: a plain Python function."""
    text = textwrap.dedent(inspect.getsource(function))
    node = next(x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef))
    parameters = [argument.arg for argument in node.args.args]
    comments = tidy.comments_of(text)
    return Source(node, parameters, comments, function.__globals__, function.__module__)


def is_kernel_code(thing: Any) -> bool:
    """Whether Triton compiles a function of this package."""
    return hasattr(thing, "fn") and thing.fn.__module__.startswith(PACKAGE)


class Kernel:
    """A kernel, specialised to a call.

    Attributes:
        values: what it is given, by parameter.
        width: elements of a row of a tile.
        facts: what pieces of its code are worth in such a call, by their text.
        functions: the specialised functions by name, each before those that call it.
        imports: what they take from the package: (module, name).
    """

    def __init__(
        self, kernel: Any, values: Mapping[str, Value], width: int, facts: Mapping[str, Value]
    ):
        self.values, self.width, self.facts = values, width, facts
        self.functions: dict[str, Made] = {}
        self.imports: set[tuple[str, str]] = set()
        Body(self, kernel.fn, values)

    def import_name(self, module: str, name: str) -> ast.Name:
        """Take a name from a module of the package."""
        self.imports.add((module, name))
        return ast.Name(name, ast.Load())


class Body:
    """A function of a kernel while it is being specialised."""

    def __init__(self, kernel: Kernel, function: Any, values: Mapping[str, Value]):
        self.kernel = kernel
        self.number = 0
        self.block: list[ast.stmt] = []  # the statements that are being made
        self.known: ChainMap[str, str] = ChainMap()  # what is computed already: names by text
        self.seen: dict[str, ast.expr] = {}  # what variables were computed as
        self.changing: set[str] = set()  # names that a loop or a run-time branch assigns
        self.wanted: dict[str, str] = {}  # names that the kernel has for intermediate results
        self.merged: set[str] = set()  # intermediate results that may be put where they are read
        self.comments: list[str] = []  # that wait for a statement
        source = source_of(function)
        paths: dict[str, tuple[str, ...]] = {}
        variables = {p: self.parameter((p,), values[p], paths) for p in source.parameters}
        self.frame = Frame(source, variables, is_own=True, is_kept=True)
        self.run(source.node.body)
        body = tidy.tidy(self.block, set(paths), self.wanted, self.merged)
        read = tidy.reads(body)
        constants = {a.arg for a in source.node.args.args if a.annotation is not None}
        kernel.functions[function.__name__] = Made(
            function.__name__,
            {name: path for name, path in paths.items() if read[name]},
            {name for name, path in paths.items() if path[0] in constants},
            body,
        )

    def parameter(self, path: tuple[str, ...], value: Value, paths: dict) -> Value:
        """What a parameter, or a field of one, is inside of the function: known values as they are,
        everything else a parameter, called as its last field.
        """
        if isinstance(value, Known | Global):
            return value
        if isinstance(value, Record) and value.kind not in WHOLE:
            fields = {f: self.parameter((*path, f), x, paths) for f, x in value.fields.items()}
            return Record(value.kind, fields)
        name = RENAMED.get(path, path[-1])
        name = name if name not in paths else "_".join(path)
        paths[name] = path
        node = ast.Name(name, ast.Load())
        if isinstance(value, Record):
            kept = {
                f: x if isinstance(x, Known) else Code(ast.Attribute(node, f, ast.Load()))
                for f, x in value.fields.items()
            }
            return Record(value.kind, kept, node)
        return Code(node, isinstance(value, Code) and value.spread)

    # Expressions

    def value(self, e: ast.expr) -> Value:
        """Evaluate an expression."""
        found = self.operation(e)
        return self.kernel.facts.get(text_of(found), found) if isinstance(found, Code) else found

    def operation(self, e: ast.expr) -> Value:
        """Evaluate an expression by its parts."""
        match e:
            case ast.Constant(value):
                return Known(value)
            case ast.Name(id=name):
                return self.variable(name)
            case ast.Attribute(base, attribute):
                return self.attribute(self.value(base), attribute)
            case ast.Call():
                return self.call(e)
            case ast.Tuple(items):
                return Items([self.value(x) for x in items])
            case ast.List(items):
                return Code(ast.List([node_of(self.value(x)) for x in items], ast.Load()))
            case ast.Slice():
                return Code(e)
            case ast.Subscript(base, index):
                found = self.value(base)
                if isinstance(found, Known | Code) and (found.spread or isinstance(found, Known)):
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
        if name in ("DIM", "PADDED"):
            return Known(self.kernel.width)
        return Code(ast.Attribute(node_of(base), name, ast.Load()))

    def call(self, e: ast.Call, is_own: bool = False) -> Value:
        """Evaluate a call; `is_own` says that the statements of the function stay statements."""
        function = self.value(e.func)
        arguments = [self.value(x) for x in e.args]
        keywords = {str(k.arg): self.value(k.value) for k in e.keywords}
        thing: Any = function.thing if isinstance(function, Global) else None
        called = None
        if is_kernel_code(thing):
            module, name = thing.fn.__module__, thing.fn.__name__
            if f"{module}.{name}" in SHARED:
                called = self.kernel.import_name(module, name)
            else:
                source = source_of(thing.fn)
                values = dict(zip(source.parameters, arguments)) | keywords
                if name in KEPT:
                    return self.call_kept(thing.fn, values, set(keywords))
                return self.call_inlined(source, values, is_own)
        if inspect.isclass(thing) and thing.__name__ in RECORDS:
            fields = dict(zip(thing._fields, arguments)) | keywords  # type: ignore[attr-defined]
            fields = {name: self.let(name, x, even_short=True) for name, x in fields.items()}
            return self.let(thing.__name__.lower(), Record(thing.__name__, fields))
        text = function.text if isinstance(function, Global) else ""
        if found := fold.call(text, [] if keywords else arguments, self.seen):
            return found
        named_ones = [ast.keyword(name, node_of(x)) for name, x in keywords.items()]
        return Code(ast.Call(called or node_of(function), [*map(node_of, arguments)], named_ones))

    def call_inlined(self, source: Source, values: dict[str, Value], is_own: bool) -> Value:
        """Evaluate a call by the function's statements."""
        variables = {p: self.let(p, values[p]) for p in source.parameters}
        caller, self.frame = self.frame, Frame(source, variables, is_own)
        found = self.run(source.node.body)
        self.frame = caller
        return Known(None) if found is None else found

    def call_kept(self, function: Any, values: dict[str, Value], by_keyword: set[str]) -> Value:
        """A call of a function that stays one. Keyword arguments are what its calls differ in."""
        name = function.__name__
        if name not in self.kernel.functions:
            given = {p: named(p) if p in by_keyword else x for p, x in values.items()}
            Body(self.kernel, function, given)
        arguments, keywords = [], []
        for first, *fields in self.kernel.functions[name].parameters.values():
            value = values[first]
            for part in fields:
                value = value.fields[part]  # type: ignore[union-attr]
            if first in by_keyword:
                keywords.append(ast.keyword(first, node_of(value)))
            else:
                arguments.append(node_of(value))
        return Code(ast.Call(ast.Name(name, ast.Load()), arguments, keywords))

    # Variables

    def new_name(self, base: str) -> str:
        """A name that nothing has."""
        self.number += 1
        return f"{base.partition('@')[0]}@{self.number}"

    def emit(self, statement: ast.stmt) -> None:
        """Add a statement, with the comments that wait for one."""
        statement.comments, self.comments = self.comments, []  # type: ignore[attr-defined]
        self.block.append(statement)

    def store(self, name: str, value: Value) -> None:
        """Emit `name = value`."""
        self.emit(ast.Assign([ast.Name(name, ast.Store())], node_of(value)))

    def let(self, base: str, value: Value, even_short: bool = False) -> Value:
        """The value by a name, so that it is computed once; what is computed already has one, and a
        variable plus or minus a constant needs none.
        """
        match value:
            case Record(kind, fields, None) if kind in WHOLE:
                called = self.kernel.import_name(WHOLE[kind], kind)
                made = Code(ast.Call(called, [*map(node_of, fields.values())], []))
                return Record(kind, fields, node_of(self.let(base, made)))
            case Code(ast.BinOp(ast.Name(), _, ast.Constant())) if not even_short:
                return value
            case Code(node) if not isinstance(node, ast.Name):
                name = self.known.get(text_of(value))
                if name is None:
                    name = self.new_name(base)
                    self.merged.add(name)
                    self.remember(name, value)
                    self.store(name, value)
                return Code(ast.Name(name, ast.Load()), value.spread)
        return value

    def remember(self, name: str, value: Code) -> None:
        """Note what a variable is computed as, if that stays the same: not of what is loaded, nor
        of what a loop changes.
        """
        text = text_of(value)
        names = {x.id for x in ast.walk(value.node) if isinstance(x, ast.Name)}
        if "load" not in text and not names & self.changing:
            self.known[text] = name
            self.seen[name] = value.node

    def assign(self, variable: str, value: Value) -> None:
        """Give a variable a value."""
        frame = self.frame
        if name := frame.mutable.get(variable):
            self.store(name, value)
            frame.variables[variable] = named(name)
            return
        is_name = isinstance(value, Code) and isinstance(value.node, ast.Name)
        changes = is_name and text_of(value) in self.changing
        if isinstance(value, Code) and (changes or (frame.is_own and not is_name)):
            name = self.new_name(variable)
            if not changes:
                self.remember(name, value)
            self.store(name, value)
            value = Code(ast.Name(name, ast.Load()), value.spread)
        else:
            value = self.let(variable, value)
        frame.variables[variable] = value
        if frame.is_own and isinstance(value, Code | Record) and value.node is not None:
            name = text_of(value.node)
            self.wanted[name] = min(self.wanted.get(name, variable), variable, key=len)
            self.merged.discard(name)

    def unpack(self, variables: list[str], value: Value) -> None:
        """Give several variables the items of a tuple."""
        if isinstance(value, Items):
            for variable, x in zip(variables, value.values, strict=True):
                if variable != "_":
                    self.assign(variable, x)
            return
        names = [
            x if x == "_" else self.frame.mutable.get(x) or self.new_name(x) for x in variables
        ]
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
        self.emit(ast.Assign([ast.Tuple(targets, ast.Store())], node_of(value)))
        self.frame.variables |= dict(zip(variables, map(named, names)))

    # Statements

    def run(self, statements: list[ast.stmt]) -> Any:
        """Evaluate statements: what an inlined function returns, STOP after the return of a kept
        one, else None.
        """
        for statement in statements:
            own = self.frame.source.comments.get(statement.lineno, [])
            self.comments = [*self.comments, *own]
            found = self.statement(statement)
            self.comments = [x for x in self.comments if x not in own]
            if found is not None:
                return found
        return None

    def statement(self, s: ast.stmt) -> Any:
        """Evaluate a statement, see `run`."""
        match s:
            case ast.Expr(ast.Call() as call):
                found = self.call(call, self.frame.is_own)
                if isinstance(found, Code):
                    self.emit(ast.Expr(found.node))
            case ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case ast.Assign([ast.Name(id=name)], value) | ast.AnnAssign(
                ast.Name(id=name), _, ast.expr() as value
            ):
                self.assign(name, self.value(value))
            case ast.AugAssign(ast.Name(id=name), op, value):
                self.assign(name, fold.binary(op, self.variable(name), self.value(value)))
            case ast.Assign([ast.Tuple(targets)], value):
                self.unpack([text_of(x) for x in targets], self.value(value))
            case ast.Return(value):
                found = self.value(value) if value else Known(None)
                if not self.frame.is_kept:
                    return found
                self.emit(ast.Return(node_of(found) if value else None))
                return STOP
            case ast.If(test, body, orelse):
                condition = self.value(test)
                if isinstance(condition, Known):
                    self.comments = []  # on what is not there any more
                    return self.run(body if condition.value else orelse)
                self.branch(condition, body, orelse)
            case ast.For(ast.Name(id=name), ast.Call() as steps, body):
                self.loop(name, steps, body)
            case _:
                raise NotImplementedError(ast.unparse(s))
        return None

    @contextmanager
    def changed_by(self, statements: list[ast.stmt], is_loop: bool) -> Iterator[None]:
        """While statements are evaluated that a loop or a run-time branch may run, the variables
        that they assign have names that they keep.
        """
        mutable, variables = self.frame.mutable, self.frame.variables
        nodes = [x for s in statements for x in ast.walk(s) if isinstance(x, ast.Name)]
        fixed = {}
        for variable in dict.fromkeys(x.id for x in nodes if isinstance(x.ctx, ast.Store)):
            before = variables.get(variable)
            if variable == "_" or variable in mutable or (is_loop and before is None):
                continue
            fixed[variable] = name = self.new_name(variable)
            if before is not None:
                self.store(name, before)
            variables[variable] = named(name)
        mutable |= fixed
        self.changing |= {*fixed.values()}
        yield
        self.changing -= {*fixed.values()}
        for variable in fixed:
            del mutable[variable]

    def inner(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """A block inside of the current one, evaluated."""
        outer, self.block, self.known = self.block, [], self.known.new_child()
        if self.run(statements) is not None:
            raise NotImplementedError("a return that the call does not decide")
        found, self.block, self.known = self.block, outer, self.known.parents
        return found

    def branch(self, condition: Value, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        """Evaluate an `if` that is decided at run time."""
        comments, self.comments = self.comments, []
        with self.changed_by(body + orelse, is_loop=False):
            made = [self.inner(body), self.inner(orelse)]
        if made[0] or made[1]:
            self.comments = comments
            self.emit(ast.If(node_of(condition), made[0] or [ast.Pass()], made[1]))

    def loop(self, variable: str, steps: ast.Call, body: list[ast.stmt]) -> None:
        """Evaluate a `for`: one that runs once without the loop."""
        bounds = [self.value(x) for x in steps.args]
        match [text_of(x) for x in bounds]:
            case ["1"]:
                self.assign(variable, Known(0))
                self.run(body)
                return
            case [first, end, step] if first.startswith("tl.program_id") and end == step:
                self.assign(variable, bounds[0])  # the p of p, p + n, ... below n
                self.run(body)
                return
            case ["0", _]:
                bounds = bounds[1:]
        comments, self.comments = self.comments, []
        with self.changed_by(body, is_loop=True):
            name = self.new_name(variable)
            self.frame.variables[variable] = named(name)
            made = self.inner(body)
        self.comments = comments
        called = ast.Call(steps.func, [*map(node_of, bounds)], steps.keywords)
        self.emit(ast.For(ast.Name(name, ast.Store()), called, made, []))
