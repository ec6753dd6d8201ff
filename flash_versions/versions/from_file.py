"""A version from your file, see docs/extend/add_a_version.md: `flash_versions.mine` writes one.

The file has FEATURES and `forward(request)`; it may have `backward(request, o, lse, do, dlse)` and
`limits(request)`, as a `Version` has it.
"""

import re
import sys
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType

import torch

from flash_versions.dispatch.replay import keys
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import (
    EXPLICIT,
    Backward,
    Forward,
    Version,
    fp8_limits,
    kernel_limits,
)
from flash_versions.versions.fa2 import backward as fa2_backward

# Each feature, and whether a request needs it.
FEATURES: dict[str, Callable[[Request], bool]] = {
    "causal": lambda x: x.window_left is None and x.window_right == 0,
    "window": lambda x: x.window_left is not None or x.window_right not in (None, 0),
    "softcap": lambda x: x.softcap is not None,
    "alibi_slopes": lambda x: x.alibi_slopes is not None,
    "sink": lambda x: x.sink is not None,
    "dropout_p": lambda x: x.dropout_p > 0,
    "kv_lengths": lambda x: x.kv_lengths is not None,
    "cu_seqlens": lambda x: x.cu_seqlens_q is not None or x.cu_seqlens_k is not None,
    "kv_starts": lambda x: x.kv_starts is not None,
    "block_table": lambda x: x.block_table is not None,
    "query_intervals": lambda x: x.has_intervals,
    "grouped_heads": lambda x: x.group > 1,
    "head_dim_v": lambda x: x.v.shape[3] != x.q.shape[3],
    "num_splits": lambda x: x.num_splits not in (None, 1),
    "precision": lambda x: x.precision is not None,
}


def load_version(path: str | PathLike[str]) -> Version:
    """Load a version from a file: `attention(q, k, v, version="mine.py")` then runs it.

    Args:
        path: of the file. The text that is given here is the version's name. A file that changed
            counts from the next time it is loaded.

    Raises:
        ValueError: the file cannot be a version; the sentence says why.
        OSError: there is no such file.
    """
    name = fspath(path)
    EXPLICIT[name] = make_version(name, run_file(Path(path)), name)
    keys.known.clear()  # calls of the file as it was before
    return EXPLICIT[name]


def make_version(
    name: str, module: ModuleType, source: str, backward: Backward | None = None
) -> Version:
    """The version of a module that has what such a file has.

    Args:
        name: the version's.
        module: the file's.
        source: where the file is.
        backward: in the place of the module's own.

    Raises:
        ValueError: the module cannot be a version; the sentence says why.
    """
    forward = getattr(module, "forward", None)
    if not callable(forward):
        raise ValueError(f"{name} has no function `forward(request)`.")
    declared = getattr(module, "FEATURES", None)
    if not isinstance(declared, tuple | list | set | frozenset):
        raise ValueError(f'{name} has no FEATURES, such as FEATURES = ("causal", "kv_lengths").')
    if unknown := [x for x in declared if x not in FEATURES]:
        raise ValueError(f"{name}: FEATURES has {unknown[0]!r}; there are {', '.join(FEATURES)}.")
    own_limits = getattr(module, "limits", lambda request: None)

    def limits(request: Request) -> str | None:
        for feature, is_needed in FEATURES.items():
            if feature not in declared and is_needed(request):
                return f"{feature} is not in its FEATURES."
        common = kernel_limits if request.precision is None else fp8_limits
        return common(request) or own_limits(request)

    backward = backward or getattr(module, "backward", None)
    return Version(
        name=name,
        title=(module.__doc__ or name).strip().splitlines()[0],
        wasted="",
        idea="",
        source=source,
        forward=checked_forward(name, forward),
        limits=limits,
        backward=checked_backward(name, backward) if backward else fa2_backward.backward,
    )


def run_file(path: Path) -> ModuleType:
    """The module in a file, run anew; ValueError if it cannot be run."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there; python -m flash_versions.mine new writes such a file."
        )
    if path.suffix != ".py":
        raise ValueError(f"{path} is no Python file; its name must end in .py.")
    module = ModuleType(re.sub(r"\W", "_", str(path.resolve())))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # Triton reads a kernel's source by its module
    try:
        # An import might run Python's own bytecode, which does not see a change in the same second.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def checked_forward(name: str, forward: Callable) -> Forward:
    """A file's forward as a version's, which refuses results of a wrong shape or dtype."""

    def run(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
        q = request.q
        found = forward(request)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"{name}: forward must return (o, lse); it returned {_kind(found)}.")
        o, lse = found
        _check(name, "o", o, (*q.shape[:3], request.v.shape[3]), q.dtype)
        _check(name, "lse", lse, (q.shape[0], q.shape[2], q.shape[1]), torch.float32)
        return o, lse, None

    return run


def checked_backward(name: str, backward: Callable) -> Backward:
    """A file's backward as a version's, which refuses results of a wrong shape or dtype."""

    def run(request: Request, o, lse, statistics, do, dlse):
        found = backward(request, o, lse, do, dlse)
        wanted = ("q", "k", "v") if request.sink is None else ("q", "k", "v", "sink")
        if not isinstance(found, tuple) or len(found) != len(wanted):
            names = ", ".join(f"d{x}" for x in wanted)
            raise ValueError(f"{name}: backward must return ({names}); it returned {_kind(found)}.")
        for x, gradient in zip(wanted, found):
            of = getattr(request, x)
            _check(name, f"d{x}", gradient, tuple(of.shape), of.dtype)
        return found if len(found) == 4 else (*found, None)

    return run


def _kind(x: object) -> str:
    return f"{len(x)} values" if isinstance(x, tuple) else f"a {type(x).__name__}"


def _check(name: str, result: str, x: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: {result} is a {type(x).__name__}; it must be a torch.Tensor.")
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise ValueError(
            f"{name}: {result} has shape {tuple(x.shape)} and dtype {x.dtype}; of this call it is "
            f"{shape} and {dtype}."
        )
