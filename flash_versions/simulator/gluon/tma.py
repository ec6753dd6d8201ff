"""TMA, by Gluon's names of all supported versions: boxes of tensors, copied to shared memory and
from there.
"""

import math
import operator
from functools import partial
from types import SimpleNamespace

import numpy as np

from flash_versions.simulator.dtypes import decode, encode
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.simulator.gluon import hazards
from flash_versions.simulator.gluon.machine import note
from flash_versions.simulator.memory import Memory, pointer_to
from flash_versions.simulator.state import here
from flash_versions.simulator.values import to_tensor


class tensor_descriptor:
    """Boxes of a tensor, which may reach past its end."""

    handle = property(lambda self: self)
    shape = property(lambda self: tuple(map(to_tensor, self.sizes)))
    strides = property(lambda self: tuple(map(to_tensor, self.steps)))

    def __init__(self, base, shape, strides, block_shape, layout, padding_option="zero"):
        self.memory, self.first, self.dtype = base.memory, int(base.offset), base.element
        self.sizes, self.steps = ([operator.index(n) for n in x] for x in (shape, strides))
        self.block_shape, self.layout = tuple(block_shape), layout
        size = self.dtype.itemsize
        starts = [self.memory.address + self.first * size, *(x * size for x in self.steps[:-1])]
        if any(x % 16 for x in starts) or self.steps[-1] != 1 or min(self.sizes) < 1:
            raise AccessError(
                f"TMA cannot address a tensor of {self.sizes} with strides {self.steps}: it and "
                "its rows begin at multiples of 16 bytes, and none of its sizes is 0"
            )
        self.nbytes_per_cta = math.prod(self.block_shape) * size
        self.block_type = SimpleNamespace(
            element_ty=self.dtype, shape=self.block_shape, nbytes=self.nbytes_per_cta
        )

    def box(self, coordinates, tile):
        """Where a box is, the part of the tensor that lies in it, and the slices of a tile where
        that belongs. Addresses are counted modulo 2^64, which `tiles/ragged.py` relies on.
        """
        if tile.shape != self.block_shape or tile.dtype is not self.dtype:
            kinds = f"{tile.dtype} of {list(tile.shape)}, {self.dtype} of {list(self.block_shape)}"
            raise CompileError(f"a tile and a box differ: {kinds}")
        corner = [operator.index(i) for i in coordinates]
        if len(corner) != len(self.sizes) or min(corner) < 0:
            raise AccessError(f"a box of a tensor of {self.sizes} is asked for at {corner}")
        box = zip(self.sizes, corner, self.block_shape)
        extent = tuple(max(0, min(n - i, wide)) for n, i, wide in box)
        place = tuple(map(slice, extent))
        if 0 in extent:
            return corner, np.empty(extent, self.dtype.stored), place
        size, data = self.dtype.itemsize, self.memory.data
        offset = sum(i * step for i, step in zip(corner, self.steps)) * size % 2**64
        steps = [step * size if n > 1 else 0 for step, n in zip(self.steps, extent)]
        try:
            part = np.ndarray(extent, data.dtype, data, self.first * size + offset, steps)
        except (TypeError, ValueError, OverflowError):
            raise AccessError(f"the box at {corner} lies outside of {self.memory.name}") from None
        return corner, part, place


def descriptor(base, shape, strides, block_shape, layout):
    """What a kernel gets for a descriptor of the host."""
    pointer = pointer_to(base, "a tensor", here.memory or Memory)
    return tensor_descriptor(pointer, shape, strides, block_shape, layout)


class Copy:
    """Between a box of a tensor and a tile in shared memory; part and place: see `box`."""

    def __init__(self, desc, coordinates, tile):
        self.desc, self.tile, self.partition = desc, tile, here.partition
        self.coordinates, self.part, self.place = desc.box(coordinates, tile)


class Load(Copy):
    """A copy into shared memory that is on its way."""

    def __init__(self, source, coordinates, barrier, tile):
        super().__init__(source, coordinates, tile)
        self.barrier, self.bytes = barrier, source.block_type.nbytes
        self.clock = hazards.fill(tile, barrier)
        source.memory.note_box(self.part, "load")
        here.program.check_fill(tile, by_tma=True)

    def land(self):
        """Write to shared memory."""
        tile, partition = self.tile, self.partition
        partition.program.check_fill(tile, filler=partition.name)
        if self.part.shape != tile.shape:
            tile.data[...] = 0
        tile.data[self.place] = self.part
        note("landed", self, self.barrier, partition)
        self.barrier.arrive(0, -self.bytes, partition, self.clock)


class Store(Copy):
    """A copy or an addition to memory that is on its way."""

    def __init__(self, target, coordinates, tile, adds):
        super().__init__(target, coordinates, tile)
        self.adds = adds
        self.reading = here.program.read(tile, "a TMA store", self.partition, None)
        target.memory.note_box(self.part, "atomic" if adds else "store")

    def read(self):
        """Read the tile, which may be written from now on."""
        if self.reading:
            self.reading.end()
        self.data = np.array(self.tile.data[self.place])

    def land(self):
        """Write to memory."""
        kind = self.desc.dtype
        if self.adds:
            total = decode(self.part, kind) + decode(self.data, kind)
            self.data = encode(kind.round(total) if kind.round else total, kind)
        self.part[...] = self.data
        note("stored", self, partition=self.partition)


def async_load(tensor_desc, coord, barrier, result, pred=True, multicast=False):
    if pred:
        load, machine = Load(tensor_desc, coord, barrier, result), here.partition.machine
        machine.able_or_late(machine.options.order.late_loads).append(load)
        note("copy", load, barrier)
        here.partition.pause()


def async_store(tensor_desc, coord, src, adds=False):
    partition = here.partition
    if partition.before_tma:
        fences = " and ".join(sorted(partition.before_tma))
        raise AccessError(f"a TMA store comes behind a read of other programs without {fences}")
    partition.stores.append(Store(tensor_desc, coord, src, adds))
    note("store", src)


make_tensor_descriptor, async_atomic_add = tensor_descriptor, partial(async_store, adds=True)
async_copy_global_to_shared, async_copy_shared_to_global = async_load, async_store


def store_wait(pendings):
    """Until all but so many tiles have been read."""
    partition, machine = here.partition, here.partition.machine
    partition.pause(machine.late if len(partition.stores) > pendings else None)
    while len(partition.stores) > pendings:
        store = partition.stores.pop(0)
        store.read()
        if machine.random() < machine.options.order.late_loads:
            partition.leaving.append(store)
        else:
            store.land()


def wait_stored(pendings):
    """Until all but so many tiles are in memory."""
    store_wait(pendings)
    partition = here.partition
    partition.before_count = {"fence.acq_rel.gpu"}
    while len(partition.stores) + len(partition.leaving) > pendings:
        partition.leaving.pop(0).land()


def fence_async_shared(cluster=False):
    """What this partition has read from shared memory and written there, it has done before."""
    partition = here.partition
    for done in (partition.written, partition.read, partition.initialised):
        done.clear()
