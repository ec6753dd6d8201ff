"""Memory of a device: tensors that kernels load from and store to."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NoReturn

import numpy as np
import torch

from flash_versions.simulator.dtypes import OF_TORCH, decode, dtype, encode, float16, int1, int64
from flash_versions.simulator.errors import AccessError, refuse
from flash_versions.simulator.state import here
from flash_versions.simulator.values import (
    Pointer,
    Tile,
    cast,
    check_broadcast,
    check_shape,
    described,
    to_tensor,
)

BITS = {1: torch.uint8, 2: torch.uint16}
CACHE = "", ".ca", ".cg", ".cv", ".cs", ".wb", ".wt"
EVICTION = "", "evict_first", "evict_last", "evict_normal"
PADDING = {"": None, "zero": 0, "nan": float("nan")}


class Memory:
    """The storage of a tensor, as a line of elements.

    Attributes:
        data: the elements as they are in memory.
        address: in bytes, of the first.
        name: of the kernel's parameter.
    """

    def __init__(self, tensor: torch.Tensor, kind: dtype, name: str = "a tensor") -> None:
        storage = tensor.untyped_storage()
        self.address, self.name, self.kind = storage.data_ptr(), name, kind
        line = tensor.detach().as_strided((storage.nbytes() // kind.itemsize,), (1,), 0)
        self.data: np.ndarray = (line.view(BITS[kind.itemsize]) if kind.round else line).numpy()

    def check(self, offset: Any, what: str) -> None:
        """Refuse a "load" or a "store" outside of the storage."""
        if offset.size and offset.view(np.uint64).max() >= self.data.size:  # also of negative ones
            self.refuse(offset[(offset < 0) | (offset >= self.data.size)].reshape(-1)[0], what)

    def refuse(self, outside: int, what: str) -> NoReturn:
        """Name an element that does not exist."""
        raise AccessError(
            f"a {what} goes to element {outside} of {self.name}, which has {self.data.size}: it "
            "needs another mask or address"
        )

    def load(self, offset: Any, valid: Any = None) -> Any:
        """Elements, as they are computed; of lanes that are not valid, any."""
        self.check(offset, "load")
        return decode(self.data[offset], self.kind)

    def store(self, offset: Any, values: Any) -> None:
        """Put computed values into memory."""
        self.check(offset, "store")
        self.data[offset] = encode(values, self.kind)

    def note_box(self, part: np.ndarray, what: str) -> None:
        """TMA does a "load", "store" or "atomic" of a part; a watched memory makes use of it."""

    def note_atomic(self, offset: Any) -> None:
        """An atomic operation happens to elements; a watched memory makes use of it."""

    def absent(self) -> Any:
        """What a lane reads whose mask is false and that has no `other`."""
        return self.kind.np(0)


def pointer_to(tensor: torch.Tensor, name: str, memory: Callable = Memory) -> Pointer:
    """What a kernel gets for a tensor that is its parameter `name`."""
    kind = OF_TORCH.get(tensor.dtype)
    if kind is None:
        refuse(f"{name} is a tensor of {tensor.dtype}, which kernels cannot take")
    return Pointer(memory(tensor, kind, name), np.int64(tensor.storage_offset()), kind)


def lanes(pointer: Any, mask: Any, what: str) -> tuple[Pointer, np.ndarray | None]:
    """The addresses of an access, and which of them count: None is all."""
    if not isinstance(pointer, Pointer):
        refuse(f"a {what} needs a pointer, and this is {described(pointer)}")
    if mask is None or mask is True or (type(mask) is int and mask == 1):
        return pointer, None
    mask = to_tensor(mask)
    if mask.dtype.kind == 2:
        refuse(f"a mask is true or false, and this is {described(mask)}")
    if mask.shape and not pointer.shape:
        refuse(f"the mask is {described(mask)}, and the pointer is one address")
    check_broadcast(mask.shape, pointer.shape)
    valid = mask.a if mask.dtype is int1 else mask.a != 0
    if valid.shape != pointer.shape:
        shape = np.broadcast_shapes(valid.shape, pointer.shape)
        valid = np.broadcast_to(valid, shape)
        pointer = Pointer(pointer.memory, np.broadcast_to(pointer.offset, shape), pointer.element)
    return pointer, None if valid.all() else valid


def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: str = "",
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Tile:
    """Elements of memory; of lanes without a mask, `other`."""
    if cache_modifier not in CACHE or eviction_policy not in EVICTION:
        refuse(f"Triton knows no cache {cache_modifier!r} and {eviction_policy!r}")
    if isinstance(pointer, BlockPointer):
        if mask is not None or other is not None:
            refuse("a block is loaded without mask and other; see boundary_check")
        other = PADDING[padding_option]
        pointer, mask = pointer.lanes(pointer.offsets, boundary_check)
    if other is not None and mask is None:
        refuse("`other` is what lanes get where the mask is false, and there is no mask")
    pointer, valid = lanes(pointer, mask, "load")
    if other is not None:
        other = cast(other, pointer.element)
        check_broadcast(other.shape, pointer.shape)
    if here.dry:
        return Tile(np.zeros(pointer.shape, pointer.element.np)[()], pointer.element)
    if valid is None:
        return Tile(pointer.memory.load(pointer.offset), pointer.element)
    absent = pointer.memory.absent() if other is None else other.a
    if not valid.any():
        values = np.full(valid.shape, pointer.element.np(0))
    else:
        first = pointer.offset[valid].reshape(-1)[0]
        values = pointer.memory.load(np.where(valid, pointer.offset, first), valid)
    return Tile(np.where(valid, values, absent)[()], pointer.element)


def store(
    pointer: Any,
    value: Any,
    mask: Any = None,
    boundary_check: Any = (),
    cache_modifier: str = "",
    eviction_policy: str = "",
) -> None:
    """Put values into memory, rounded to its type."""
    if isinstance(pointer, BlockPointer):
        pointer, mask = pointer.lanes(pointer.offsets, boundary_check)
    pointer, valid = lanes(pointer, mask, "store")
    value = to_tensor(value)
    if value.shape and not pointer.shape:
        refuse(f"{described(value)} is stored at one address")
    check_broadcast(value.shape, pointer.shape)
    values = np.broadcast_to(cast(value, pointer.element).a, pointer.shape)
    if here.dry:
        return
    if valid is None:
        pointer.memory.store(pointer.offset, values)
    elif valid.any():
        pointer.memory.store(pointer.offset[valid], values[valid])


def atomic(combine: Callable[[Any, Any], Any], kinds: str = "iu") -> Callable[..., Tile]:
    """An atomic operation: memory becomes combine(memory, value); it returns what was before."""

    def apply(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tile:
        if here.partition is not None:
            here.partition.pause()
        pointer, valid = lanes(pointer, mask, "atomic operation")
        kind, memory = pointer.element, pointer.memory
        if np.dtype(kind.np).kind not in kinds or (
            combine in (np.fmax, np.fmin) and kind is float16
        ):
            refuse(f"this atomic operation is not defined of {kind}")
        values = np.broadcast_to(cast(val, kind).a, pointer.shape)
        before = np.zeros(pointer.shape, kind.np)
        if here.dry:
            return Tile(before[()], kind)
        each = np.ones(pointer.shape, bool) if valid is None else valid
        offsets, added = pointer.offset[each].reshape(-1), values[each].reshape(-1)
        memory.check(offsets, "store")
        memory.note_atomic(offsets)
        old, parts = np.zeros(len(offsets), kind.np), [slice(None)]
        if len(np.unique(offsets)) < len(offsets):  # one after the other
            parts = [slice(i, i + 1) for i in range(len(offsets))]
        for part in parts:
            old[part] = decode(memory.data[offsets[part]], kind)
            result = np.asarray(combine(old[part], added[part]), kind.np)
            result = kind.round(result) if kind.round else result
            memory.data[offsets[part]] = encode(result, kind)
        before[each] = old
        return Tile(before[()], kind)

    return apply


def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Tile:
    """Store val where memory is cmp; returns what was before."""
    expected = cast(cmp, pointer.element).a
    return atomic(lambda old, new: np.where(old == expected, new, old), "iufb")(pointer, val)


atomic_add = atomic(np.add, "iuf")
atomic_max, atomic_min = atomic(np.fmax, "iuf"), atomic(np.fmin, "iuf")
atomic_and, atomic_or, atomic_xor = map(atomic, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
atomic_xchg = atomic(lambda old, new: new, "iufb")


class Descriptor:
    """A tensor descriptor: boxes, of which what lies outside of the tensor reads as 0 or NaN."""

    def __init__(
        self,
        base: Pointer,
        shape: Any,
        strides: Any,
        block_shape: Any,
        padding_option: str = "zero",
    ) -> None:
        self.base, self.block_shape = base, check_shape(block_shape)
        self.shape = [int(to_tensor(x).a) for x in shape]
        self.strides = [int(to_tensor(x).a) for x in strides]
        self.dtype, self.padding = base.element, PADDING[padding_option]

    def lanes(self, offsets: Sequence[Any], checked: Any = None) -> tuple[Pointer, Tile]:
        """The addresses of a box, and which of its elements lie in the tensor.

        Args:
            offsets: of the first element, along each axis.
            checked: the axes along which that is asked; None is all.
        """
        if len(offsets) != len(self.block_shape):
            refuse(f"{len(offsets)} offsets of {len(self.block_shape)} axes")
        address: Any = np.int64(0)
        inside = np.ones(self.block_shape, bool)
        for axis, (first, n) in enumerate(zip(offsets, self.block_shape)):
            index = int(to_tensor(first).a) + np.arange(n)
            index = index.reshape([-1 if i == axis else 1 for i in range(len(self.block_shape))])
            address = address + index * self.strides[axis]
            if checked is None or axis in checked:
                inside = inside & (index >= 0) & (index < self.shape[axis])
        return self.base + Tile(address, int64), Tile(inside, int1)

    def load(self, offsets: Sequence[Any]) -> Tile:
        """The box at these offsets."""
        return load(*self.lanes(offsets), self.padding)

    def store(self, offsets: Sequence[Any], value: Any) -> None:
        """Store a tile; what lies outside of the tensor is left out."""
        if value.shape != self.block_shape:
            refuse(f"{described(value)} is stored to boxes of {list(self.block_shape)}")
        pointer, inside = self.lanes(offsets)
        store(pointer, value, inside)

    def atomic_add(self, offsets: Sequence[Any], value: Any) -> None:
        """Add a tile to a box, an element at a time."""
        pointer, inside = self.lanes(offsets)
        atomic_add(pointer, value, inside)


class BlockPointer(Descriptor):
    """A block of a tensor at offsets, see `tl.make_block_ptr`."""

    def __init__(
        self, base: Pointer, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
    ) -> None:
        super().__init__(base, shape, strides, block_shape)
        self.offsets = tuple(offsets)

    def advance(self, offsets: Any) -> "BlockPointer":
        """The block that lies so many elements further."""
        moved = copy(self)
        moved.offsets = tuple(a + b for a, b in zip(self.offsets, offsets))
        return moved


make_tensor_descriptor, make_block_ptr, advance = Descriptor, BlockPointer, BlockPointer.advance
