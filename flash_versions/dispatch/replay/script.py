"""A recording as a function of Python that does the same for other tensors.

Its source is written and compiled, because a line of names is faster than a loop over what changes.
`replay.__doc__` has it. For attention's forward to packed sequences, with two launches, it is:

    def replay(tensors):
        (x0, x1, x2, x3, ) = tensors
        a1 = x0.data_ptr()
        a2 = x1.data_ptr()
        a3 = x2.data_ptr()
        a4 = x3.data_ptr()
        if (a1 | a2 | a3 | a4) % 16: return None
        y4 = take(c2, c3, c4)
        a5 = y4.data_ptr()
        y6 = take(c7, c8, c9)
        a6 = y6.data_ptr()
        try: params = unused.pop()
        except IndexError: params = more()
        pack(params[0], 0, maps7[a1], maps8[a2], maps9[a3], maps10[a5], a6, a5, a4)
        if error := params[1](): start_again(error, params[1], 0)
        if error := params[2](): start_again(error, params[2], 0)
        unused.append(params)
        return (y4, y6, None, )
"""

from collections.abc import Callable, Sequence
from struct import pack
from typing import Any

import torch

from flash_versions.dispatch.replay.cuda import Function, Launches, start_again
from flash_versions.dispatch.replay.driver import BOX_ALIGNED, MAP, Kernel, is_descriptor, moved
from flash_versions.dispatch.replay.recording import Recording, lasting, start_of

APART = 256  # bytes: where a temporary begins in the memory that all of them share
# Encoded descriptors that are kept, by address. The layers of a model call one tape with tensors at
# other addresses. If they are more, each descriptor is encoded anew in every pass. One takes 230
# bytes with its address.
MAX_MAPS = 1024
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
    if recording.foreign is not None:
        raise Impossible(f"{recording.foreign} cannot be launched again.")
    script = Script(tensors, stream)
    made = script.take(recording, results)
    for launch in recording.launches:
        script.launch(*launch)
    returned = [None if x is None else made[start_of(x)] for x in results]
    return script.compiled(f"return {listed(returned)}")


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
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], stream: int) -> None:
        self.stream = stream
        self.lines = [f"{listed([f'x{i}' for i in range(len(tensors))])} = tensors"]
        self.values: dict[str, Any] = {}
        self.addresses: dict[int, str] = {}
        self.starts: dict[int, tuple[str, int]] = {}
        self.variables = 0
        self.launches: list[tuple[Function, tuple[int, ...], list]] = []
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
            made[start], address = self.tensor(like.shape, like.stride(), like.dtype)
            self.starts[start] = address, 0
            if memory.value is not None:
                self.lines.append(f"{made[start]}.fill_({self.expression(memory.value)})")
        if not returned.keys() <= made.keys():
            raise Impossible("a result was not taken here.")
        offsets, size = [], 0
        for x in shared:
            offsets.append(size)
            size += max(1, -(-x.untyped_storage().nbytes() // APART)) * APART
        if size:
            address = self.tensor((size,), (1,), torch.uint8)[1]
            self.starts |= {start_of(x): (address, n) for x, n in zip(shared, offsets)}
        return made

    def tensor(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[str, str]:
        """A line that takes memory for a tensor: the variables of the tensor and of its address."""
        variable = f"y{self.variables}"
        about = ", ".join(map(self.name, (tuple(shape), stride, dtype)))
        self.lines.append(f"{variable} = take({about})")
        return variable, self.assign(f"{variable}.data_ptr()")

    def launch(self, compiled: Any, grid: tuple[int, ...], arguments: tuple) -> None:
        """Lines that launch a kernel with such arguments."""
        if 0 in grid:  # Triton launches nothing then, and the driver would refuse it
            return
        kernel = Kernel(compiled)
        parameters = kernel.parameters(arguments)
        if kernel.function is None or parameters is None:
            about = [*map(str, grid), str(self.stream), *map(self.name, kernel.about)]
            about += [self.map(kernel, 0, x) if is_descriptor(x) else self.expression(x)
                      for x in arguments]  # fmt: skip
            self.starting.append(f"{self.name(kernel.run, 'run')}({', '.join(about)})")
            return
        given = [(format, self.parameter(kernel, format, x)) for format, x in parameters]
        self.launches.append((kernel.function, grid, given))
        start = f"params[{len(self.launches)}]"
        self.starting.append(
            f"if error := {start}(): start_again(error, {start}, {self.device.index})"
        )

    def parameter(self, kernel: Kernel, format: str, x: Any) -> str | bytes:
        """A parameter of a launch: an expression if it changes, else its bytes."""
        if format == MAP:
            return self.map(kernel, *x)
        if isinstance(x, torch.Tensor):
            if variable := self.address(x):
                return variable
            x = x.data_ptr()
        return pack(f"<{format}", 0 if x is None else x)

    def map(self, kernel: Kernel, number: int, descriptor: Any) -> str:
        """A kernel's number-th descriptor in the source."""
        if (variable := self.address(descriptor.base)) is None:
            raise Impossible("a descriptor of a tensor that is neither given nor taken.")
        kernel.map(number, descriptor)  # if that fails, the tape is refused and no later call fails
        return f"{self.name(Maps(kernel, number, descriptor), 'maps')}[{variable}]"

    def address(self, x: torch.Tensor) -> str | None:
        """The variable that has the address of a tensor; None if it stays where it is."""
        address, start = x.data_ptr(), start_of(x)
        if address not in self.addresses and start in self.starts:
            variable, offset = self.starts[start]
            offset += address - start
            self.addresses[address] = self.assign(f"{variable} + {offset}") if offset else variable
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
        return repr(x) if x is None or type(x) in (int, bool) else self.name(x)

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
            self.closing.append("unused.append(params)")
        body = *self.lines, *self.starting, *self.closing, end
        source = "\n    ".join(["def replay(tensors):", *body])
        exec(compile(source, "<replay>", "exec"), self.values)
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
        self[address] = self.kernel.map(self.number, moved(self.descriptor, address))
        return self[address]
