"""Launching kernels with little time on the host.

To find the compiled form of a kernel, Triton looks at each argument of a call: is a stride a
multiple of 16, is a pointer aligned? For the fifty or so arguments of attention it takes longer
than the launch itself. A `Launcher` asks Triton once for each class of arguments: `kinds_of` makes
the same distinctions as Triton. Lengths, strides and totals are numbers at run time, so a new
length is no new class.
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton.language as tl
from triton.runtime import driver as runtime_driver
from triton.runtime.jit import JITFunction

from flash_versions.dispatch.replay.driver import has_hooks, is_descriptor
from flash_versions.dispatch.replay.recording import note, plain
from flash_versions.dispatch.replay.traced import Traced


class Launcher:
    """A kernel, with its compiled forms by the kinds of its arguments.

    Args:
        kernel: of Triton or Gluon. Its parameters in do_not_specialize, its module's COUNTS, differ
            from call to call, a growing cache's with every token, so no kernel is compiled for each
            value. They stay below 2^31.
        options: further ones of Triton.
            launch_pdl=True: it is launched while the kernel before it runs, and waits for that by
            gdc_wait. maxnreg: registers of a thread at the start of a program, so that more
            programs fit.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.compiled: dict[tuple, Any] = {}
        parameters = getattr(kernel, "params", ())
        # The places of the arguments that Triton looks at, and of those of which it only asks
        # whether they are None.
        arguments = [(i, x) for i, x in enumerate(parameters) if not x.is_constexpr]
        self.looked_at = [i for i, x in arguments if not x.do_not_specialize]
        self.optional = [i for i, x in arguments if x.do_not_specialize]

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: tuple,
        constants: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 2,
        key: tuple | None = None,
    ) -> Any:
        """Launch the kernel on `grid`.

        Args:
            grid: one to three dimensions.
            arguments: the run-time parameters, in order.
            constants: the tl.constexpr parameters that follow them, in order.
            num_warps: warps of a program.
            num_stages: stages of software pipelining.
            key: all that decides which compiled form there is, if the caller knows it.

        Returns:
            the compiled form; None of a kernel that is simulated.
        """
        values = tuple(constants.values())
        key = key or (
            num_warps,
            num_stages,
            # The hash of a function is that of its source.
            *[id(x) if type(x) is JITFunction else x for x in values],
            *kinds_of([arguments[i] for i in self.looked_at]),
            *[arguments[i] is None for i in self.optional],
        )
        compiled = self.compiled.get(key)
        if compiled is not None:
            start(compiled, grid, (*arguments, *values))
            return compiled
        compiled = self.kernel[plain(grid)](
            *plain(arguments), **plain(constants), num_warps=num_warps, num_stages=num_stages,
            **self.options
        )  # fmt: skip
        note(compiled, (*grid, 1, 1)[:3], (*arguments, *values))
        if compiled is not None:  # a simulated kernel has no compiled form
            self.compiled[key] = compiled
        return compiled


def kinds_of(arguments: Iterable[Any]) -> list:
    """What Triton's compiler knows of arguments, as a part of a key: of a tensor its type and
    device, and whether it is aligned to 16 bytes; of an integer whether it is 1, a multiple of 16,
    or needs 64 bits; of a descriptor its box; of a compile-time constant its value.
    """
    found: list[Any] = []
    for x in arguments:
        kind = type(x.value) if type(x) is Traced else type(x)
        if isinstance(x, torch.Tensor):
            found += x.dtype, x.get_device(), x.data_ptr() % 16 == 0
        elif kind is int:
            found.append(1 if x == 1 else 2 + (x % 16 == 0) + 2 * (x < 2**31))
        elif x is None or kind is float:
            found.append(kind)
        elif kind is tl.constexpr:
            found.append(x.value)
        elif isinstance(x, tuple):
            found += kind, *kinds_of(x)
        elif is_descriptor(x):
            found += x.base.dtype, x.base.get_device(), *x.block_shape, getattr(x, "layout", None)
        else:
            found.append(x)
    return found


def start(compiled: Any, grid: tuple[int, ...], arguments: tuple) -> None:
    """Launch a compiled form that was launched before: compiled[grid](*arguments), but it skips the
    hook calls if no hook is set, such as a profiler's.
    """
    (x, y, z), arguments = note(compiled, (*grid, 1, 1)[:3], arguments)
    if has_hooks():
        compiled[x, y, z](*arguments)
        return
    driver = runtime_driver.active
    stream = driver.get_current_stream(driver.get_current_device())
    about = compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, stream, *about, None, None, None, *arguments)
