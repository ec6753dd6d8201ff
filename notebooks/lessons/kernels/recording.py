"""A kernel that is watched: simulated, with a note of every block that it folds.

The kernel is the package's own. While it runs, the functions that it calls on a tile are wrapped;
they compute what they always compute.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from flash_versions import VERSIONS
from flash_versions.dispatch.request import Request, make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.simulator import language
from flash_versions.simulator.rebind import Watcher, rebound
from flash_versions.simulator.state import here
from flash_versions.simulator.values import Tile

STATE = ("o", "acc", "row_max", "row_sum")


class Step(NamedTuple):
    """One block of keys folded into the state of one query tile.

    Attributes:
        program: number of the program on the grid's first axis.
        split: its number on the second axis; 0 where keys are not split.
        j: number of the KV block.
        before: arrays by name: the state (o or acc, row_max, row_sum), and the tiles q, k, v.
        after: the new state; s, the scores as the softmax takes them; p; alpha.
    """

    program: int
    split: int
    j: int
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


class Recording(list[Step]):
    """The steps of a call in the order in which they ran, and its results `o` and `lse`."""

    o: torch.Tensor
    lse: torch.Tensor


def record(
    version: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_q: int | None = None,
    block_kv: int | None = None,
    **options: Any,
) -> Recording:
    """Simulate a version's portable forward kernel and keep every intermediate.

    Args:
        version: such as "fa1".
        q: (batch, M, heads, head_dim) on the CPU.
        k: (batch, N, kv_heads, head_dim).
        v: (batch, N, kv_heads, head_dim_v).
        block_q: rows of a query tile, a power of two; None: as the package chooses, or 16 if the
            other one is given.
        block_kv: keys of a block, likewise.
        options: further arguments of `flash_versions.attention`, such as causal, or of the
            version's `forward`, such as FA4's threshold.

    Raises:
        ValueError: there is no such version, or no such call.
    """
    module = forward_of(version)
    own = set(inspect.signature(module.forward).parameters) - {"request", "config"}
    request = make_request(
        q, k, v, **{name: value for name, value in options.items() if name not in own}
    )
    recording = Recording()
    with unchecked(), watched(module, recording, request):
        recording.o, recording.lse, _ = module.forward(
            request,
            config_of(block_q, block_kv),
            **{name: value for name, value in options.items() if name in own},
        )
    return recording


def forward_of(version: str) -> ModuleType:
    """The module of a version's portable forward."""
    try:
        return importlib.import_module(f"flash_versions.versions.{version}.forward")
    except ModuleNotFoundError:
        known = ", ".join(VERSIONS)
        raise ValueError(f"there is no version {version!r}; there are {known}.") from None


def config_of(block_q: int | None, block_kv: int | None) -> LaunchConfig | None:
    """Tile sizes with those that were asked for; None if none was."""
    if block_q is None and block_kv is None:
        return None
    for name, size in (("block_q", block_q), ("block_kv", block_kv)):
        if size is not None and (size < 1 or size & (size - 1)):
            raise ValueError(f"{name}={size} is not possible; powers of two are.")
    return LaunchConfig(block_q or 16, block_kv or 16, num_warps=4, num_stages=1)


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, launches run what a GPU would run and check nothing but memory. Else a kernel's first
    launch also looks at branches that it does not take, and products sum over 16 numbers or more: a
    reader sees all of a tile that has 4 rows.
    """
    with patch.object(language, "MIN_DOT", 1), patch.object(here, "trusts", True):
        yield


@contextmanager
def watched(module: ModuleType, recording: Recording, request: Request) -> Iterator[None]:
    """Wrap what the kernel of a module calls on a tile, so that `recording` grows as it runs."""
    widths = {"q": request.q.shape[3], "k": request.k.shape[3]}
    widths |= dict.fromkeys(("v", "o", "acc"), request.v.shape[3])
    seen: dict[str, np.ndarray] = {}  # of the block that is being folded
    fold = rebound(module.fold_block)
    parameters = inspect.signature(module.fold_block.fn).parameters

    def keep(name: str, value: Any) -> None:
        array = array_of(value)
        seen[name] = array[:, : widths[name]] if name in widths else array

    def fold_block(*args: Any, **named: Any) -> Any:
        given = dict(zip(parameters, args)) | named
        seen.clear()
        for name in STATE:
            if name in given:
                keep(name, given[name])
        keep("q", given["q_tile"])
        before = dict(seen)
        seen.clear()
        result = fold(*args, **named)
        before |= {name: seen.pop(name) for name in ("k", "v") if name in seen}
        names = [name for name in parameters if name in STATE]
        for name, value in zip(names, result):
            keep(name, value)
        program, split, _ = here.program.ids
        recording.append(Step(program, split, number(given["j"]), before, dict(seen)))
        return result

    def load_rows(*args: Any, **named: Any) -> Any:
        tile = original["load_rows"](*args, **named)
        keep("v" if "k" in seen else "k", tile)
        return tile

    def softmax_step(s: Any, *args: Any) -> Any:
        p, row_max, row_sum, alpha = original["softmax_step"](s, *args)
        for name, value in (("s", s), ("p", p), ("alpha", alpha)):
            keep(name, value)
        return p, row_max, row_sum, alpha

    def raise_reference(s: Any, *args: Any) -> Any:
        row_max, pivot, alpha = original["raise_reference"](s, *args)
        for name, value in (("s", s), ("alpha", alpha)):
            keep(name, value)
        return row_max, pivot, alpha

    def mixed_exp2(*args: Any) -> Any:
        p = original["mixed_exp2"](*args)
        keep("p", p)
        return p

    wrappers: list[Callable[..., Any]] = [load_rows, softmax_step, raise_reference, mixed_exp2]
    present = [wrapper for wrapper in wrappers if hasattr(module, wrapper.__name__)]
    original = {x.__name__: rebound(getattr(module, x.__name__)) for x in present}
    with ExitStack() as stack:
        for wrapper in (fold_block, *present):
            name = wrapper.__name__
            watcher = Watcher(getattr(module, name), wrapper)
            stack.enter_context(patch.object(module, name, watcher))
        if hasattr(module, "decodes"):  # few queries would go to another kernel
            stack.enter_context(patch.object(module, "decodes", lambda request: False))
        yield


def array_of(value: Any) -> np.ndarray:
    """What a simulated kernel computes with, as an array of its own; 16 bits become fp32."""
    array = np.array(value.a if isinstance(value, Tile) else value)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def number(value: Any) -> int:
    """A whole number of a simulated kernel, known when it is compiled or when it runs."""
    return int(array_of(value).item())
