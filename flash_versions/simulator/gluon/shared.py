"""Tiles in shared memory, and what those in tensor memory have in common with them."""

import math

import numpy as np

from flash_versions.simulator.dtypes import decode, encode
from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.gluon import hazards
from flash_versions.simulator.gluon.mbarrier import allocate_mbarrier
from flash_versions.simulator.gluon.report import Named
from flash_versions.simulator.state import here
from flash_versions.simulator.values import Tile, described


class Region(Named):
    """A tile on the chip, or a row of slots for tiles.

    Attributes:
        data: the elements as they are in memory.
        low, high: the places that it covers, from its first to behind its last.
    """

    layout = None
    rank = property(lambda self: len(self.shape))
    a = property(lambda self: decode(self.data, self.dtype))  # as it is computed
    _reinterpret = property(lambda self: self.reinterpret)  # its name until Triton 3.7

    def fill(self, value):
        """Write a tile of registers, which nothing in flight must need."""
        if value.dtype is not self.dtype or tuple(value.shape) != tuple(self.shape):
            kind = f"{self.dtype} of {list(self.shape)}"
            raise CompileError(f"{described(value)} is stored to a tile of another kind, {kind}")
        here.program.check_fill(self)
        self.data[...] = encode(value.a, self.dtype)

    def check_slice(self, start, length, size):
        if not 0 <= start <= start + length <= size:
            raise CompileError(f"{length} from {start} on, of a tile of {list(self.shape)}")


class Shared(Region):
    """Of shared memory, by addresses; views share its bytes.

    Attributes:
        views: what `index` and the like gave, each once.
    """

    kind = "shared memory"
    handle = property(lambda self: self)

    def __init__(self, data, dtype):
        super().__init__()
        self.data, self.dtype, self.shape, self.views = data, dtype, data.shape, {}
        self.low = data.__array_interface__["data"][0]
        steps = zip(data.shape, data.strides)
        self.high = self.low + data.itemsize + sum((n - 1) * step for n, step in steps)

    def view(self, key, make):
        """A part, or the same in another form, by what tells it from others."""
        if key not in self.views:
            self.views[key] = Shared(make(), self.dtype)
        return self.views[key]

    def index(self, index):
        i = self.slot(index)
        return self.view(i, lambda: self.data[i])

    def reshape(self, shape):
        return self.view(tuple(shape), lambda: reshaped(self.data, shape))

    def permute(self, order):
        return self.view(("permute", *order), lambda: self.data.transpose(order))

    def slice(self, start, length, dim=0):
        self.check_slice(start, length, self.shape[dim])
        place = (slice(None),) * dim + (slice(start, start + length),)
        return self.view(("slice", start, length, dim), lambda: self.data[place])

    def reinterpret(self, dtype, shape, layout):
        line = reshaped(self.data, [self.data.size]).view(dtype.stored)
        return Shared(reshaped(line, shape), dtype)

    def store(self, value):
        hazards.fill(self)
        self.fill(value)
        here.partition.written.add(self)

    def load(self, layout=None):
        partition = here.partition
        if partition.machine.options.order.late_products == 1:
            partition.pause(partition.machine.late)  # so late it finds who gives a tile back before
        hazards.read(self)
        partition.read.add(self)
        return Tile(np.array(self.a), self.dtype)


def reshaped(data, shape):
    """The same bytes in another shape."""
    made = data.reshape(shape) if math.prod(shape) == data.size else None
    if made is None or not np.may_share_memory(made, data):
        raise CompileError(f"a tile of {list(data.shape)} in shared memory is no {list(shape)}")
    return made


def allocate_shared_memory(element_ty, shape, layout=None, value=None):
    """A tile, or barriers; what nothing was written to is NaN, or -1."""
    if type(layout).__name__ == "MBarrierLayout":
        return allocate_mbarrier(shape[0] if len(shape) > 1 else None)
    data = np.full(math.prod(shape) * element_ty.itemsize, 0xFF, np.uint8)
    made = Shared(data.view(element_ty.stored).reshape(tuple(shape)), element_ty)
    if value is not None:
        made.store(value)
    return made
