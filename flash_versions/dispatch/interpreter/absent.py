"""Where triton is missing (macOS, Windows), modules with kernels still import; a launch refuses.

Triton has wheels for Linux only. Attention by torch (`version="sdpa"`), the transformer with it and
everything that reads sources or results need no kernel. So the modules of this package and of
`transformer` get `Absent` for what they import from triton. Only they do: `import triton` of
anything else fails as before, because torch and others ask by it whether triton is there.
"""

import builtins
import sys
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = (__name__.partition(".")[0], "transformer")
# Functions that declare something while a module is imported; others compute.
DECLARING = ("aggregate", "builtin", "constexpr", "constexpr_function", "jit")
WHAT_WORKS = (
    "pip install triton"
    if sys.platform == "linux"
    else f"it has no wheels for {sys.platform}, so use WSL, a container or Colab"
)
SENTENCE = (
    f"triton is not installed and this needs it; {WHAT_WORKS}, or choose sdpa, torch's own "
    "attention, which needs no triton."
)


@cache
def triton_missing() -> str:
    """One sentence that says that triton is not installed; "" if it is."""
    try:
        return "" if find_spec("triton") else SENTENCE
    except ImportError:
        return SENTENCE


class AbsentError(ImportError, ValueError):
    """A kernel was called and triton is not installed. Commands report ValueErrors in a line."""


class Absent:
    """Anything of triton: its attributes are absent too, declarations pass, other calls refuse."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name in ("__version__", "fn"):  # fn: the function of a kernel
            raise AbsentError(SENTENCE)
        if name.startswith("__"):  # such as __wrapped__, by which others ask what an object is
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        """What is declared: a class's object or `name(value)`; AbsentError for what computes."""
        name = self._name.rpartition(".")[2]
        if not name[0].isupper() and name not in DECLARING:
            raise AbsentError(SENTENCE)
        if name not in DECLARING or not args:  # jit(do_not_specialize=...) awaits the function
            return self
        [declared] = args
        return Absent(declared.__name__) if name in ("builtin", "jit") else declared

    def __getitem__(self, grid: Any) -> Any:
        raise AbsentError(SENTENCE)

    def __or__(self, other: Any) -> "Absent":  # in annotations
        return self

    __ror__ = __or__


def import_without_triton(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    """`__import__`, with `Absent` for triton."""
    top = name.partition(".")[0]
    if level == 0 and top == "triton":
        return Absent(name if fromlist else top)
    return builtins.__import__(name, globals, locals, fromlist, level)


class Loader(SourceFileLoader):
    """Runs a module whose import statements call `import_without_triton`."""

    def exec_module(self, module: ModuleType) -> None:
        """Run it. Python looks `__import__` up in the `__builtins__` of a module."""
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": import_without_triton}
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finds the modules of both packages as Python would, and gives them the `Loader`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(fullname, str(spec.loader.path))
        return spec


def import_kernels_without_triton() -> None:
    """Let the modules of both packages that are imported from now on do without triton."""
    sys.meta_path.insert(0, Finder())
