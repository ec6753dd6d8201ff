"""Kernels under observation: what they load and store, and what is wrong with it.

Inside of `Watch.watching()`, the memory of the tensors that this thread's launches take is watched.
An access outside of a tensor, of an element that nothing wrote, or to what another program accesses
without an atomic operation between is an error that names the element. Lanes whose mask is false
and that have no `other` are NaN; of integers, a number far outside. In Gluon, accesses of shared
memory that no barrier orders are errors, too: see `gluon/hazards.py`.
"""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flash_versions.simulator.dtypes import dtype
from flash_versions.simulator.errors import AccessError
from flash_versions.simulator.memory import Memory
from flash_versions.simulator.state import here

NOBODY, SEVERAL = -1, -2
PARTITIONS = 16  # of a program, at most: who stores what is numbered by programs and partitions
ALLOCATE = frozenset(("empty", "empty_like", "empty_strided", "new_empty"))
# What a launch asks of a tensor; none of it touches the elements.
ASK = frozenset((
    "get", "stride", "size", "dim", "numel", "element_size", "data_ptr", "is_contiguous", "len",
    "is_floating_point", "untyped_storage", "storage_offset", "detach", "as_strided", "view",
    "reshape", "set", "numpy", "getitem",
))  # fmt: skip


class Seen:
    """What happened to the elements of a tensor's storage.

    Attributes:
        loads, stores: how many elements were accessed.
        written: whether something wrote each; None of what was given with its values.
        writer, reader, stored_at: who stored or loaded each last, in this launch, and when.
        epochs: partition -> the time on its clock at its last store (see `gluon/hazards.py`).
    """

    def __init__(self, number: int, fresh: bool) -> None:
        self.loads, self.stores, self.number = 0, 0, number
        self.written = np.zeros(number, bool) if fresh else None

    def begin(self) -> None:
        """Forget which programs accessed what: those of one launch end before the next begins."""
        self.epochs: dict[Any, int] = {}
        self.writer, self.reader, self.stored_at = np.full((3, self.number), NOBODY)


class Watch(TorchFunctionMode):
    """What kernels do to tensors. What PyTorch allocates is NaN, so that what no kernel stores is
    not right by chance.

    Args:
        inputs: tensors that must stay as they are, by name.
        largest: the most elements that a load may have, or None.
        file: whose host code may allocate with PyTorch and not compute; None: all may compute.
    """

    def __init__(
        self, inputs: dict[str, torch.Tensor], largest: int | None = None, file: str | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.file = inputs, file
        self.names = {x.untyped_storage().data_ptr(): name for name, x in inputs.items()}
        self.largest = largest
        self.fresh: dict[int, torch.Tensor] = {}
        self.seen: dict[tuple[int, int], Seen] = {}
        self.kept: list[torch.Tensor] = []  # so that no address is used twice
        self.tick = itertools.count(1).__next__
        self.atomics: dict[int, int] = {}  # program -> tick of its last one in this launch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller, name = sys._getframe(1), func.__name__.strip("_")
        if caller.f_code.co_filename == self.file and name not in ALLOCATE | ASK:
            raise AccessError(
                f"line {caller.f_lineno}: `{name}` of PyTorch is called; the kernel has to compute"
            )
        result = func(*args, **kwargs or {})
        if name in ALLOCATE and result.device.type == "cpu" and result.numel():
            if result.is_floating_point():
                result.fill_(float("nan"))
            self.fresh[result.untyped_storage().data_ptr()] = result
            self.kept.append(result)
        elif name == "fill" and args[-1] != args[-1]:
            pass  # a NaN is put there so that what nothing writes is seen
        elif self.fresh and name not in ASK:
            for x in args:
                if type(x) is torch.Tensor and x.device.type == "cpu":
                    self.fresh.pop(x.untyped_storage().data_ptr(), None)
        return result

    def __call__(self, tensor: torch.Tensor, kind: dtype, name: str) -> "WatchedMemory":
        """The memory of a tensor that a kernel gets."""
        return WatchedMemory(self, tensor, kind, name)

    @contextmanager
    def watching(self) -> Iterator["Watch"]:
        """Inside, launches of this thread are watched."""
        before, here.memory = here.memory, self
        try:
            with self:
                yield self
        finally:
            here.memory = before

    def loads(self, name: str) -> int:
        """How many elements of an input were loaded."""
        return sum(x.loads for (place, _), x in self.seen.items() if self.names.get(place) == name)

    def of(self, x: torch.Tensor) -> Seen | None:
        """What happened to a tensor."""
        return self.seen.get((x.untyped_storage().data_ptr(), x.element_size()))

    def never_written(self, x: torch.Tensor) -> torch.Tensor:
        """Which elements of a tensor were never written: booleans of its shape."""
        seen = self.of(x)
        if seen is None or seen.written is None:
            nothing = x.untyped_storage().data_ptr() in self.fresh
            return torch.full(x.shape, nothing, dtype=torch.bool)
        return laid_out(~seen.written, x)


def laid_out(line: np.ndarray, x: torch.Tensor) -> torch.Tensor:
    """Of a flag for each element of a storage, those of a tensor's elements."""
    return torch.from_numpy(line).as_strided(x.shape, x.stride(), x.storage_offset())


def strangers(who: Any) -> Any:
    """Which of these who were at an element belong to another program."""
    return (who != NOBODY) & (who // PARTITIONS != here.program.number)


def first_of(values: Any, chosen: Any) -> int:
    """The first of these that is chosen."""
    return int(np.asarray(values)[np.asarray(chosen)].reshape(-1)[0])


class WatchedMemory(Memory):
    """The storage of a tensor of which a kernel may access the tensor's elements only.

    Attributes:
        own: which elements of the storage are the tensor's; None if all are.
    """

    def __init__(self, watch: Watch, tensor: torch.Tensor, kind: dtype, name: str) -> None:
        super().__init__(tensor, kind, watch.names.get(tensor.untyped_storage().data_ptr(), name))
        self.watch, self.tensor = watch, tensor
        self.is_input, self.own = self.address in watch.names, None
        if tensor.numel() != self.data.size or not tensor.is_contiguous():
            self.own = np.zeros(self.data.size, bool)
            if tensor.numel():
                laid_out(self.own, tensor).fill_(True)
        key = self.address, kind.itemsize
        if key not in watch.seen:
            watch.kept.append(tensor)
            fresh = self.address in watch.fresh
            watch.seen[key] = Seen(self.data.size, fresh)
        self.seen = watch.seen[key]
        self.seen.begin()
        watch.atomics.clear()

    def element(self, offset: int) -> str:
        """An element by name, such as "o[3, 0]"."""
        x, index = self.tensor, [0] * self.tensor.ndim
        left: Any = int(offset) - x.storage_offset()
        for axis in sorted(range(x.ndim), key=x.stride, reverse=True):
            if x.stride(axis) and x.shape[axis] > 1:
                index[axis], left = divmod(left, x.stride(axis))
        return f"{self.name}{index}"

    def check(self, offset: Any, what: str) -> None:
        """Refuse an access outside of the tensor."""
        super().check(offset, what)
        if self.own is not None and not (own := self.own[offset]).all():
            self.refuse(first_of(offset, ~own), what)

    def refuse(self, outside: int, what: str) -> NoReturn:
        """Name an element that is none of the tensor's."""
        x, place = self.tensor, outside - self.tensor.storage_offset()
        size = sum((n - 1) * step for n, step in zip(x.shape, x.stride())) + 1 if x.numel() else 0
        shape, said = " x ".join(map(str, x.shape)) or "1", f"a {what} goes"
        if 0 <= place < size:
            raise AccessError(
                f"{said} outside of {self.name}, {place} elements behind its begin: it is not "
                f"contiguous, its strides are {list(x.stride())} ({shape} elements)"
            )
        raise AccessError(
            f"{said} to element {place} of {self.name}, which has {x.numel()} ({shape}): "
            f"{'past the end' if place >= 0 else 'before the begin'}, so it needs another mask or "
            "address"
        )

    def load(self, offset: Any, valid: Any = None) -> Any:
        """See `Memory.load`."""
        values, largest = super().load(offset), self.watch.largest
        if largest and offset.size > largest:
            raise AccessError(
                f"a load has {offset.size} elements; a tile of this puzzle has at most "
                f"{largest}, as if no more had room on the chip"
            )
        self.note_load(offset if valid is None else offset[valid])
        return values

    def note_load(self, offset: Any) -> None:
        """Refuse to load what nothing wrote, or another program stores."""
        seen, number = self.seen, here.program.number
        seen.loads += offset.size
        self.check_written(offset, "read")
        if self.is_input or here.program.grid == (1, 1, 1):
            return
        writer, reader, own = seen.writer[offset], seen.reader[offset], number * PARTITIONS
        others = strangers(writer)
        if others.any() and not self.ordered(offset[others], np.asarray(writer)[others]):
            raise AccessError(
                f"program {number} reads {self.element(first_of(offset, others))}, which program "
                f"{first_of(writer, others) // PARTITIONS} stores: on a GPU either may come first; "
                "only an atomic operation of both between tells"
            )
        seen.reader[offset] = np.where((reader == NOBODY) | (reader == own), own, SEVERAL)

    def check_written(self, offset: Any, what: str) -> None:
        """Refuse that something is done with what nothing wrote."""
        written = self.seen.written
        if written is not None and not (there := written[offset]).all():
            first = self.element(first_of(offset, ~there))
            raise AccessError(f"{first} is {what}, and nothing wrote it yet")

    def ordered(self, offset: Any, writer: Any) -> bool:
        """Whether atomic operations of both programs lie between stores and a load of this one."""
        atomics, stored = self.watch.atomics, self.seen.stored_at[offset]
        released = np.array([atomics.get(x // PARTITIONS, -1) for x in writer.tolist()])
        now = atomics.get(here.program.number, -1)
        return bool((released > stored).all() and (now > stored).all())

    def store(self, offset: Any, values: Any) -> None:
        """See `Memory.store`."""
        self.check(offset, "store")
        self.note_store(offset)
        super().store(offset, values)

    def note_store(self, offset: Any) -> None:
        """Refuse to store to an input, or where another program loads or stores."""
        self.check_changes("a store")
        seen, program, partition = self.seen, here.program, here.partition
        seen.stores += offset.size
        if program.grid != (1, 1, 1) or partition is not None:
            for kind, who in (("stores", seen.writer[offset]), ("reads", seen.reader[offset])):
                if (others := strangers(who)).any():
                    other = first_of(who, others) // PARTITIONS
                    which = f"program {other}" if other >= 0 else "another program"
                    begin = "two programs store" if kind == "stores" else "a program stores"
                    raise AccessError(
                        f"{begin} {self.element(first_of(offset, others))}: program "
                        f"{program.number} stores it, and {which} {kind} it, too; on a GPU either "
                        "may come first"
                    )
            index = 0
            if partition is not None:
                self.check_partitions(offset)
                index, seen.epochs[partition] = partition.index, partition.clock[partition]
            seen.writer[offset] = program.number * PARTITIONS + index
            seen.stored_at[offset] = self.watch.tick()
        if seen.written is not None:
            seen.written[offset] = True

    def check_partitions(self, offset: Any) -> None:
        """Refuse to store where another partition has, if no barrier says that this comes later."""
        partition, epochs, writer = here.partition, self.seen.epochs, self.seen.writer[offset]
        for one in here.program.partitions:
            same = writer == here.program.number * PARTITIONS + one.index
            if same.any() and partition is not one and partition.clock.get(one, 0) < epochs[one]:
                raise AccessError(
                    f"two partitions store {self.element(first_of(offset, same))}: {partition} and "
                    f"{one}; either may come first"
                )

    def check_changes(self, what: str) -> None:
        """Refuse to change an input."""
        if self.is_input:
            raise AccessError(f"{what} changes {self.name}; inputs must stay as they are")

    def note_box(self, part: np.ndarray, what: str) -> None:
        """See `Memory.note_box`."""
        if what == "load" and self.is_input and self.own is None:
            self.seen.loads += part.size  # of which nothing can be wrong
            return
        offset: Any = np.int64(part.__array_interface__["data"][0] - self.address) // part.itemsize
        for axis, (n, step) in enumerate(zip(part.shape, part.strides)):
            index = np.arange(n) * (step // part.itemsize)
            offset = offset + index.reshape([-1 if i == axis else 1 for i in range(part.ndim)])
        self.check(offset, "load" if what == "load" else "store")
        getattr(self, f"note_{what}")(offset)

    def note_atomic(self, offset: Any) -> None:
        """See `Memory.note_atomic`."""
        self.check_changes("an atomic operation")
        self.check_written(offset, "added to")
        self.seen.stores += offset.size
        self.watch.atomics[here.program.number] = self.watch.tick()

    def absent(self) -> Any:
        """What a lane without `other` reads: nothing that a kernel may rely on."""
        if self.kind.kind == 0:
            return self.kind.np(0)
        return self.kind.np(np.nan if self.kind.kind == 2 else self.kind.highest // 2 - 11)
