"""Recording what a function does on the GPU, and doing it again at other addresses."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_versions.dispatch.replay.driver import Kernel, Start, is_descriptor, moved

aten = torch.ops.aten
TAKES_MEMORY = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty,
                aten.new_empty_strided)  # fmt: skip
TAKES_ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros)
FILLS = {aten.zero_: lambda x: 0, aten.fill_: lambda x, value: value}
APART = 256  # bytes: where a temporary begins in the memory that all of them share
MAX_MAPS = 64  # encoded descriptors of a launch that are kept, by address
Results = tuple[Any, ...]  # tensors, or None
Replay = Callable[[list[int], int], Results]  # of the addresses of the tensors, and a stream

lasting: dict[int, torch.Tensor] = {}  # by address: what stays in memory from call to call


class Impossible(Exception):
    """What a function did cannot be replayed; the reason as a sentence."""


@dataclass
class Memory:
    """What torch was asked for.

    Attributes:
        tensor: it.
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
    that is interpreted.
    """
    if current.recording is not None:
        if compiled is None:
            current.recording.foreign = "an interpreted kernel"
        current.recording.launches.append((compiled, grid, arguments))


class Tape:
    """A function of tensors that takes memory and launches kernels. Its second call is recorded,
    because most shapes come once only and recording takes time; later ones replay the recording.

    Which memory and which kernels must not depend on what is in the tensors, nor on anything else
    that differs from call to call: all tensors have one type, shape, stride and alignment, and two
    of them begin at one address in every call or in none. Every launch is told to `note`: a kernel
    that is launched past it would be missing from the replay, unseen.

    A tape keeps no tensor of the call that it recorded.
    """

    def __init__(self, function: Callable[..., Results]) -> None:
        self.function = function
        self.called = False
        self.replay: Replay | None = None
        self.reason: str | None = None  # why it cannot be replayed

    def __call__(self, tensors: Sequence[torch.Tensor | None], stream: int | None) -> Results:
        """What the function returns for the tensors; with a stream of None, by the function."""
        if self.replay is not None and stream is not None:
            return self.replay([x.data_ptr() for x in tensors if x is not None], stream)
        if stream is None or self.reason is not None or not self.called:
            self.called = True
            return self.function(*tensors)
        if not alone.acquire(blocking=False):  # another thread records: the next call can be it
            return self.function(*tensors)
        try:
            with Recording() as recording:
                results = self.function(*tensors)
        finally:
            alone.release()
        try:
            self.replay = prepared(recording, [x for x in tensors if x is not None], results)
        except Exception as error:  # such as a name that a later Triton changed: the results are
            self.reason = str(error) or repr(error)  # there, and must not be lost for it
        return results


def prepared(recording: Recording, tensors: Sequence[torch.Tensor], results: Results) -> Replay:
    """A function that does what was recorded, for other tensors and in another stream."""
    if recording.foreign is not None:
        raise Impossible(f"{recording.foreign} cannot be launched again.")
    returned = {start_of(x): x for x in results if x is not None}
    if len(returned) < len([x for x in results if x is not None]):
        raise Impossible("two results share memory.")
    makers: list[Callable[[], torch.Tensor]] = []
    filled_with: list[tuple[int, float]] = []
    made: dict[int, int] = {}  # which of them makes the memory at an address
    shared: list[torch.Tensor] = []
    for memory in recording.taken:
        x, start = memory.tensor, start_of(memory.tensor)
        if start in lasting:
            continue
        result = returned.get(start)
        if result is None and memory.value is None:
            shared.append(x)
            continue
        like = x if result is None else result
        if like.data_ptr() != start or like.numel() != x.numel() or not is_dense(like):
            raise Impossible("a result is a part of the memory that was taken for it.")
        if memory.value is not None:
            filled_with.append((len(makers), memory.value))
        made[start] = len(makers)
        makers.append(maker(like.shape, like.stride(), like.dtype, like.device))
    if not returned.keys() <= made.keys():
        raise Impossible("a result was not taken here.")
    returns = [None if x is None else made[start_of(x)] for x in results]

    # Addresses by number: of the tensors, of what is made, and those at an offset from one of them.
    places = {start: (len(tensors) + i, 0) for start, i in made.items()}
    size = 0
    for x in shared:  # temporaries lie side by side in what is made last
        places[start_of(x)] = len(tensors) + len(makers), size
        size += max(1, -(-x.untyped_storage().nbytes() // APART)) * APART
    if size:
        makers.append(maker((size,), (1,), torch.uint8, tensors[0].device))
    numbers = {x.data_ptr(): i for i, x in enumerate(tensors)}
    offsets: list[tuple[int, int]] = []

    def number_of(x: torch.Tensor) -> int | None:
        """Which of the addresses is that of a tensor; None if it stays where it is."""
        address, start = x.data_ptr(), start_of(x)
        if address not in numbers and start in places:
            number, offset = places[start]
            numbers[address] = len(tensors) + len(makers) + len(offsets)
            offsets.append((number, offset + address - start))
        if address in numbers:
            return numbers[address]
        if address == 0 or address in lasting:
            return None
        raise Impossible("a kernel got a tensor that was neither given nor taken.")

    launches = [launch_at(*launch, number_of) for launch in recording.launches]

    def replay(addresses: list[int], stream: int) -> Results:
        tensors = [make() for make in makers]
        addresses += [x.data_ptr() for x in tensors]
        addresses += [addresses[n] + offset for n, offset in offsets]
        for i, value in filled_with:
            tensors[i].fill_(value)
        for launch in launches:
            arguments = launch.arguments.copy()
            for i, n in launch.pointers:
                arguments[i] = addresses[n]
            for i, n, maps in launch.maps:
                arguments[i] = maps[addresses[n]]
            for i, fill in launch.tuples:
                arguments[i] = fill(addresses)
            launch.start(launch.grid, stream, arguments)
        return tuple([None if i is None else tensors[i] for i in returns])

    return replay


def start_of(x: torch.Tensor) -> int:
    """The address where the memory of a tensor begins."""
    return x.untyped_storage().data_ptr()


def is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


def maker(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that takes memory for a tensor."""
    return partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)


@dataclass(slots=True)
class Launch:
    """A launch to be made again.

    Attributes:
        arguments: as `start` takes them, with what is to be replaced at the places that follow.
        pointers: (place, number of the address).
        maps: (place, number of the address, encoded descriptors).
        tuples: (place, function of the addresses).
    """

    start: Start
    grid: tuple[int, ...]
    arguments: list
    pointers: list[tuple[int, int]]
    maps: list[tuple[int, int, "Maps"]]
    tuples: list[tuple[int, Callable[[list[int]], tuple]]]


NumberOf = Callable[[torch.Tensor], int | None]


def launch_at(
    compiled: Any, grid: tuple[int, ...], arguments: tuple, number_of: NumberOf
) -> Launch:
    """The launch of a kernel with such arguments."""
    kernel = Kernel(compiled)
    launch = Launch(kernel.start, grid, [], [], [], [])
    for x in arguments:
        place, expanded = len(launch.arguments), [x]
        if is_descriptor(x):
            if (number := number_of(x.base)) is None:
                raise Impossible("a descriptor of a tensor that is neither given nor taken.")
            maps = Maps(kernel, len(launch.maps), x)
            launch.maps.append((place, number, maps))
            expanded = [None, *kernel.expand(maps.number, x)[1:]]
        elif isinstance(x, torch.Tensor):
            if (number := number_of(x)) is not None:
                launch.pointers.append((place, number))
            expanded = [x.data_ptr()]
        elif isinstance(x, tuple) and (fill := filled(x, number_of)):
            launch.tuples.append((place, fill))
            expanded = [None]
        launch.arguments += expanded
    return launch


def filled(x: tuple, number_of: NumberOf) -> Callable[[list[int]], tuple] | None:
    """How a tuple follows from the addresses; None if it is a constant."""
    constant = [y.data_ptr() if isinstance(y, torch.Tensor) else y for y in x]
    numbers = [
        (i, number)
        for i, y in enumerate(x)
        if isinstance(y, torch.Tensor) and (number := number_of(y)) is not None
    ]
    inner = [
        (i, inside)
        for i, y in enumerate(x)
        if isinstance(y, tuple) and (inside := filled(y, number_of)) is not None
    ]
    for i, _ in inner:
        constant[i] = None

    def fill(addresses: list[int]) -> tuple:
        elements = constant.copy()
        for i, number in numbers:
            elements[i] = addresses[number]
        for i, inside in inner:
            elements[i] = inside(addresses)
        return tuple(elements)

    return fill if numbers or inner else None


class Maps(dict[int, Any]):
    """A descriptor of a kernel, encoded for each address where its tensor was: as a rule, torch's
    allocator gives the same memory again.
    """

    def __init__(self, kernel: Kernel, number: int, descriptor: Any) -> None:
        super().__init__()
        self.kernel, self.number, self.descriptor = kernel, number, moved(descriptor, 0)

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_MAPS:
            self.clear()
        self[address] = self.kernel.expand(self.number, moved(self.descriptor, address))[0]
        return self[address]
