"""Tiles in shared memory."""

import math
import operator

import numpy as np

from flash_versions.simulator.dtypes import decode, encode
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.simulator.gluon import report
from flash_versions.simulator.gluon.mbarrier import allocate_mbarrier
from flash_versions.simulator.state import here
from flash_versions.simulator.values import Tile, described


class Shared:
    """A tile in shared memory, or a row of slots for tiles; views share its bytes.

    Attributes:
        data: the elements as they are in memory.
        low, high: the addresses that it covers, from its first element to its last.
        views: what `index` and the like gave, each once.
    """

    kind, layout = "shared memory", None
    handle = property(lambda self: self)
    rank = property(lambda self: len(self.shape))
    a = property(lambda self: decode(self.data, self.dtype))  # as it is computed

    def __init__(self, data, dtype):
        self.data, self.dtype, self.shape, self.views = data, dtype, data.shape, {}
        self.low = data.__array_interface__["data"][0]
        steps = zip(data.shape, data.strides)
        self.high = self.low + data.itemsize + sum((n - 1) * step for n, step in steps)

    def view(self, key, make):
        """A part, or the same in another form, by what tells it from others."""
        found = self.views.get(key)
        if found is None:
            found = self.views[key] = Shared(make(), self.dtype)
        return found

    def index(self, index):
        i = operator.index(index)
        if not 0 <= i < self.shape[0]:
            raise AccessError(
                f"slot {i} of {report.name_of(self)} does not exist: it has {self.shape[0]}"
            )
        return self.view(i, lambda: self.data[i])

    def reshape(self, shape):
        return self.view(tuple(shape), lambda: reshaped(self.data, tuple(shape)))

    def permute(self, order):
        return self.view(("permute", *order), lambda: self.data.transpose(order))

    def slice(self, start, length, dim=0):
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise CompileError(f"{length} from {start} on, of a tile of {list(self.shape)}")
        place = (slice(None),) * dim + (slice(start, start + length),)
        return self.view(("slice", start, length, dim), lambda: self.data[place])

    def reinterpret(self, dtype, shape, layout):
        line = reshaped(self.data, (self.data.size,)).view(dtype.stored)
        return Shared(reshaped(line, tuple(shape)), dtype)

    _reinterpret = reinterpret

    def store(self, value):
        check_stored(value, self)
        if here.program.hazards:
            here.program.hazards.fill(self)
        here.program.check_fill(self)
        self.data[...] = encode(value.a, self.dtype)
        here.partition.written.add(self)

    def load(self, layout=None):
        partition = here.partition
        if partition.machine.options.order.late_products == 1:
            partition.pause(partition.machine.late)  # so late it finds who gives a tile back before
        if partition.program.hazards:
            partition.program.hazards.read(self)
        partition.read.add(self)
        return Tile(np.array(self.a), self.dtype)


def reshaped(data, shape):
    """The same bytes in another shape."""
    made = data.reshape(shape) if math.prod(shape) == data.size else None
    if made is None or not np.may_share_memory(made, data):
        raise CompileError(f"a tile of {list(data.shape)} in shared memory is no {list(shape)}")
    return made


def check_stored(value, tile):
    """Refuse to store a tile of another kind."""
    if value.dtype is not tile.dtype or tuple(value.shape) != tuple(tile.shape):
        kind = f"{tile.dtype} of {list(tile.shape)}"
        raise CompileError(f"{described(value)} is stored to a tile of another kind, {kind}")


def allocate_shared_memory(element_ty, shape, layout=None, value=None):
    """A tile, or barriers; what nothing was written to is NaN, or -1."""
    if type(layout).__name__ == "MBarrierLayout":
        return allocate_mbarrier(shape[0] if len(shape) > 1 else None)
    data = np.full(math.prod(shape) * element_ty.itemsize, 0xFF, np.uint8)
    made = Shared(data.view(element_ty.stored).reshape(tuple(shape)), element_ty)
    if value is not None:
        made.store(value)
    return made
