"""The last layer below a launch: compiled kernels as Triton's driver takes them.

`compiled.run` encodes the descriptors of a launch, asks for scratch memory, and checks each address
with the driver. A launch that was made before needs none of that; only the descriptor of a tensor
at a new address is encoded again. This is the only file that knows how versions of Triton differ
there; what it does not know is launched by `compiled.run`.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from triton import knobs
from triton.runtime import driver as runtime_driver

Start = Callable[[tuple[int, ...], int, Sequence], None]  # of a grid, a stream and arguments


class Address:
    """An address in the form of a tensor, as descriptors and launches ask for it."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def has_hooks() -> bool:
    """Whether somebody, such as a profiler, wants to be told of launches by Triton."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # chains, or one


def is_descriptor(x: Any) -> bool:
    """Whether an argument of a kernel is a tensor descriptor, of Triton or of Gluon."""
    return hasattr(x, "base") and hasattr(x, "block_shape")


def moved(descriptor: Any, address: int) -> Any:
    """The descriptor of a tensor that lies elsewhere."""
    copy: Any = object.__new__(type(descriptor))
    copy.__dict__ = {**vars(descriptor), "base": Address(address)}
    return copy


class Kernel:
    """A compiled kernel that was launched before.

    Attributes:
        start: launches it. A pointer is an int. In the place of a descriptor come the arguments
            that `expand` makes of it, the first of which depends on the address.
    """

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.start: Start = self.run
        self.metadata: Sequence | None = None  # of the descriptors; None: they stay as they are
        self.encode: Callable[..., list] | None = None
        run = compiled.run
        if type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
            return
        if run.global_scratch_size > 0 or run.profile_scratch_size > 0:
            return
        encode = getattr(sys.modules[type(run).__module__], "make_tensordesc_arg", None)
        shared = getattr(runtime_driver.active.utils, "launch", None)
        launch = shared or unwrapped(run.launch)
        if encode is None or launch is None:
            return
        self.encode = encode
        self.more = (None,) * (len(inspect.signature(encode).parameters) - 2)
        self.metadata = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        how = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        about = compiled.packed_metadata, None, None, None  # no metadata for hooks, and no hooks

        def start_shared(grid: tuple[int, ...], stream: int, arguments: Sequence) -> None:
            launch(
                *grid, stream, *how, *about, None, None, run.arg_annotations, run.kernel_signature,
                arguments
            )  # fmt: skip

        def start_own(grid: tuple[int, ...], stream: int, arguments: Sequence) -> None:
            launch(*grid, stream, *how, None, None, *about, *arguments)

        self.start = start_shared if shared else start_own

    def run(self, grid: tuple[int, ...], stream: int, arguments: Sequence) -> None:
        """`start` by Triton's own layers."""
        about = self.compiled.function, self.compiled.packed_metadata
        self.compiled.run(*grid, stream, *about, None, None, None, *arguments)

    def expand(self, number: int, descriptor: Any) -> list:
        """The arguments in the place of a descriptor, the kernel's number-th."""
        if self.encode is None or self.metadata is None:
            return [descriptor]
        metadata = self.metadata[number] if self.metadata else None
        return self.encode(descriptor, metadata, *self.more)


def unwrapped(launch: Callable) -> Callable | None:
    """The launcher of Triton 3.6, compiled for one kernel, without the layer for descriptors."""
    if not inspect.isfunction(launch):
        return launch
    return inspect.getclosurevars(launch).nonlocals.get("launcher")
