"""Compiled kernels of Triton as CUDA's driver takes them.

`compiled.run` encodes the descriptors of a launch, asks for scratch memory, and checks each address
with the driver. A launch that was made before needs none of that; only the descriptor of a tensor
at a new address is encoded again. This is the only file that knows how Triton passes arguments to a
kernel; what it does not know is launched by `compiled.run`.
"""

import ctypes
import inspect
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from struct import calcsize
from typing import Any

from triton import knobs

from flash_versions.dispatch.replay.cuda import Function, binder, library, parameter_sizes


def has_hooks() -> bool:
    """Whether a hook of Triton is set, such as a profiler's, which is called at each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))  # chains, or one


def is_descriptor(x: Any) -> bool:
    """Whether an argument of a kernel is a tensor descriptor, of Triton or of Gluon."""
    return hasattr(x, "base") and hasattr(x, "block_shape")


def moved(descriptor: Any, base: Any, shape: list, strides: list) -> Any:
    """The descriptor of another tensor, in boxes of the same kind."""
    copy: Any = object.__new__(type(descriptor))
    copy.__dict__ = {**vars(descriptor), "base": base, "shape": shape, "strides": strides}
    return copy


# The types of parameters in Triton's signatures, as formats of `struct`.
FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B",
           "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}  # fmt: skip
POINTER, MAP = "Q", "128s"  # a pointer; an encoded descriptor
BOX_ALIGNED = 16  # bytes: where a tensor begins that boxes reach; kernels are compiled for such
MOST_SHARED = 228 * 1024  # bytes; above that, Triton's launcher sets another attribute


class Kernel:
    """A compiled kernel that was launched before, and may be launched so again.

    Attributes:
        run: launches it by Triton: run(*grid, stream, *about, *arguments).
        about: the arguments of `run` that describe the kernel.
        function: what CUDA's driver needs to launch it; None if this Triton or this driver is not
            known well enough.
    """

    def __init__(self, compiled: Any) -> None:
        run = self.run = compiled.run
        self.about: tuple = (compiled.function, compiled.packed_metadata, None, None, None)
        self.function: Function | None = None
        if type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
            return
        if run.global_scratch_size > 0 or run.profile_scratch_size > 0 or library() is None:
            return
        num_warps, num_ctas, shared = compiled.packed_metadata
        if shared > MOST_SHARED or num_ctas != 1 or run.launch_cooperative_grid:
            return
        self.function = Function(compiled.function, num_warps, shared, bool(run.launch_pdl))
        self.bind = binder()
        self.encode = sys.modules[type(run).__module__].make_tensordesc_arg
        self.more = (None,) * (len(inspect.signature(self.encode).parameters) - 2)
        self.metadata: Sequence = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        self.signature = tuple(compiled.src.signature.values())

    def parameters(self, arguments: tuple) -> list[tuple[str, Any]] | None:
        """(format, value) of each parameter of the function. The value of a map is (number,
        descriptor): it is the kernel's number-th. None if the driver does not launch this kernel.
        """
        if self.function is None:
            return None
        found: list[tuple[str, Any]] = []
        descriptors = count()
        for kind, x in flattened(self.signature, arguments):
            if is_descriptor(x):
                dims = len(x.shape)
                found += (MAP, (next(descriptors), x)), *zip("i" * dims, x.shape)
                found += zip("q" * dims, x.strides)
            else:
                found.append((POINTER if kind.startswith("*") else FORMATS.get(kind, "0s"), x))
        found += [(POINTER, 0)] * 2  # no scratch memory, neither the program's nor a profiler's
        if [calcsize(f"<{format}") for format, _ in found] != parameter_sizes(self.function.handle):
            self.function = None
            return None
        return found

    def map(self, number: int, descriptor: Any) -> Any:
        """A descriptor, the kernel's number-th, encoded for the GPU; as it is for `run`."""
        if self.function is None:
            return descriptor
        self.bind()
        encoded = self.encode(descriptor, self.metadata[number], *self.more)[0]
        # Triton's object is Python's header and, behind it, the map, which it does not give out.
        return ctypes.string_at(id(encoded) + type(encoded).__basicsize__ - 128, 128)


def flattened(signature: Sequence, arguments: Sequence) -> Iterator[tuple[str, Any]]:
    """(type, value) of the arguments that are parameters of the compiled kernel."""
    for kind, x in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from flattened(kind, x)
        elif kind != "constexpr":
            yield kind, x
