"""The functions of a kernel, with the simulator in the place of Triton.

A function keeps its text and is compiled from it once (see `source`). The names that it reads are
looked up anew in every launch, because in a notebook a helper may have been defined again: Triton's
modules become ours, jit functions become `Function`s, compile-time constants their values.
"""

import __future__

import ast
import functools
import itertools
import textwrap
import threading
import types
from collections.abc import Callable
from typing import Any

from flash_versions.simulator import language, source
from flash_versions.simulator.dtypes import OF_NAME, dtype
from flash_versions.simulator.errors import refuse
from flash_versions.simulator.gluon import language as gluon
from flash_versions.simulator.state import here

MISSING = object()
files = set[str]()  # that functions which run are in
launches = itertools.count()
launch_number = 0


class Language:
    """One of Triton's modules: what there is of it."""

    def __init__(self, name: str, **members: Any) -> None:
        self._name = name
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(x for x in vars(self) if not x.startswith("_")))
        refuse(f"the simulator has no {self._name}.{name}; of this module it has {known}")


TL: Any = Language("triton.language", **language.FUNCTIONS)
TL.math = TL.core = TL.standard = TL.random = TL
CUDA = Language("triton.language.extra.cuda", **gluon.CUDA_EXTRA)
TL.extra = Language("triton.language.extra", cuda=CUDA, libdevice=TL)
HOPPER = Language("gluon.language.nvidia.hopper", **gluon.HOPPER)
BLACKWELL = Language("gluon.language.nvidia.blackwell", **gluon.BLACKWELL)
NVIDIA = Language("gluon.language.nvidia", hopper=HOPPER, blackwell=BLACKWELL, ampere=HOPPER)
GL = Language("gluon.language", **language.FUNCTIONS | gluon.GLUON, nvidia=NVIDIA)
GLUON = Language("triton.experimental.gluon", language=GL)
TRITON = Language(
    "triton",
    language=TL,
    cdiv=language.FUNCTIONS["cdiv"],
    next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 1 else n,
    experimental=Language("triton.experimental", gluon=GLUON),
)


def module_of(name: str) -> Any:
    """What stands in the place of a module of Triton, or in that of the one around it."""
    found: Any = TRITON
    for part in name.split(".")[1:]:
        inner = vars(found).get(part)
        if not isinstance(inner, Language | types.ModuleType):
            break
        found = inner
    return found


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


class Names:
    """The names that a function reads, looked up anew in each launch.

    Args:
        fn: the function.
        scope: where it finds them.
    """

    def __init__(self, fn: types.FunctionType, scope: dict[str, Any]) -> None:
        self.fn, self.scope, self.launch = fn, scope, -1
        self.seen: dict[str, Any] = {}
        codes = fn.__code__, *(x for x in fn.__code__.co_consts if isinstance(x, types.CodeType))
        self.names = {name for x in codes for name in (*x.co_names, *x.co_freevars)}

    def refresh(self, may_read: Callable[[Any], bool]) -> None:
        """Look them up. What may not be read stays unknown, and is an error where it is read."""
        known = self.fn.__globals__
        if self.fn.__closure__:
            known = known | captured(self.fn)
        for name in self.names:
            value = known.get(name, MISSING)
            if value is not MISSING and value is not self.seen.get(name, MISSING):
                self.seen[name] = value
                if may_read(value):
                    self.scope[name] = rebound(value)
                else:
                    self.scope.pop(name, None)
        self.launch = launch_number


class Function:
    """A jit function, callable from kernels.

    Attributes:
        fn: the function as it was written.
        file: that it is in.
    """

    def __init__(self, jit: Any) -> None:
        self.fn: types.FunctionType = jit.fn
        self.__name__, self.file = self.fn.__name__, self.fn.__code__.co_filename
        self.text, self.line = textwrap.dedent("".join(jit.raw_src)), jit.starting_line_number
        self.names = Names(self.fn, dict(source.RUNTIME))
        self.made: dict[bool, Callable] = {}  # what runs, by whether it is checked

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        if self.names.launch != launch_number:
            self.names.refresh(is_readable)
        run = self.made.get(here.checking) or self.compiled(here.checking)
        return run(*arguments, **named)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def compiled(self, checked: bool) -> Callable:
        """The function that runs, which compares types if it is to be checked."""
        with parsing:
            files.add(self.file)
            tree: Any = ast.increment_lineno(ast.parse(self.text), self.line - 1)
            rewriter = source.Rewriter(tree.body[0], checked)
            tree.body = [rewriter.visit(rewriter.function)]
            scope, name = self.names.scope, self.__name__
            scope |= rewriter.sites
            itself = scope.get(name)  # for a function that calls itself
            ast.fix_missing_locations(tree)
            exec(compile(tree, self.file, "exec", __future__.annotations.compiler_flag), scope)
            run, scope[name] = scope[name], itself
            run.__defaults__ = self.fn.__defaults__ and tuple(map(rebound, self.fn.__defaults__))
            named = self.fn.__kwdefaults__
            run.__kwdefaults__ = named and {k: rebound(v) for k, v in named.items()}
            self.made[checked] = run
            return run


parsing = threading.RLock()  # Python cannot parse in several threads
EMPTY = types.CellType()


def captured(fn: types.FunctionType) -> dict[str, Any]:
    """The variables of the functions around a function that have a value."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or ())
    return {name: cell.cell_contents for name, cell in cells if cell != EMPTY}


def begin_launch() -> None:
    """Let functions look up their names once more."""
    global launch_number
    launch_number = next(launches)


def is_decorated(x: Any) -> bool:
    """Whether a value is a function that Triton has made something for kernels of."""
    return isinstance(getattr(x, "fn", None), types.FunctionType)


def is_readable(x: Any) -> bool:
    """Whether a kernel may read a global with this value."""
    homes = type(x).__module__, str(getattr(x, "__module__", ""))
    return (
        x is None
        or isinstance(x, types.ModuleType | Function | Watcher | type)
        or any(home.startswith(("triton.", "flash_versions.simulator")) for home in homes)
        or getattr(x, "__triton_builtin__", False)
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
        return module_of(x.__name__) if f"{x.__name__}.".startswith("triton.") else UserModule(x)
    if isinstance(x, tuple):
        values = map(rebound, x)
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    home, kind = str(getattr(x, "__module__", "") or ""), type(x).__name__
    if kind == "constexpr" and hasattr(x, "value"):
        return rebound(x.value)
    if home.startswith("triton.") and (isinstance(x, type) or callable(x)):
        return vars(module_of(home)).get(x.__name__, x)
    if is_decorated(x):
        return on_host(x.fn) if kind == "ConstexprFunction" else Function(x)
    if kind in ("dtype", "void") and type(x).__module__.startswith("triton."):
        return OF_NAME[x.name]
    if isinstance(x, type) and getattr(x, "__triton_aggregate__", False):
        return aggregate_of(x)
    if getattr(x, "__triton_builtin__", False):
        return functools.partial(on_host(getattr(x, "__wrapped__", x)), _semantic=gluon.Semantic)
    return x


class UserModule:
    """A module of a kernel's author, whose functions are rebound as they are read."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return rebound(getattr(self._module, name))


def on_host(fn: Callable) -> Callable:
    """A function that is Python to the compiler, too: only its names are rebound."""
    if not isinstance(fn, types.FunctionType):
        return fn
    names = Names(fn, {"__builtins__": fn.__globals__["__builtins__"]})
    made = types.FunctionType(
        fn.__code__, names.scope, fn.__name__, fn.__defaults__, fn.__closure__
    )
    made.__kwdefaults__ = fn.__kwdefaults__

    @functools.wraps(fn)
    def run(*arguments: Any, **named: Any) -> Any:
        if names.launch != launch_number:
            names.refresh(lambda x: True)
        return made(*arguments, **named)

    return run


class Aggregate:
    """What a class becomes that was decorated with gluon.aggregate."""

    fields: tuple[str, ...] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        if len(values) + len(named) != len(self.fields):
            refuse(f"{type(self).__name__} has the fields {', '.join(self.fields)}")
        vars(self).update(zip(self.fields, values))
        vars(self).update(named)


def aggregate_of(cls: type) -> type:
    """The class of a kernel's records."""
    make = cls.__new__  # of Triton, around the class; of the stand-in, `object`'s own
    written = captured(make).get("cls", cls) if isinstance(make, types.FunctionType) else cls
    methods = {
        name: rebound(x)
        for name, x in vars(cls).items()
        if not name.startswith("__") and is_decorated(x)
    }
    begin = vars(written).get("__init__")
    if begin is not None and "<locals>" not in begin.__qualname__.rpartition(written.__name__)[0]:
        begin = getattr(begin, "fn", begin)
        if begin.__module__ == written.__module__:
            methods["__init__"] = on_host(begin)
    return type(cls.__name__, (Aggregate,), methods | {"fields": tuple(written.__annotations__)})
