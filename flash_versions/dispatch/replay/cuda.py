"""Launches by CUDA's driver alone, of which only addresses change from call to call.

Triton's launcher reads every argument of a kernel at every launch. For the ninety arguments of
attention's forward this takes three microseconds. The driver takes a pointer to each parameter. So
a tape keeps the parameters of its launches in memory. A call writes those that changed, all at
once, and starts the launches.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from struct import Struct, calcsize
from typing import Any, NamedTuple, NoReturn

INVALID_CONTEXT = 201
AFTER_PREVIOUS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
ALIGNED = 64  # bytes: where an encoded descriptor may begin


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, with its padding in `id`."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)),
        ("number", ctypes.c_uint),
    )  # fmt: skip


class Function(NamedTuple):
    """A function of the GPU, and how Triton launches it."""

    handle: int
    num_warps: int
    shared: int
    after_previous: bool  # programmatic dependent launch

    def config(self, grid: tuple[int, ...], stream: int) -> Config:
        """The configuration of a launch, with the attribute that Triton's launcher sets."""
        attribute = (Attribute * 1)(Attribute(AFTER_PREVIOUS, (ctypes.c_uint * 16)(1)))
        block = 32 * self.num_warps, 1, 1
        return Config(grid, block, self.shared, stream, attribute, self.after_previous)


@cache
def library() -> Any:
    """CUDA's driver; None where it is not there or older than CUDA 12.4."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return found if hasattr(found, "cuFuncGetParamInfo") else None


def parameter_sizes(handle: int) -> list[int]:
    """Bytes of each parameter of a function, as the driver knows them."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    ask = partial(library().cuFuncGetParamInfo, ctypes.c_void_p(handle))
    while ask(ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


def binder() -> Callable[[], int]:
    """bind() gives a thread this thread's context of CUDA; it returns 0 or the number of an error.
    A thread that never used the GPU has none. Then the driver encodes no map, and crashes when a
    graph is made, or gets parameters.
    """
    context = ctypes.c_void_p()
    library().cuCtxGetCurrent(ctypes.byref(context))
    return partial(library().cuCtxSetCurrent, context)


class Launches:
    """Launches one after the other, of which some parameters change. All parameters are in one
    piece of memory, and what several launches get is in it once.

    Attributes:
        changing: what is written before the launches, in order.
        pack: pack(memory, 0, *values) writes it.
        parts: of each launch the function, the configuration and the places of its parameters.
        unused: tuples (memory, start, start, ..., grid, grid, ...) that no thread uses. Each
            start() makes one launch with what is in the memory; it returns 0, or the number of an
            error. Each grid has three integers.
    """

    def __init__(
        self,
        launches: Sequence[tuple[Function, tuple, Sequence[tuple[str, str | bytes]]]],
        stream: int,
    ) -> None:
        """Of each launch the function, the grid and the parameters; of each parameter its format,
        and its bytes or, if it changes, what is written for it.
        """
        written = {x for *_, given in launches for x in given if isinstance(x[1], str)}
        # The larger in front, so that all are aligned.
        changing = sorted(written, key=lambda x: (-calcsize(x[0]), x))
        self.changing = [str(x) for _, x in changing]
        packed = Struct("<" + "".join(format for format, _ in changing))
        self.size, self.pack, self.stream = packed.size, packed.pack_into, stream
        sizes = [calcsize(format) for format, _ in changing]
        place = dict(zip(changing, accumulate(sizes, initial=0)))
        self.constants = b""
        self.parts: list[tuple[Function, tuple, list[int]]] = []
        for function, grid, given in launches:
            places = []
            for format, x in given:
                if isinstance(x, str):
                    places.append(place[format, x])
                else:
                    places.append(self.size + len(self.constants))
                    self.constants += x.ljust(8, b"\0")
            self.parts.append((function, grid, places))
        self.unused: list[tuple] = []

    def more(self) -> tuple:
        """Another tuple for `unused`."""
        view, given = self.memory()
        launch, starts, grids = library().cuLaunchKernelEx, [], []
        for (function, grid, _), pointers in zip(self.parts, given):
            config = function.config(grid, self.stream)
            about = ctypes.byref(config), ctypes.c_void_p(function.handle), pointers, None
            starts.append(partial(launch, *about))
            grids.append(config.grid)
        return view, *starts, *grids

    def memory(self) -> tuple[memoryview, list[ctypes.Array]]:
        """Memory for the parameters, and pointers to those of each launch."""
        memory = bytearray(ALIGNED + self.size + len(self.constants))
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        skipped = -first % ALIGNED
        view = memoryview(memory)[skipped:]
        view[self.size : self.size + len(self.constants)] = self.constants
        pointers = []
        for *_, places in self.parts:
            addresses = [first + skipped + place for place in places]
            pointers.append((ctypes.c_void_p * len(addresses))(*addresses))
        return view, pointers


def start_again(error: int, start: Callable[[], int], device: int) -> None:
    """Launch what failed for want of a context of CUDA, as in a thread that never used the GPU.

    Raises:
        RuntimeError: it failed for another reason, or fails again.
    """
    cuda, context = library(), ctypes.c_void_p()
    if error == INVALID_CONTEXT:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        cuda.cuCtxSetCurrent(context)
        error = start()
    if error:
        refuse(error)


def refuse(error: int) -> NoReturn:
    """Say what an error of the driver is.

    Raises:
        RuntimeError: always.
    """
    text = ctypes.c_char_p()
    library().cuGetErrorString(error, ctypes.byref(text))
    raise RuntimeError(f"CUDA's driver refused a launch: {(text.value or b'').decode()}")
