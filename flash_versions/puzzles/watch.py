"""What interpreted kernels load and store: how much, and the first access that is wrong."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from flash_versions.mine.guard import MARGIN, Guarded, guarded_input, guarding

# What a launch needs of PyTorch: memory, and what a tensor says of itself.
MEMORY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "stride", "size", "dim"))
ATTRIBUTES = frozenset(("get", "numel", "element_size", "data_ptr", "is_contiguous", "len"))
NO_PROGRAM = -1


class KernelsOnly(TorchFunctionMode):
    """Inside, the code of a file may allocate with PyTorch and not compute with it.

    Args:
        file: whose calls are looked at; those of Triton and of the check are not.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        name = func.__name__.strip("_")
        assert caller.f_code.co_filename != self.file or name in MEMORY | ATTRIBUTES, (
            f"`{name}` of PyTorch is called; the kernel has to compute."
        )
        return func(*args, **kwargs or {})


class Seen:
    """A tensor that kernels may access: what was loaded from it, and who stored each element."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.loads, self.stores = 0, 0  # elements
        self.program = np.full(_span(tensor), NO_PROGRAM)  # the last that stored each element


def _span(x: torch.Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0


class Accesses:
    """What kernels did: by tensor, and the first fault in a sentence.

    Args:
        inputs: by name.
        allocated: the list of `guarding`, which grows.
        largest: elements that a load may have, or None.
    """

    def __init__(
        self, inputs: dict[str, torch.Tensor], allocated: list[Guarded], largest: int | None
    ) -> None:
        self.inputs = [Seen(name, x) for name, x in inputs.items()]
        self.allocated, self.results = allocated, list[Seen]()
        self.largest, self.fault = largest, ""

    def tensors(self) -> list[Seen]:
        """What a kernel may access, what was allocated meanwhile included."""
        for one in self.allocated[len(self.results) :]:
            self.results.append(Seen(f"the tensor of shape {list(one.tensor.shape)}", one.tensor))
        return [*self.inputs, *self.results]

    def look(self, what: str, pointers: TensorHandle, mask: TensorHandle) -> TensorHandle:
        """Note a "load" or a "store"; returns its mask without what is out of bounds."""
        wanted = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        good = np.zeros(pointers.data.shape, dtype=bool)
        place = "memory that is no tensor"
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for seen in self.tensors():
            index = (pointers.data.astype(np.int64) - seen.tensor.data_ptr()) // size
            span = len(seen.program)
            inside = (index >= 0) & (index < span)
            near = wanted & ~inside & (index >= -MARGIN) & (index < span + MARGIN)
            if near.any():
                place = f"element {index[near][0]} of {seen.name}, which has {span}"
            good |= inside
            self.count(what, seen, index[wanted & inside])
        if (wanted & ~good).any():
            self.complain(f"a {what} goes to {place}: it needs another mask or address.")
        if what == "load" and self.largest and wanted.size > self.largest:
            self.complain(
                f"a load has {wanted.size} elements; a tile of this puzzle has at most "
                f"{self.largest}, as if no more had room on the chip."
            )
        return TensorHandle(wanted & good, mask.dtype)

    def count(self, what: str, seen: Seen, index: np.ndarray) -> None:
        """Note which elements of a tensor were accessed."""
        if not index.size:
            return
        if what == "load":
            seen.loads += index.size
            return
        seen.stores += index.size
        if seen in self.inputs:
            self.complain(f"a store changes {seen.name}; inputs must stay as they are.")
        x, y, z = triton_interpreter.interpreter_builder.grid_idx
        program = (z << 40) + (y << 20) + x
        before = seen.program[index]
        other = (before != NO_PROGRAM) & (before != program)
        if other.any():
            self.complain(
                f"two programs store to element {index[other][0]} of {seen.name}: on a GPU one "
                "overwrites the other's result."
            )
        seen.program[index] = program

    def complain(self, fault: str) -> None:
        """Note a fault unless there is one already."""
        self.fault = self.fault or fault


@contextmanager
def watching(accesses: Accesses) -> Iterator[None]:
    """Inside, kernels access these tensors and nothing else; a wrong access is noted, not made."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, pointers, accesses.look("load", pointers, mask), *rest, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, accesses.look("store", pointers, mask), *rest)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", masked_load),
        patch.object(InterpreterBuilder, "create_masked_store", masked_store),
    ):
        yield


def run_watched(
    function: Callable[..., Any],
    inputs: dict[str, Any],
    largest: int | None = None,
) -> tuple[Any, Accesses]:
    """Call a function that launches kernels, with every access watched.

    Args:
        function: allocates its results with `torch.empty` or `torch.empty_like`.
        inputs: by name; tensors are copied, to memory between margins of NaN.
        largest: elements that a load may have.

    Raises:
        AssertionError: a wrong access, in a sentence.
        NotImplementedError: no kernel has stored anything.
    """
    given = {
        name: guarded_input(x, float("nan")) if torch.is_tensor(x) else x
        for name, x in inputs.items()
    }
    with guarding() as allocated:
        tensors = {name: x for name, x in given.items() if torch.is_tensor(x)}
        accesses = Accesses(tensors, allocated, largest)
        file = function.__code__.co_filename
        with watching(accesses), KernelsOnly(file), np.errstate(all="ignore"):
            result = function(*given.values())
    assert not accesses.fault, accesses.fault
    if not any(x.stores for x in accesses.tensors()):
        raise NotImplementedError
    return result, accesses
