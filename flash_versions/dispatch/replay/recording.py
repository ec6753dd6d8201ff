"""Noting what a function does on the GPU: which memory it takes, which kernels it launches."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
TAKES_MEMORY = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty,
                aten.new_empty_strided)  # fmt: skip
TAKES_ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros)
FILLS = {aten.zero_: lambda x: 0, aten.fill_: lambda x, value: value}

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


class Recording(TorchDispatchMode):
    """Inside, notes the memory that torch is asked for and the kernels that are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Memory] = []
        self.launches: list[tuple[Any, tuple[int, ...], tuple]] = []
        self.foreign: Any = None  # an operation, or its name, that no tape can do

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: D105
        result = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        if packet in TAKES_MEMORY:
            self.taken.append(Memory(result, None, len(self.launches)))
        elif packet in TAKES_ZEROS:
            self.taken.append(Memory(result, 0, len(self.launches)))
        elif packet in FILLS and (memory := self.untouched(args[0])):
            memory.value = FILLS[packet](*args)
        elif not is_view(function._schema.returns):
            self.foreign = function  # neither memory nor another look at it
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


def is_view(returns: Sequence[Any]) -> bool:
    """Whether an operation that returns these only gives another look at memory."""
    return bool(returns) and all(x.alias_info and not x.alias_info.is_write for x in returns)


class Current(threading.local):
    """The recording of this thread."""

    recording: Recording | None = None


current = Current()
# torch's dispatch modes note in variables of the process whether one is on, so two threads that
# leave theirs in the wrong order would leave it noted for ever.
alone = threading.Lock()


def note(compiled: Any, grid: tuple[int, ...], arguments: tuple) -> None:
    """Tell the recording of this thread of a launch, if there is one; compiled is None of a kernel
    that is simulated.
    """
    if current.recording is not None:
        if compiled is None:
            current.recording.foreign = "a simulated kernel"
        current.recording.launches.append((compiled, grid, arguments))
