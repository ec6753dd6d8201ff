"""The functions of a kernel, with the simulator in the place of Triton.

A function keeps its text and is compiled from it once (see `source`). The names that it reads are
looked up anew in every launch, because in a notebook a helper may have been defined again: Triton's
modules become ours, jit functions become `Function`s, compile-time constants their values.
"""

import ast
import functools
import inspect
import itertools
import textwrap
import threading
import types
from collections.abc import Callable
from typing import Any

from flash_versions.simulator import source
from flash_versions.simulator.dtypes import OF_NAME, dtype
from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.gluon.language import Semantic
from flash_versions.simulator.modules import Language, module_of
from flash_versions.simulator.state import here

MISSING = object()
files = set[str]()  # that functions which run are in
launches = itertools.count()
launch_number = 0


class Watcher:
    """A Python function that a simulated kernel calls with its tiles.

    Args:
        watched: the kernel's function in whose place it is; `rebound` gives what computes.
        function: is called where the kernel runs, and not where it is only looked at.
    """

    def __init__(self, watched: Any, function: Callable) -> None:
        self.watched, self.function = watched, function

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        function = rebound(self.watched) if here.dry else self.function
        return function(*arguments, **named)


def one_at_a_time(method: Callable) -> Callable:
    """A method that one thread at a time may run: Python cannot parse in several."""

    @functools.wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        with running:
            return method(*arguments, **named)

    return run


running = threading.RLock()


class Function:
    """A jit function, callable from kernels.

    Attributes:
        fn: the function as it was written.
    """

    def __init__(self, jit: Any) -> None:
        self.fn: types.FunctionType = jit.fn
        self.lines = getattr(jit, "raw_src", None), getattr(jit, "starting_line_number", 0)
        self.__name__, self.launch = self.fn.__name__, -1
        self.seen: dict[str, Any] = {}
        self.globals = dict(source.RUNTIME)
        self.names: list[str] | None = None
        self.plain: Callable | None = None
        self.checked: Callable | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        if self.launch != launch_number:
            self.refresh()
        if here.checking:
            self.checked = run = self.checked or self.compiled(checked=True)
        else:
            self.plain = run = self.plain or self.compiled(checked=False)
        return run(*arguments, **named)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @property
    def file(self) -> str:
        """The file that the function is in."""
        return self.fn.__code__.co_filename

    def parsed(self) -> ast.FunctionDef:
        """The syntax tree of the function, with the lines of its file."""
        lines, first = self.lines
        if lines is None:
            lines, first = inspect.getsourcelines(self.fn)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        ast.increment_lineno(tree, first - 1)
        return tree.body[0]  # type: ignore[return-value]

    @one_at_a_time
    def compiled(self, checked: bool) -> Callable:
        """The function that runs, which compares types if it is to be checked."""
        files.add(self.file)
        rewriter = source.Rewriter(self.parsed(), checked)
        module = ast.Module([rewriter.visit(rewriter.function)], [])
        self.globals |= rewriter.sites
        scope, name = self.globals, self.fn.__name__
        itself = scope.get(name)  # for a function that calls itself
        exec(compile(ast.fix_missing_locations(module), self.file, "exec"), scope)
        run, scope[name] = scope[name], itself
        run.__defaults__ = self.fn.__defaults__ and tuple(map(rebound, self.fn.__defaults__))
        named = self.fn.__kwdefaults__
        run.__kwdefaults__ = named and {k: rebound(v) for k, v in named.items()}
        return run

    @one_at_a_time
    def refresh(self) -> None:
        """Look up the names that the function reads. What a kernel must not read stays unknown, and
        is an error where it is read.
        """
        if self.names is None:
            tree = ast.walk(self.parsed())
            self.names = sorted({x.id for x in tree if isinstance(x, ast.Name)})
        known = self.fn.__globals__
        if self.fn.__closure__:
            known = known | captured(self.fn)
        for name in self.names:
            value = known.get(name, MISSING)
            if value is not MISSING and value is not self.seen.get(name, MISSING):
                self.seen[name] = value
                if is_readable(value):
                    self.globals[name] = rebound(value)
                else:
                    self.globals.pop(name, None)
        self.launch = launch_number


def captured(fn: Any) -> dict[str, Any]:
    """The variables of the functions around a function."""
    found = {}
    code = getattr(fn, "__code__", None)
    for name, cell in zip(code.co_freevars if code else (), getattr(fn, "__closure__", None) or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet bound
            continue
    return found


def begin_launch() -> None:
    """Let functions look up their names once more."""
    global launch_number
    launch_number = next(launches)


def is_jit(x: Any) -> bool:
    """Whether a value is a function that was decorated with triton.jit or gluon.jit."""
    return isinstance(getattr(x, "fn", None), types.FunctionType) and not is_constexpr_function(x)


def is_constexpr_function(x: Any) -> bool:
    """Whether a value is a function that runs when a kernel is compiled."""
    return type(x).__name__ == "ConstexprFunction"


def is_constexpr(x: Any) -> bool:
    """Whether a value is a compile-time constant in its wrapping."""
    return type(x).__name__ == "constexpr" and hasattr(x, "value")


def is_aggregate(x: Any) -> bool:
    """Whether a value is a class that was decorated with gluon.aggregate."""
    return isinstance(x, type) and getattr(x, "__triton_aggregate__", False)


def is_readable(x: Any) -> bool:
    """Whether a kernel may read a global with this value."""
    return (
        isinstance(x, types.ModuleType | Language | Function | Watcher | dtype | type)
        or x is None
        or is_jit(x)
        or is_constexpr(x)
        or is_constexpr_function(x)
        or getattr(x, "__triton_builtin__", False)
        or str(getattr(x, "__module__", "")).startswith(("triton.", "flash_versions.simulator"))
        or type(x).__module__.startswith("triton.")
        or (isinstance(x, tuple) and hasattr(x, "_fields"))
    )


kept: dict[int, tuple[Any, Any]] = {}  # by id: a value and what stands in its place


def rebound(x: Any) -> Any:
    """What a kernel finds in the place of a value."""
    if x is None or isinstance(x, int | float | str | dtype | Language | Function):
        return x
    known = kept.get(id(x))
    if known is not None and known[0] is x:
        return known[1]
    made = made_of(x)
    if not isinstance(x, tuple):
        kept[id(x)] = x, made
    return made


def made_of(x: Any) -> Any:
    """See `rebound`."""
    if isinstance(x, types.ModuleType):
        if x.__name__ == "triton.language.semantic":  # what the compiler is made of
            return x
        ours = x.__name__ == "triton" or x.__name__.startswith("triton.")
        return module_of(x.__name__) if ours else UserModule(x)
    if is_constexpr(x):
        return rebound(x.value)
    if isinstance(x, tuple):
        values = map(rebound, x)
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    home = str(getattr(x, "__module__", "") or "")
    if home.startswith("triton.") and (isinstance(x, type) or callable(x)):
        named = vars(module_of(home)).get(x.__name__)
        return x if named is None else named
    if isinstance(x, Watcher):
        return x
    if is_jit(x):
        return Function(x)
    if is_constexpr_function(x):
        return on_host(x.fn)
    if type(x).__module__.startswith("triton.") and type(x).__name__ in ("dtype", "void"):
        return OF_NAME[x.name]
    if is_aggregate(x):
        return aggregate_of(x)
    if getattr(x, "__triton_builtin__", False):
        return functools.partial(on_host(getattr(x, "__wrapped__", x)), _semantic=Semantic)
    return x


class UserModule:
    """A module of a kernel's author, whose functions are rebound as they are read."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return rebound(getattr(self._module, name))


def on_host(fn: Callable) -> Callable:
    """A function that is Python to the compiler, too: only its names are rebound."""

    @functools.wraps(fn)
    def run(*arguments: Any, **named: Any) -> Any:
        if seen[0] != launch_number:
            seen[0], cells = launch_number, captured(fn)
            for name in (*fn.__code__.co_names, *cells):
                value = cells.get(name, fn.__globals__.get(name, MISSING))
                if value is not MISSING:
                    scope[name] = rebound(value)
        return made(*arguments, **named)

    if not isinstance(fn, types.FunctionType):
        return fn
    seen = [-1]  # the launch in which the names were looked up
    scope: dict[str, Any] = {"__builtins__": fn.__globals__["__builtins__"]}
    made = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return run


class Aggregate:
    """What a class becomes that was decorated with gluon.aggregate."""

    fields: tuple[str, ...] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        if len(values) + len(named) != len(self.fields):
            raise CompileError(f"{type(self).__name__} has the fields {', '.join(self.fields)}")
        vars(self).update(zip(self.fields, values))
        vars(self).update(named)


def aggregate_of(cls: type) -> type:
    """The class of a kernel's records."""
    make = cls.__new__  # of Triton, around the class; of the stand-in, `object`'s own
    written = captured(make).get("cls", cls) if isinstance(make, types.FunctionType) else cls
    methods = {
        name: rebound(x)
        for name, x in vars(cls).items()
        if not name.startswith("__") and (is_jit(x) or is_constexpr_function(x))
    }
    begin = vars(written).get("__init__")
    if begin is not None and "<locals>" not in begin.__qualname__.rpartition(written.__name__)[0]:
        begin = getattr(begin, "fn", begin)
        if begin.__module__ == written.__module__:
            methods["__init__"] = on_host(begin)
    return type(cls.__name__, (Aggregate,), methods | {"fields": tuple(written.__annotations__)})
