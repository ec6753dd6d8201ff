"""A recording as a function of Python that does the same for other tensors.

Its source is written and compiled, because a line of names is faster than a loop over what changes.
`replay.__doc__` has it. For attention's forward to packed sequences, with two launches, it is, but
for most of the checks:

    def numbers(g0, g1, g2, g3):
        if not (g1 == g2 and g3 != 0): return None
        n34 = ((g0 // 128) + (g3 - 1))
        if not (132 < (8 * n34)): return None
        n62 = (256 * (1 + ((32 * g0) // 256)))
        return (g0, n62, )
    def replay(tensors):
        (x0, x1, x2, x3, ) = tensors
        found = numbers(x0.size(0), x1.size(0), x2.size(0), x3.size(0))
        if found is None: return None
        (g0, n62, ) = found
        a1 = x0.data_ptr()
        a2 = x1.data_ptr()
        a3 = x2.data_ptr()
        a4 = x3.data_ptr()
        if (a1 | a2 | a3 | a4) % 16: return None
        y4 = take((g0, 8, 128, ), (1024, 128, 1, ), c2)
        a5 = y4.data_ptr()
        y5 = take((n62, ), (1, ), c3)
        a6 = y5.data_ptr()
        try: params = unused.pop()
        except IndexError: params = more()
        pack(params[0], 0, maps7[a1, g0,], maps8[a2, g0,], maps9[a3, g0,], maps10[a5,], a6, a5, a4)
        if error := params[1](): start_again(error, params[1], 0)
        if error := params[2](): start_again(error, params[2], 0)
        unused.append(params)
        return (y4, None, None, )

What is computed for lengths is kept for when they come again.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import pack
from types import SimpleNamespace
from typing import Any

import torch

from flash_versions.dispatch.replay.cuda import Function, Launches, start_again
from flash_versions.dispatch.replay.driver import BOX_ALIGNED, MAP, Kernel, is_descriptor, moved
from flash_versions.dispatch.replay.recording import Recording, lasting, plain, product, start_of
from flash_versions.dispatch.replay.traced import Trace, Traced

APART = 256  # bytes: where a temporary begins in the memory that all of them share
# Encoded descriptors that are kept, by address. The layers of a model call one tape with tensors at
# other addresses. If they are more, each descriptor is encoded anew in every pass. One takes 230
# bytes with its address.
MAX_MAPS = 1024
MOST_LENGTHS = 512  # of which a replay keeps what was computed from them
Returned = tuple[Any, ...]  # tensors, or None
# None: these tensors are not aligned to 16 bytes, as those of the recording were.
Replay = Callable[[Sequence[torch.Tensor | None]], Returned | None]


class Impossible(Exception):
    """What a function did cannot be replayed; the reason as a sentence."""


def written(
    recording: Recording, tensors: Sequence[torch.Tensor | None], results: Returned, stream: int
) -> Replay:
    """The replay of a recording, in this stream.

    Args:
        recording: of a call of a function.
        tensors: what the function was called with.
        results: what it returned.
        stream: where the replay launches kernels.
    """
    try:
        if recording.foreign is not None:
            raise Impossible(f"{recording.foreign} cannot be launched again.")
        script = Script(tensors, stream, recording.trace)
        made = script.take(recording, results)
        for launch in recording.launches:
            script.launch(*launch)
        returned = [None if x is None else made[start_of(x)] for x in results]
        return script.compiled(f"return {listed(returned)}")
    finally:
        recording.trace.is_open = False


class Script:
    """The source of a replay, line by line.

    Attributes:
        lines: they get addresses and take memory.
        starting: the lines after these: they start launches.
        closing: the lines after these: they give back what was borrowed.
        values: the globals of the source, by name.
        addresses: by an address of the recording, the variable that has its place in a replay.
        starts: by the address where memory of the recording began, (variable, offset): a replay
            has that memory so many bytes behind the variable's address.
        launches: those by the driver.
        trace: the arithmetic on sizes and strides; used, those of its names that are in the source.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], stream: int, trace: Trace) -> None:
        self.stream, self.trace = stream, trace
        self.used: set[str] = set()
        self.lines: list[str] = []
        self.given = f"{listed([f'x{i}' for i in range(len(tensors))])} = tensors"
        self.values: dict[str, Any] = {}
        self.addresses: dict[int, str] = {}
        self.starts: dict[int, tuple[str, Any]] = {}
        self.variables = 0
        self.launches: list[tuple[Function, tuple, list]] = []
        self.grids: list[tuple] = []
        self.starting: list[str] = []
        self.closing: list[str] = []
        (self.device,) = {x.device for x in tensors if x is not None}
        self.values |= {"take": taker(self.device), "start_again": start_again}
        for i, x in enumerate(tensors):
            if x is not None:
                self.addresses[x.data_ptr()] = self.assign(f"x{i}.data_ptr()")
        given = " | ".join(f"a{i}" for i in range(1, self.variables + 1))
        self.lines.append(f"if ({given}) % {BOX_ALIGNED}: return None")

    def assign(self, expression: str) -> str:
        """A new variable for an address."""
        self.variables += 1
        self.lines.append(f"a{self.variables} = {expression}")
        return f"a{self.variables}"

    def name(self, value: Any, prefix: str = "c") -> str:
        """A name for a value."""
        name = f"{prefix}{len(self.values)}"
        self.values[name] = value
        return name

    def take(self, recording: Recording, results: Returned) -> dict[int, str]:
        """Lines that take memory and fill it; the variables of tensors, by where they began. Those
        that are not returned share what is taken last.
        """
        returned = {start_of(x): x for x in results if x is not None}
        size: Any = 0
        if len(returned) < len([x for x in results if x is not None]):
            raise Impossible("two results share memory.")
        made: dict[int, str] = {}
        shared: list[torch.Tensor] = []
        for memory in recording.taken:
            x, start = memory.tensor, start_of(memory.tensor)
            if start in lasting:
                continue
            result = returned.get(start)
            if x.device != self.device:
                raise Impossible("memory was taken on another device.")
            if result is None and memory.value is None:
                shared.append(x)
                continue
            like = x if result is None else result
            if like.data_ptr() != start or like.numel() != x.numel() or not is_dense(like):
                raise Impossible("a result is a part of the memory that was taken for it.")
            made[start], address = self.tensor(*recording.look(like), like.dtype)
            self.starts[start] = address, 0
            if memory.value is not None:
                self.lines.append(f"{made[start]}.fill_({self.expression(memory.value)})")
        if not returned.keys() <= made.keys():
            raise Impossible("a result was not taken here.")
        offsets = []
        for x in shared:
            if not is_dense(x):
                raise Impossible("a temporary is a part of its memory.")
            offsets.append(size)
            size += (product(recording.look(x)[0]) * x.element_size() // APART + 1) * APART
        if shared:
            address = self.tensor((size,), (1,), torch.uint8)[1]
            self.starts |= {start_of(x): (address, n) for x, n in zip(shared, offsets)}
        return made

    def text(self, x: Any) -> str:
        """A number in the source."""
        if isinstance(x := self.trace.known(x), str):
            self.used.add(x)
            return x
        return repr(x)

    def tensor(
        self, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype
    ) -> tuple[str, str]:
        """A line that takes memory for a tensor: the variables of the tensor and of its address."""
        variable = f"y{self.variables}"
        about = listed(map(self.text, shape)), listed(map(self.text, stride)), self.name(dtype)
        self.lines.append(f"{variable} = take({', '.join(about)})")
        return variable, self.assign(f"{variable}.data_ptr()")

    def launch(self, compiled: Any, grid: tuple, arguments: tuple) -> None:
        """Lines that launch a kernel with such arguments."""
        if 0 in grid:  # Triton launches nothing then, and the driver would refuse it
            return
        kernel = Kernel(compiled)
        parameters = kernel.parameters(arguments)
        if kernel.function is None or parameters is None:
            about = [*map(self.text, grid), str(self.stream), *map(self.name, kernel.about)]
            about += [self.map(kernel, 0, x) if is_descriptor(x) else self.expression(x)
                      for x in arguments]  # fmt: skip
            self.starting.append(f"{self.name(kernel.run, 'run')}({', '.join(about)})")
            return
        given = [(format, self.parameter(kernel, format, x)) for format, x in parameters]
        self.launches.append((kernel.function, plain(grid), given))
        self.grids.append(grid)
        start = f"params[{len(self.launches)}]"
        self.starting.append(
            f"if error := {start}(): start_again(error, {start}, {self.device.index})"
        )

    def parameter(self, kernel: Kernel, format: str, x: Any) -> str | bytes:
        """A parameter of a launch: an expression if it changes, else its bytes."""
        if format == MAP:
            return self.map(kernel, *x)
        x = self.trace.known(x)
        if isinstance(x, str):
            return self.text(x)
        if isinstance(x, torch.Tensor):
            if variable := self.address(x):
                return variable
            x = x.data_ptr()
        return pack(f"<{format}", 0 if x is None else x)

    def map(self, kernel: Kernel, number: int, descriptor: Any) -> str:
        """A kernel's number-th descriptor in the source."""
        if (variable := self.address(descriptor.base)) is None:
            raise Impossible("a descriptor of a tensor that is neither given nor taken.")
        numbers = *descriptor.shape, *descriptor.strides
        traced = [i for i, x in enumerate(numbers) if isinstance(self.trace.known(x), str)]
        maps = Maps(kernel, number, plain(descriptor), traced)
        # If it fails, the tape is refused and no later call fails.
        maps[descriptor.base.data_ptr(), *[plain(numbers[i]) for i in traced]]
        key = ", ".join([variable, *[self.text(numbers[i]) for i in traced]])
        return f"{self.name(maps, 'maps')}[{key},]"

    def address(self, x: torch.Tensor) -> str | None:
        """The variable that has the address of a tensor; None if it stays where it is."""
        address, start = x.data_ptr(), start_of(x)
        if address not in self.addresses and start in self.starts:
            variable, offset = self.starts[start]
            if address != start:
                raise Impossible("a kernel got a part of the memory that was taken for it.")
            is_first = type(offset) is int and offset == 0
            text = variable if is_first else self.assign(f"{variable} + {self.text(offset)}")
            self.addresses[address] = text
        if address in self.addresses:
            return self.addresses[address]
        if address == 0 or start in lasting:
            return None
        raise Impossible("a kernel got a tensor that was neither given nor taken.")

    def expression(self, x: Any) -> str:
        """An argument of a launch in the source."""
        if isinstance(x, torch.Tensor):
            return self.address(x) or str(x.data_ptr())
        if isinstance(x, tuple):
            return listed(map(self.expression, x))
        return self.text(x) if x is None or type(x) in (int, bool, Traced) else self.name(x)

    def compiled(self, end: str) -> Replay:
        """The function."""
        if self.launches:
            launches = Launches(self.launches, self.stream)
            self.values |= {"unused": launches.unused, "more": launches.more}
            self.values["pack"] = launches.pack
            self.lines += [
                "try: params = unused.pop()",
                "except IndexError: params = more()",
                f"pack({', '.join(['params[0]', '0', *launches.changing])})",
            ]
            for i, grid in enumerate(self.grids, 1 + len(self.launches)):
                self.lines += [f"params[{i}][{axis}] = {self.text(n)}"
                               for axis, n in enumerate(grid)
                               if isinstance(self.trace.known(n), str)]  # fmt: skip
            self.closing.append("unused.append(params)")
        given, computed = self.trace.source(self.used)
        numbers = [
            f"def numbers({', '.join(given)}):",
            *computed,
            f"return {listed(sorted(self.used))}",
        ]
        body = [
            "def replay(tensors):",
            self.given,
            f"found = numbers({', '.join(given.values())})",
            "if found is None: return None",
            f"{listed(sorted(self.used))} = found",
            *self.lines, *self.starting, *self.closing, end,
        ]  # fmt: skip
        source = "\n".join("\n    ".join(lines) for lines in (numbers, body))
        exec(compile(source, "<replay>", "exec"), self.values)
        self.values["numbers"] = lru_cache(MOST_LENGTHS)(self.values["numbers"])
        replay = self.values.pop("replay")  # it would keep itself alive
        replay.__doc__ = source
        return replay


def listed(expressions: Any) -> str:
    """A tuple of expressions."""
    return f"({''.join(f'{x}, ' for x in expressions)})"


def is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()


def taker(device: torch.device) -> Callable[..., torch.Tensor]:
    """What takes memory for a tensor of a shape, strides and a type.

    On the current GPU, where a tape is played, that is what the code of torch.compile calls. It
    takes half the time of `torch.empty_strided`, because it asks for no dispatch mode; `keys.find`
    did.
    """
    own = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if own is not None and device.type == "cuda":
        return own
    return lambda shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype, device=device
    )


class Maps(dict[tuple, Any]):
    """A descriptor of a kernel, encoded for each address where its tensor was, and for each shape:
    as a rule, torch's allocator gives the same memory again.

    Args:
        kernel: its number-th descriptor is meant.
        number: see there.
        descriptor: one of them.
        changing: which of its numbers, of shape and strides, are in a key behind the address.
    """

    def __init__(
        self, kernel: Kernel, number: int, descriptor: Any, changing: Sequence[int]
    ) -> None:
        super().__init__()
        self.kernel, self.number, self.changing = kernel, number, changing
        self.numbers = [*descriptor.shape, *descriptor.strides]
        self.descriptor = moved(descriptor, None, [], [])

    def __missing__(self, key: tuple) -> Any:
        if len(self) >= MAX_MAPS:
            self.clear()
        address, *given = key
        numbers, dims = self.numbers.copy(), len(self.numbers) // 2
        for i, n in zip(self.changing, given):
            numbers[i] = n
        base = SimpleNamespace(data_ptr=lambda: address)
        made = moved(self.descriptor, base, numbers[:dims], numbers[dims:])
        self[key] = self.kernel.map(self.number, made)
        return self[key]
