"""Launching kernels with little time on the host: what can be known before is remembered.

To find the compiled form of a kernel, Triton looks at every number of a call: whether a stride is a
multiple of 16, whether a pointer is aligned. For the fifty or so that attention passes this takes
longer than the launch itself. A `Launcher` asks Triton once and remembers the answer under a key
that says the same in few words; it has to be at least as fine as Triton's own distinctions.

Which kernel serves a request, with which tiles, grid and constants, follows from the request and
not from the values in its tensors or where they are. `remembered` keeps it: as a `Plan`, to which a
launch adds the tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from triton.runtime import driver as runtime_driver

from flash_versions.dispatch.replay.driver import has_hooks
from flash_versions.dispatch.replay.recording import note
from flash_versions.dispatch.request import PLACES, Request

MAX_KEYS = 4096


class Launcher:
    """A kernel, with its compiled forms by key: at most MAX_KEYS, because every new length of the
    queries is another key. When there are so many, all are dropped.

    Args:
        kernel: of Triton or Gluon.
        options: further ones of Triton.
            launch_pdl=True: it is launched while the kernel before it runs, and waits for that by
            gdc_wait. maxnreg: registers of a thread at the start of a program, so that more
            programs fit.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        key: tuple,
        grid: tuple[int, ...],
        arguments: tuple,
        constants: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> Any:
        """Launch the kernel on `grid`.

        Args:
            key: everything about the arguments that the compiled code may depend on; hashable.
                `layout` gives it for a request. Parameters in do_not_specialize, which stay below
                2^31, need not be in it.
            grid: one to three dimensions.
            arguments: the run-time parameters, in order.
            constants: the tl.constexpr parameters that follow them, in order.
            num_warps: warps of a program.
            num_stages: stages of software pipelining.

        Returns:
            the compiled form; None of a kernel that is simulated.
        """
        key = (*key, *constants.values(), num_warps, num_stages)
        whole = grid + (1,) * (3 - len(grid)), (*arguments, *constants.values())
        compiled = self.compiled.get(key)
        if compiled is not None:
            start(compiled, *whole)
            return compiled
        compiled = self.kernel[grid](
            *arguments, **constants, num_warps=num_warps, num_stages=num_stages, **self.options
        )
        note(compiled, *whole)
        if compiled is not None:  # a simulated kernel has no compiled form
            if len(self.compiled) >= MAX_KEYS:
                self.compiled.clear()
            self.compiled[key] = compiled
        return compiled

    def launch(self, plan: "Plan", tensors: tuple) -> None:
        """Launch the kernel as planned, on the tensors that come before the plan's numbers."""
        arguments = (*tensors, *plan.numbers)
        if plan.compiled is None:
            plan.compiled = self(plan.key, plan.grid, arguments, plan.constants)
        else:
            start(plan.compiled, plan.grid, (*arguments, *plan.constants.values()))


def start(compiled: Any, grid: tuple[int, ...], arguments: tuple) -> None:
    """Launch a compiled form that was launched before: compiled[grid](*arguments), but it skips the
    hook calls if no hook is set, such as a profiler's.
    """
    note(compiled, grid, arguments)
    if has_hooks():
        compiled[grid](*arguments)
        return
    driver = runtime_driver.active
    stream = driver.get_current_stream(driver.get_current_device())
    about = compiled.function, compiled.packed_metadata
    compiled.run(*grid, stream, *about, None, None, None, *arguments)


@dataclass
class Plan:
    """A launch but for the tensors: what follows from the `description` of a request.

    Attributes:
        config: the switches of the kernel.
        key: as a `Launcher` takes it, for tensors that are aligned where the request's are.
        grid: three dimensions.
        numbers: the run-time parameters behind the tensors.
        constants: the tl.constexpr parameters.
        compiled: the kernel, once it was launched so.
    """

    config: Any
    key: tuple
    grid: tuple[int, int, int]
    numbers: tuple
    constants: dict[str, Any]
    compiled: Any = None


def remembered(decide: Callable[..., Any]) -> Callable[..., Any]:
    """decide(request, *about), called once for each `description` of a request, each GPU and each
    `about`: it may depend on nothing else. On the CPU, where kernels are simulated or compiled
    for any GPU, it is called every time.
    """

    @wraps(decide)
    def answer(request: Request, *about: Any) -> Any:
        if not on_gpu(request):
            return decide(request, *about)
        key = (decide, *about, *description(request))
        found = decided.get(key)
        if found is None:
            found = decide(request, *about)
            if len(decided) >= MAX_KEYS:
                decided.clear()
            decided[key] = found
        return found

    return answer


decided: dict[tuple, Any] = {}  # what `remembered` functions answered: MAX_KEYS, then none


def on_gpu(request: Request) -> bool:
    """Whether a request is about tensors on a GPU."""
    return request.q.is_cuda


def description(request: Request) -> tuple:
    """All that is known of a request without reading its tensors, as a key; the address of a tensor
    counts by its alignment, and gradients by whether they have to be the same to the bit.
    """
    return (
        request.q.device,
        request.is_deterministic,
        *[
            (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x
            for x in request
        ],
    )


def layout(request: Request) -> tuple:
    """The key of a request: everything but its counts of keys and sequences, its values, and where
    they are.
    """
    k_shape = request.k.shape
    fields: tuple[Any, ...] = request
    return (
        request.q.device,
        request.q.shape,
        k_shape[2],
        request.block_table is not None and k_shape[1],
        request.v.shape[3],
        request.window_left,
        request.window_right,
        request.softcap is None,
        request.dropout_p,
        request.precision,
        *[placement(fields[i]) for i in PLACES],
    )


def placement(x: torch.Tensor | None) -> tuple | None:
    """What a compiled kernel may know of a tensor: type, strides, an aligned pointer."""
    return None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0)
