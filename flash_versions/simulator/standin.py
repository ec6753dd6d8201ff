"""What can be imported as `triton` where it is not installed (macOS, Windows): enough of it to
write kernels and to simulate them.

Only this package, `transformer` and modules outside of site-packages, such as a learner's, get it,
because torch and others ask by importing triton whether it is there.
"""

import builtins
import inspect
import operator
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from flash_versions.simulator.launch import launch
from flash_versions.simulator.rebind import MODULES, Language

PACKAGES = (__name__.partition(".")[0], "transformer")
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or",
    "xor", "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip


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


for _name in OPERATORS:
    _function = getattr(operator, f"__{_name}__")
    setattr(
        constexpr, f"__{_name}__", lambda a, b, f=_function: constexpr(f(a.value, _unwrapped(b)))
    )
    setattr(
        constexpr, f"__r{_name}__", lambda a, b, f=_function: constexpr(f(_unwrapped(b), a.value))
    )


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
        self.fn, self.gluon = fn, gluon
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.raw_src, self.starting_line_number = inspect.getsourcelines(fn)

    def is_gluon(self) -> bool:
        """Whether it is written in Gluon."""
        return self.gluon

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


def decorator(gluon: bool) -> Callable[..., Any]:
    """triton.jit or gluon.jit."""

    def jit(fn: Any = None, **options: Any) -> Any:
        return jit if fn is None else JITFunction(fn, gluon)

    return jit


def aggregate(cls: Any) -> Any:
    """gluon.aggregate."""
    cls.__triton_aggregate__ = True
    return cls


def builtin(fn: Any) -> Any:
    """A function that Triton's compiler calls."""
    fn.__triton_builtin__ = True
    return fn


class TensorDescriptor:
    """Boxes of a tensor, as the host describes them; Gluon's have a layout."""

    def __init__(
        self,
        base: Any,
        shape: Any,
        strides: Any,
        block_shape: Any,
        layout: Any = None,
        padding: str = "zero",
    ) -> None:
        self.base, self.shape, self.strides = base, shape, strides
        self.block_shape, self.padding = block_shape, padding
        if layout is not None:
            self.layout = layout

    @staticmethod
    def from_tensor(tensor: Any, block_shape: Any, layout: Any = None) -> "TensorDescriptor":
        """All of a tensor."""
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, layout)


class TritonError(Exception):
    """What Triton's compiler raises."""


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


class Host(Language):
    """One of Triton's modules outside of kernels; `inside` is what a kernel finds."""

    def __init__(self, name: str, inside: Language, **members: Any) -> None:
        super().__init__(name, **members)
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = vars(self._inside).get(name)
        return Absent(f"{self._name}.{name}") if found is None else found


def make_modules() -> dict[str, Any]:
    """What is imported, by the names of Triton's modules."""
    shared: dict[str, Any] = {
        "constexpr": constexpr,
        "constexpr_function": ConstexprFunction,
        "builtin": builtin,
    }
    of_gluon: dict[str, Any] = {"jit": decorator(gluon=True), "aggregate": aggregate, **shared}
    made: dict[str, Any] = {}
    for name, inside in MODULES.items():
        more = of_gluon if name == "triton.experimental.gluon" else shared
        made[name] = Host(name, inside, **more) if isinstance(inside, Language) else inside
    extra: dict[str, dict[str, Any]] = {
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": TensorDescriptor},
        "triton.experimental.gluon.language._core": shared,
        "triton.language.core": shared | {"_aggregate": aggregate},
        "triton.tools.tensor_descriptor": {"TensorDescriptor": TensorDescriptor},
        "triton.errors": {"TritonError": TritonError},
        "triton.runtime.jit": {"JITFunction": JITFunction},
    }
    for name, members in extra.items():
        made[name] = Host(name, made["triton.language"]._inside, **members)
    made["triton"].jit = decorator(gluon=False)
    for name, module in made.items():  # each is an attribute of the one around it
        parent, _, own = name.rpartition(".")
        if isinstance(made.get(parent), Host):
            setattr(made[parent], own, module)
    return made


def gets_standin(importer: dict[str, Any]) -> bool:
    """Whether the module that imports triton gets what is here."""
    package = str(importer.get("__name__", "")).partition(".")[0]
    file = str(importer.get("__file__") or "")
    return package in PACKAGES or ("-packages" not in file and package != "torch")


def install() -> None:
    """Let `import triton` give what is here, where triton is not installed."""
    original, modules = builtins.__import__, dict[str, Any]()

    def import_module(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level or name.partition(".")[0] != "triton" or not gets_standin(globals or {}):
            return original(name, globals, locals, fromlist, level)
        if not modules:
            modules.update(make_modules())
        return modules["triton"] if not fromlist else modules.get(name) or Absent(name)

    builtins.__import__ = import_module


def is_needed() -> bool:
    """Whether triton is not installed."""
    return find_spec("triton") is None
