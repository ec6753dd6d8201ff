"""TMA for emulator.py: boxes of tensors, copied to shared memory and from there."""

import math
from typing import NamedTuple

import torch

from flash_versions.dispatch.emulator.machine import Load, here, note


class Box(NamedTuple):
    shape: list[int]
    nbytes: int


class TensorDescriptor:
    """Boxes of a tensor, which may reach past its end."""

    def __init__(self, base, shape, strides, block_shape, layout):
        vectors = [stride * base.element_size() % 16 for stride in strides[:-1]]
        assert not any(vectors) and strides[-1] == 1 and min(shape) > 0, "TMA cannot address this"
        self.base, self.shape, self.strides = base, shape, strides
        self.dtype, self.layout = base.dtype, layout
        self.block_type = Box(block_shape, math.prod(block_shape) * base.element_size())

    def box(self, coordinates):
        """The part of the tensor that lies in a box, and the slices of a tile where it belongs.

        Addresses are counted modulo 2^64, which `tiles/ragged.py` relies on.
        """
        corner = [int(i) for i in coordinates]
        assert min(corner) >= 0, f"a box at {corner}"
        box = zip(self.shape, corner, self.block_type.shape, strict=True)
        extent = [max(0, min(n - i, wide)) for n, i, wide in box]
        if 0 in extent:
            return self.base.new_empty(extent), tuple(map(slice, extent))
        size = self.base.element_size()
        address = sum(i * step for i, step in zip(corner, self.strides)) * size % 2**64
        steps = [step if n > 1 else 0 for step, n in zip(self.strides, extent)]
        first = self.base.storage_offset() + address // size
        last = first + sum((n - 1) * step for n, step in zip(extent, steps))
        end = self.base.untyped_storage().nbytes() // size
        assert 0 <= first <= last < end, f"the box at {corner} lies outside of the tensor"
        return self.base.as_strided(extent, steps, first), tuple(map(slice, extent))


class tma:
    tensor_descriptor = TensorDescriptor

    def async_load(descriptor, coordinates, barrier, tile):
        machine = here.partition.program.machine
        late = machine.draw(machine.order.late_loads)
        machine.loads.append(Load(descriptor, coordinates, barrier, tile, late))
        here.partition.pause()

    def async_store(descriptor, coordinates, tile):
        tma.leave(torch.Tensor.copy_, descriptor, coordinates, tile)

    def async_atomic_add(descriptor, coordinates, tile):
        tma.leave(torch.Tensor.add_, descriptor, coordinates, tile)

    def leave(write, descriptor, coordinates, tile):
        missing = here.partition.before_tma
        assert not missing, f"a TMA store behind a read without {' and '.join(sorted(missing))}"
        unfenced = here.partition.program.unfenced
        assert tile.data.data_ptr() not in unfenced, "a TMA store without fence_async_shared"
        assert tile.shape == descriptor.block_type.shape, "a tile of another shape than the box"
        here.partition.stores.append(Store(write, descriptor, coordinates, tile))
        note("store", tile)

    def store_wait(pendings):
        """Until all but so many tiles have been read."""
        stores, machine = here.partition.stores, here.partition.program.machine
        here.partition.pause(late=len(stores) > pendings)
        while len(stores) > pendings:
            stores[0].read()
            if machine.draw(machine.order.late_loads):
                here.partition.leaving.append(stores.pop(0))
            else:
                stores.pop(0).land()


def wait_stored(pendings):
    """Until all but so many tiles are in memory."""
    tma.store_wait(pendings)
    here.partition.before_count = {"fence.acq_rel.gpu"}
    stores, leaving = here.partition.stores, here.partition.leaving
    while len(stores) + len(leaving) > pendings:
        leaving.pop(0).land()


class Store:
    """A copy or an addition from shared memory to memory that is on its way."""

    def __init__(self, write, descriptor, coordinates, tile):
        self.write, self.descriptor, self.tile = write, descriptor, tile
        self.coordinates = [int(i) for i in coordinates]
        self.part, self.place = descriptor.box(coordinates)
        self.partition = here.partition

    def read(self):
        """Read the tile, which may be written from now on."""
        self.data = self.tile.data[self.place].clone()

    def land(self):
        """Write to memory."""
        self.write(self.part, self.data)
        note("stored", self, partition=self.partition)


def fence_async_shared():
    program = here.partition.program
    mine = [k for k, (writer, _) in program.unfenced.items() if writer is here.partition]
    for k in mine:
        del program.unfenced[k]
    for k in [k for k in program.read if k[1] is here.partition]:
        del program.read[k]
