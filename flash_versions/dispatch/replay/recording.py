"""Noting what a function does on the GPU: which memory it takes, which kernels it launches."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flash_versions.dispatch.replay.driver import is_descriptor, moved
from flash_versions.dispatch.replay.keys import varying
from flash_versions.dispatch.replay.traced import Trace, Traced, pinned

Sizes = Sequence[Any]  # of integers, some of them traced

# What stays in memory from call to call, by the address where its memory begins (`start_of`).
lasting: dict[int, torch.Tensor] = {}


def start_of(x: torch.Tensor) -> int:
    """The address where the memory of a tensor begins."""
    return x.untyped_storage().data_ptr()


def make_lasting(x: torch.Tensor) -> None:
    """Keep a tensor, and all that shares its memory, where it is, for good."""
    lasting[start_of(x)] = x


@dataclass
class Memory:
    """What torch was asked for.

    Attributes:
        tensor: what it gave.
        value: what it is filled with at once, if with anything.
        launched: how many kernels were launched before.
    """

    tensor: torch.Tensor
    value: float | None
    launched: int


class Recording(TorchFunctionMode):
    """Inside, notes the memory that torch is asked for and the kernels that are launched, and what
    both follow from: the sizes and strides of these tensors are `Traced`.

    Attributes:
        trace: the arithmetic on them.
        looks: of a tensor whose sizes are traced, these and its strides, by the tensor's id.
        taken: the memory, in order.
        launches: (compiled kernel, grid, arguments), in order.
        foreign: an operation, or its name, that no tape can do.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        assert tensors[0] is not None
        self.trace = Trace()
        self.taken: list[Memory] = []
        self.launches: list[tuple[Any, tuple[int, ...], tuple]] = []
        self.foreign: Any = None
        self.looks: dict[int, tuple[torch.Tensor, Sizes, Sizes]] = {}
        for i, x in enumerate(tensors):
            if x is not None:
                sizes, strides = varying(x, tensors[0])
                self.keep(
                    x,
                    self.traced(x.shape, sizes, f"x{i}.size({{}})"),
                    self.traced(x.stride(), strides, f"x{i}.stride({{}})"),
                )

    def traced(self, numbers: Sequence[int], fixed: list[int | None], form: str) -> Sizes:
        """Sizes or strides of a tensor; those that are fixed, as they are."""
        return tuple([
            self.trace.take(n, form.format(i)) if fixed[i] is None else n
            for i, n in enumerate(numbers)
        ])  # fmt: skip

    def keep(self, x: torch.Tensor, sizes: Sizes, strides: Sizes) -> torch.Tensor:
        """Note sizes and strides of a tensor, and keep it, so that no other gets its id."""
        self.looks[id(x)] = x, sizes, strides
        return x

    def look(self, x: torch.Tensor) -> tuple[Sizes, Sizes]:
        """Sizes and strides of a tensor."""
        if (kept := self.looks.get(id(x))) is not None:
            return kept[1:]
        with torch._C.DisableTorchFunction():
            return tuple(x.shape), x.stride()

    def __torch_function__(self, function, types, args=(), kwargs=None):  # noqa: D105
        kwargs = kwargs or {}
        if (own := KNOWN.get(function)) is not None:
            return own(self, function, *args, **kwargs)
        result = function(*plain(args), **plain(kwargs))
        if function not in HARMLESS and not (function in UNCHANGING and result is args[0]):
            self.foreign = function
        return result

    def untouched(self, x: torch.Tensor) -> Memory | None:
        """The memory that is all of x, and that no kernel had before."""
        for memory in self.taken:
            y = memory.tensor
            if (y.data_ptr(), y.numel()) == (x.data_ptr(), x.numel()):
                return memory if memory.launched == len(self.launches) else None
        return None

    def __enter__(self) -> "Recording":
        super().__enter__()
        current.recording = self
        return self

    def __exit__(self, *error: Any) -> None:
        current.recording = None
        super().__exit__(*error)


class Current(threading.local):
    """The recording of this thread."""

    recording: Recording | None = None


current = Current()


def note(compiled: Any, grid: tuple[int, ...], arguments: tuple) -> tuple[tuple, tuple]:
    """Tell the recording of this thread of a launch, if there is one; compiled is None of a kernel
    that is simulated. Returns grid and arguments as the launch takes them.
    """
    if (recording := current.recording) is None:
        return grid, arguments
    if compiled is None:
        recording.foreign = "a simulated kernel"
    recording.launches.append((compiled, grid, arguments))
    return plain(grid), plain(arguments)


def plain(x: Any) -> Any:
    """Arguments of a function with numbers in the place of traced ones."""
    if type(x) is Traced:
        return x.value
    if isinstance(x, tuple):
        made = [plain(y) for y in x]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    if type(x) is list:
        return [plain(y) for y in x]
    if type(x) is dict:
        return {key: plain(y) for key, y in x.items()}
    if is_descriptor(x) and any(type(y) is Traced for y in (*x.shape, *x.strides)):
        return moved(x, x.base, plain([*x.shape]), plain([*x.strides]))
    return x


# What a recording does in the place of torch: KNOWN[function](recording, function, *arguments).


def product(sizes: Sizes) -> Any:
    """The product of numbers."""
    number = 1
    for n in sizes:
        number = n * number
    return number


def is_contiguous(recording: Recording, function: Any, x: torch.Tensor) -> bool:
    """x.is_contiguous()."""
    sizes, strides = recording.look(x)
    apart = 1
    for n, step in zip(reversed(sizes), reversed(strides)):
        if n != 1:
            if step != apart:
                return product(sizes) == 0
            apart = n * apart
    return True


def in_order(sizes: Sizes) -> Sizes:
    """The strides of a contiguous tensor."""
    strides: list[Any] = []
    for i in range(len(sizes)):
        strides.append(product([max(n, 1) for n in sizes[i + 1 :]]))
    return tuple(strides)


def take(
    recording: Recording, function: Any, args: tuple, about: dict, sizes: Sizes, strides: Sizes
) -> torch.Tensor:
    """Memory, of torch."""
    x = function(*plain(args), **plain(about))
    value = 0 if function in ZEROS else None
    recording.taken.append(Memory(x, value, len(recording.launches)))
    return recording.keep(x, sizes, strides)


def empty(recording: Recording, function: Any, *given: Any, **about: Any) -> torch.Tensor:
    """torch.empty, torch.zeros, x.new_empty, x.new_zeros."""
    sizes = given[isinstance(given[0], torch.Tensor) :]
    sizes = tuple(sizes[0]) if isinstance(sizes[0], tuple | list) else sizes
    return take(recording, function, given, about, sizes, in_order(sizes))


def empty_strided(
    recording: Recording, function: Any, sizes: Sizes, strides: Sizes, **about: Any
) -> torch.Tensor:
    """torch.empty_strided."""
    return take(recording, function, (sizes, strides), about, tuple(sizes), tuple(strides))


def empty_like(recording: Recording, function: Any, x: torch.Tensor, **about: Any) -> torch.Tensor:
    """torch.empty_like, torch.zeros_like."""
    sizes, strides = recording.look(x)
    if not is_contiguous(recording, function, x):  # what has gaps gets other strides
        recording.foreign = function
    return take(recording, function, (x,), about, sizes, strides)


def fill(recording: Recording, function: Any, x: torch.Tensor, value: float = 0) -> torch.Tensor:
    """x.zero_, x.fill_."""
    with torch._C.DisableTorchFunction():
        if memory := recording.untouched(x):
            memory.value = value
        else:
            recording.foreign = function
        return function(x) if function == torch.Tensor.zero_ else function(x, value)


def squeeze(recording: Recording, function: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
    """x.squeeze(dim)."""
    sizes, strides = recording.look(x)
    if sizes[dim] != 1:
        return x
    cut = [[y for i, y in enumerate(about) if i != dim] for about in (sizes, strides)]
    return recording.keep(function(x, dim), tuple(cut[0]), tuple(cut[1]))


def unsqueeze(recording: Recording, function: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
    """x.unsqueeze(dim)."""
    sizes, strides = recording.look(x)
    step = sizes[dim] * strides[dim] if dim < len(sizes) else 1
    sizes, strides = ((*about[:dim], y, *about[dim:]) for about, y in ((sizes, 1), (strides, step)))
    return recording.keep(function(x, dim), sizes, strides)


def expand(recording: Recording, function: Any, x: torch.Tensor, *sizes: Any) -> torch.Tensor:
    """x.expand(sizes)."""
    wanted = sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes
    own, strides = recording.look(x)
    found: list[tuple[Any, Any]] = []  # sizes and strides from behind
    for i in range(1, len(wanted) + 1):
        if i <= len(own):
            n, step = own[-i], strides[-i]
        else:
            n, step = 1, product(found[-1]) if own else 0
        found.append((n, step) if wanted[-i] in (n, -1) else (wanted[-i], 0))
    sizes_and_strides = zip(*found[::-1])
    return recording.keep(function(x, *plain(sizes)), *map(tuple, sizes_and_strides))


def view(recording: Recording, function: Any, x: torch.Tensor, *sizes: Any) -> torch.Tensor:
    """x.view(sizes) of a contiguous x."""
    given = list(sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes)
    made = function(x, *plain(sizes))
    if isinstance(given[0], torch.dtype) or not is_contiguous(recording, function, x):
        recording.foreign = function
        return made
    if -1 in given:
        own = product(recording.look(x)[0])
        given[given.index(-1)] = own // -product(given)
    return recording.keep(made, tuple(given), in_order(given))


def contiguous(recording: Recording, function: Any, x: torch.Tensor, **about: Any) -> torch.Tensor:
    """x.contiguous()."""
    if is_contiguous(recording, function, x):
        return x
    recording.foreign = function
    return function(x, **about)


T = torch.Tensor
ZEROS = {torch.zeros, torch.zeros_like, T.new_zeros}
KNOWN: dict[Any, Any] = {
    vars(torch._C.TensorBase)["shape"].__get__: lambda recording, _, x: recording.look(x)[0],
    T.size: lambda recording, _, x, dim=slice(None): recording.look(x)[0][dim],
    T.stride: lambda recording, _, x, dim=slice(None): recording.look(x)[1][dim],
    T.numel: lambda recording, _, x: product(recording.look(x)[0]),
    T.__len__: lambda recording, _, x: pinned(recording.look(x)[0][0]),
    T.is_contiguous: is_contiguous, torch.empty: empty, torch.zeros: empty, T.new_empty: empty,
    T.new_zeros: empty, torch.empty_strided: empty_strided, torch.empty_like: empty_like,
    torch.zeros_like: empty_like, T.zero_: fill, T.fill_: fill, T.squeeze: squeeze,
    T.unsqueeze: unsqueeze, T.expand: expand, T.view: view, T.contiguous: contiguous,
}  # fmt: skip
UNCHANGING = {T.resolve_neg, T.to}  # if there is nothing to do, they return what they are given
ASKED = (  # attributes that do not depend on lengths, or of which a replay takes care
    "device", "dtype", "is_cuda", "is_cpu", "requires_grad", "layout", "ndim", "itemsize",
    "is_meta", "is_nested",
)  # fmt: skip
HARMLESS = {
    *[getattr(T, name).__get__ for name in ASKED], T.data_ptr, T.dim, T.element_size, T.get_device,
    T.untyped_storage, T.is_floating_point, T.is_neg, T.__hash__, torch._C._set_grad_enabled,
}  # fmt: skip
