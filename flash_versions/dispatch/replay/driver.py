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
    """A compiled kernel that was launched before: launch(*grid, stream, *about, *arguments).

    A pointer is an int. In the place of a descriptor come the arguments that `expand` makes of it,
    the first of which depends on the address.

    Attributes:
        launch: Triton's launcher in C; of a Triton that is not known here, `compiled.run`.
        about: what it is told of the kernel.
        packs: whether it takes the arguments as one tuple.
    """

    def __init__(self, compiled: Any) -> None:
        run = self.launch = compiled.run
        self.about: tuple = (compiled.function, compiled.packed_metadata, None, None, None)
        self.packs = False
        self.metadata: Sequence | None = None  # of the descriptors; None: they stay as they are
        self.encode: Callable[..., list] | None = None
        if type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
            return
        if run.global_scratch_size > 0 or run.profile_scratch_size > 0:
            return
        encode = getattr(sys.modules[type(run).__module__], "make_tensordesc_arg", None)
        shared = getattr(runtime_driver.active.utils, "launch", None)
        launch = shared or unwrapped(run.launch)
        if encode is None or launch is None:
            return
        self.launch, self.encode, self.packs = launch, encode, shared is not None
        self.more = (None,) * (len(inspect.signature(encode).parameters) - 2)
        self.metadata = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        how = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        about = compiled.packed_metadata, None, None, None  # no metadata for hooks, and no hooks
        scratch = None, None
        if shared:
            self.about = *how, *about, *scratch, run.arg_annotations, run.kernel_signature
        else:
            self.about = *how, *scratch, *about

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
