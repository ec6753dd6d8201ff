"""The partial evaluator: a kernel, run over its syntax tree with what one call fixes.

Values that the call fixes fold away, with the branches that they rule out. Functions in `KEPT` stay
functions and are specialised themselves; those in `SHARED` stay as they are; all others are put in
the place of their calls. Every variable that this makes has a name of its own (`name@number`), so
nothing is confused on the way; `tidy` gives short names back.

What it relies on: no function has an effect but its stores, a returned branch is decided by the
call, and the calls of a kept function differ in run-time values and in keyword arguments only.
"""

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flash_versions.diff import fold, tidy
from flash_versions.diff.expressions import Expressions, Frame, Made, is_short, source_of
from flash_versions.diff.fold import Code, Global, Items, Known, Record, Value, named, text_of
from flash_versions.diff.fold import to_node as node_of
from flash_versions.diff.names import RENAMED, WHOLE

STOP = object()  # the kernel has returned


class Kernel:
    """A kernel, specialised to a call.

    Attributes:
        values: what it is given, by parameter.
        facts: what pieces of its code are worth in such a call, by their text.
        functions: the specialised functions by name, each before those that call it.
        imports: the names that they take from the package, by module.
    """

    def __init__(self, kernel: Any, values: Mapping[str, Value], facts: Mapping[str, Value]):
        self.values, self.facts = values, facts
        self.functions: dict[str, Made] = {}
        self.imports: dict[str, set[str]] = {}
        Body(self, kernel.fn, values)

    def import_name(self, module: str, name: str) -> ast.Name:
        """Take a name from a module of the package."""
        self.imports.setdefault(module, set()).add(name)
        return ast.Name(name, ast.Load())


class Body(Expressions):
    """A function of a kernel while it is being specialised."""

    def __init__(self, kernel: Kernel, function: Any, values: Mapping[str, Value]):
        self.kernel = kernel
        source = source_of(function)
        self.number = 0
        self.blocks: list[list[ast.stmt]] = [[]]
        self.known: list[dict[str, str]] = [{}]  # by block: what is computed already, by its text
        self.seen: dict[str, ast.expr] = {}
        self.wanted: dict[str, str] = {}  # names that the kernel has for intermediate results
        self.merged: set[str] = set()  # intermediate results that may be put where they are read
        self.comments: list[str] = []
        paths: dict[str, tuple[str, ...]] = {}
        variables = {p: self.parameter((p,), values[p], paths) for p in source.parameters}
        self.frame = Frame(source, variables, is_own=True, is_kept=True)
        self.run(source.node.body)
        body = tidy.tidy(self.blocks[0], set(paths), self.wanted, self.merged)
        read = {x.id for s in body for x in ast.walk(s) if isinstance(x, ast.Name)}
        constants = {a.arg for a in source.node.args.args if a.annotation is not None}
        kernel.functions[function.__name__] = Made(
            function.__name__,
            {name: path for name, path in paths.items() if name in read},
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
            kept = {f: Code(ast.Attribute(node, f, ast.Load())) for f in value.fields}
            known = {f: x for f, x in value.fields.items() if isinstance(x, Known)}
            return Record(value.kind, kept | known, node)
        assert isinstance(value, Code)
        return Code(node, value.spread, value.width)

    # Statements

    def emit(self, statement: ast.stmt) -> None:
        """Add a statement, with the comments that wait for one."""
        statement.comments, self.comments = self.comments, []  # type: ignore[attr-defined]
        self.blocks[-1].append(statement)

    def new_name(self, base: str) -> str:
        """A name that nothing has."""
        self.number += 1
        return f"{base.partition('@')[0]}@{self.number}"

    def store(self, name: str, value: Value) -> None:
        """Emit `name = value`."""
        self.emit(ast.Assign([ast.Name(name, ast.Store())], node_of(value)))

    def let(self, base: str, value: Value, even_short: bool = False) -> Value:
        """The value by a name, so that it is computed once; what is computed already has one."""
        if isinstance(value, Record) and value.kind in WHOLE and value.node is None:
            kind = self.kernel.import_name(WHOLE[value.kind], value.kind)
            made = Code(ast.Call(kind, [*map(node_of, value.fields.values())], []))
            return Record(value.kind, value.fields, node_of(self.let(base, made)))
        if not isinstance(value, Code) or isinstance(value.node, ast.Name):
            return value
        if is_short(value.node) and not even_short:
            return value
        text = text_of(value)
        name = next((block[text] for block in self.known if text in block), None)
        if name is None:
            name = self.new_name(base)
            self.merged.add(name)
            self.remember(name, value)
            self.store(name, value)
        return Code(ast.Name(name, ast.Load()), value.spread)

    def remember(self, name: str, value: Code) -> None:
        """Note what a variable is computed as, if that stays the same: not of what is loaded, nor
        of what a loop changes.
        """
        text = text_of(value)
        changes = {x for f in self.frames() for x in f.mutable.values()}
        names = {x.id for x in ast.walk(value.node) if isinstance(x, ast.Name)}
        if "load" not in text and not names & changes:
            self.known[-1][text] = name
            self.seen[name] = value.node

    def frames(self) -> Iterator[Frame]:
        """The functions that are being evaluated, the innermost first."""
        frame: Frame | None = self.frame
        while frame is not None:
            yield frame
            frame = frame.caller

    def assign(self, variable: str, value: Value) -> None:
        """Give a variable a value."""
        frame = self.frame
        if name := frame.mutable.get(variable):
            if text_of(value) != name:
                self.store(name, value)
            frame.variables[variable] = named(name)
            return
        is_name = isinstance(value, Code) and isinstance(value.node, ast.Name)
        changes = is_name and any(text_of(value) in f.mutable.values() for f in self.frames())
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
            changed = set(self.frame.mutable.values())
            values = [
                self.copied(x) if isinstance(x, Code) and text_of(x) in changed else x
                for x in value.values
            ]
            for variable, x in zip(variables, values, strict=True):
                if variable != "_":
                    self.assign(variable, x)
            return
        names = [
            x if x == "_" else self.frame.mutable.get(x) or self.new_name(x) for x in variables
        ]
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
        self.emit(ast.Assign([ast.Tuple(targets, ast.Store())], node_of(value)))
        self.frame.variables |= dict(zip(variables, map(named, names)))

    def copied(self, value: Value) -> Value:
        """A variable's value now, whatever is assigned to it later."""
        name = self.new_name(text_of(value))
        self.store(name, value)
        return named(name)

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
            case ast.Expr(ast.Constant()) | ast.Pass():
                return None
            case ast.Expr(value):
                found = self.value(value, is_own=self.frame.is_own)
                if isinstance(found, Code):
                    self.emit(ast.Expr(found.node))
            case ast.Assign([ast.Name(id=name)], value) | ast.AnnAssign(
                ast.Name(id=name), _, value
            ):
                assert value is not None
                self.assign(name, self.value(value))
            case ast.AugAssign(ast.Name(id=name), op, value):
                before = self.value(ast.Name(name, ast.Load()))
                self.assign(name, fold.binary(op, before, self.value(value)))
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
            case ast.For():
                self.loop(s)
            case _:
                raise NotImplementedError(ast.unparse(s))
        return None

    @contextmanager
    def block(self) -> Iterator[list[ast.stmt]]:
        """Evaluate a block inside of the current one."""
        self.blocks.append([])
        self.known.append({})
        yield self.blocks[-1]
        self.known.pop()
        self.blocks.pop()

    def fix(self, statements: list[ast.stmt], is_loop: bool) -> list[str]:
        """Give the variables that a loop or a run-time branch assigns a name that they keep."""
        nodes = [x for s in statements for x in ast.walk(s) if isinstance(x, ast.Name)]
        fixed = []
        for variable in dict.fromkeys(x.id for x in nodes if isinstance(x.ctx, ast.Store)):
            before = self.frame.variables.get(variable)
            if variable == "_" or variable in self.frame.mutable or (is_loop and before is None):
                continue
            name = self.new_name(variable)
            if before is not None:
                self.store(name, before)
            self.frame.mutable[variable] = name
            self.frame.variables[variable] = named(name)
            fixed.append(variable)
        return fixed

    def branch(self, condition: Value, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        """Evaluate an `if` that is decided at run time."""
        comments, self.comments = self.comments, []
        fixed = self.fix(body + orelse, is_loop=False)
        made = []
        for part in (body, orelse):
            with self.block() as block:
                if self.run(part) is not None:
                    raise NotImplementedError("a return that the call does not decide")
            made.append(block)
        for variable in fixed:
            del self.frame.mutable[variable]
        if made[0] or made[1]:
            self.comments = comments
            self.emit(ast.If(node_of(condition), made[0] or [ast.Pass()], made[1]))

    def loop(self, s: ast.For) -> None:
        """Evaluate a `for`: one that runs once without the loop."""
        assert isinstance(s.iter, ast.Call) and isinstance(s.target, ast.Name)
        bounds = [self.value(x) for x in s.iter.args]
        texts = [text_of(x) for x in bounds]
        once = texts == ["1"] or (
            len(texts) == 3 and texts[0].startswith("tl.program_id") and texts[1] == texts[2]
        )
        if once:  # 0, or the p of p, p + n, ... below n
            self.assign(s.target.id, bounds[0] if len(bounds) == 3 else Known(0))
            self.run(s.body)
            return
        comments, self.comments = self.comments, []
        fixed = self.fix(s.body, is_loop=True)
        name = self.new_name(s.target.id)
        self.frame.variables[s.target.id] = named(name)
        with self.block() as body:
            self.run(s.body)
        for variable in fixed:
            del self.frame.mutable[variable]
        if len(bounds) == 2 and bounds[0] in (Known(0), Known(0, spread=True)):
            bounds = bounds[1:]
        steps = ast.Call(s.iter.func, [*map(node_of, bounds)], s.iter.keywords)
        self.comments = comments
        self.emit(ast.For(ast.Name(name, ast.Store()), steps, body, []))
