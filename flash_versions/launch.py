"""Launching a kernel with little time on the host.

To find the compiled form of a kernel, Triton looks at every number of a call: whether a stride is a
multiple of 16, whether a pointer is aligned. For the fifty or so that attention passes this takes
longer than the launch itself. A `Launcher` asks Triton once and remembers the answer under a key
that says the same in few words; it has to be at least as fine as Triton's own distinctions.
"""

from typing import Any

import torch

from flash_versions.request import Request

MAX_KEYS = 4096


class Launcher:
    """A kernel, with its compiled forms by key: the last few thousand keys, as every new length of
    the queries is another.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        key: tuple,
        grid: tuple[int, ...],
        arguments: tuple,
        constants: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> None:
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
        """
        key = (*key, *constants.values(), num_warps, num_stages)
        compiled = self.compiled.get(key)
        if compiled is not None:
            compiled[grid + (1,) * (3 - len(grid))](*arguments, *constants.values())
            return
        compiled = self.kernel[grid](
            *arguments, **constants, num_warps=num_warps, num_stages=num_stages
        )
        if compiled is not None:  # an interpreted kernel has no compiled form
            if len(self.compiled) >= MAX_KEYS:
                self.compiled.clear()
            self.compiled[key] = compiled


def layout(request: Request) -> tuple:
    """The key of a request: everything but its counts of keys and sequences, its values, and where
    they are.
    """
    k_shape = request.k.shape
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
        *map(
            placement,
            (
                request.q,
                request.k,
                request.v,
                request.alibi_slopes,
                request.sink,
                request.dropout_seed,
                request.cu_seqlens_q,
                request.cu_seqlens_k,
                request.kv_lengths,
                request.kv_starts,
                request.block_table,
            ),
        ),
    )


def placement(x: torch.Tensor | None) -> tuple | None:
    """What a compiled kernel may know of a tensor: type, strides, an aligned pointer."""
    return None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16 == 0)
