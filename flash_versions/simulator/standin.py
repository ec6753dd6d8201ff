"""What can be imported as `triton` where it is not installed (macOS, Windows): enough of it to
write kernels and to simulate them.

Only this package, `transformer` and modules outside of site-packages, such as a learner's, get it,
because torch and others ask by importing triton whether it is there.
"""

import builtins
import inspect
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flash_versions.simulator.launch import launch
from flash_versions.simulator.rebind import Language, module_of

PACKAGES = (__name__.partition(".")[0], "transformer")
OPERATORS = "add sub mul truediv floordiv mod pow lshift rshift and or xor lt le gt ge eq ne"


class constexpr:  # noqa: N801
    """A compile-time constant, as it is outside of kernels."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, constexpr) else value

    def __index__(self) -> int:
        return operator.index(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __neg__(self) -> "constexpr":
        return constexpr(-self.value)

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"

    def __hash__(self) -> int:
        return hash(self.value)


def _unwrapped(x: Any) -> Any:
    return x.value if isinstance(x, constexpr) else x


def _add_operator(name: str) -> None:
    compute = getattr(operator, name)
    reflected = name.replace("__", "__r", 1)
    setattr(constexpr, name, lambda a, b: constexpr(compute(a.value, _unwrapped(b))))
    setattr(constexpr, reflected, lambda a, b: constexpr(compute(_unwrapped(b), a.value)))


for _name in OPERATORS.split():
    _add_operator(f"__{_name}__")


class ConstexprFunction:
    """A function that runs when a kernel is compiled."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        values = {name: _unwrapped(x) for name, x in named.items()}
        return self.fn(*map(_unwrapped, arguments), **values)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else lambda *arguments: self(instance, *arguments)


class JITFunction:
    """A kernel, or a function for kernels."""

    def __init__(self, fn: Any, gluon: bool) -> None:
        self.fn, self.is_gluon = fn, lambda: gluon
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.raw_src, self.starting_line_number = inspect.getsourcelines(fn)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **named: self.run(*arguments, grid=grid, **named)

    def run(self, *arguments: Any, grid: Any, **named: Any) -> None:
        """Launch it."""
        launch(self, grid, arguments, named)

    run.simulates = True  # type: ignore[attr-defined]

    def __call__(self, *arguments: Any, **named: Any) -> None:  # noqa: D102
        raise RuntimeError(
            f"{self.__name__} is a kernel: launch it with {self.__name__}[grid](...)"
        )


def jit(fn: Any = None, gluon: bool = False, **options: Any) -> Any:
    """triton.jit or gluon.jit, with options or without."""
    return partial(jit, gluon=gluon) if fn is None else JITFunction(fn, gluon)


def marked(name: str) -> Callable[[Any], Any]:
    """A decorator that only says what a class or a function is."""

    def mark(x: Any) -> Any:
        setattr(x, name, True)
        return x

    return mark


@dataclass(eq=False)
class TensorDescriptor:
    """Boxes of a tensor, as the host describes them; Gluon's have a layout."""

    base: Any
    shape: Any
    strides: Any
    block_shape: Any
    layout: Any = None
    padding: str = "zero"

    @staticmethod
    def from_tensor(tensor: Any, block_shape: Any, layout: Any = None) -> "TensorDescriptor":
        """All of a tensor."""
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, layout)


# What there is outside of kernels: in each module, and in that of this name.
OUTSIDE: dict[str, Any] = {
    "constexpr": constexpr,
    "constexpr_function": ConstexprFunction,
    "builtin": marked("__triton_builtin__"),
    "aggregate": marked("__triton_aggregate__"),
    "_aggregate": marked("__triton_aggregate__"),
    "JITFunction": JITFunction,
    "TensorDescriptor": TensorDescriptor,
    "TritonError": type("TritonError", (Exception,), {}),
    "triton.jit": jit,
    "triton.experimental.gluon.jit": partial(jit, gluon=True),
}


class Absent:
    """What there is of Triton only where it is installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:  # noqa: D102
        raise ImportError(f"{self._name} is part of Triton's compiler, and triton is not installed")


class Host(types.ModuleType):
    """One of Triton's modules outside of kernels."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        for key in (path, name):
            if key in OUTSIDE:
                return OUTSIDE[key]
        found = vars(module_of(self.__name__)).get(name)
        if isinstance(found, Language):
            return Host(path)
        return Absent(path) if found is None else found


def gets_standin(importer: dict[str, Any]) -> bool:
    """Whether the module that imports triton gets what is here."""
    package = str(importer.get("__name__", "")).partition(".")[0]
    file = str(importer.get("__file__") or "")
    return package in PACKAGES or ("-packages" not in file and package != "torch")


def install() -> None:
    """Let `import triton` give what is here, where triton is not installed."""
    original = builtins.__import__

    def import_module(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level or name.partition(".")[0] != "triton" or not gets_standin(globals or {}):
            return original(name, globals, locals, fromlist, level)
        return Host(name if fromlist else "triton")

    builtins.__import__ = import_module
