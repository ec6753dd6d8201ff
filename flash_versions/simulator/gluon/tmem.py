"""Tensor memory and the products of Blackwell's tensor cores (tcgen05).

A program's products wait in one queue. They are computed in its order, each at a time of its own
between its issue and the moment when no partition can go on without it; then the barriers of its
commit are told. In between it is an error to write an operand or to touch an accumulator.

Simulated: 512 columns of 128 lanes, tiles that share columns, the shapes and types of operands.
Not simulated: layouts of registers, fences of tcgen05, clusters of more than one program, speed.
"""

import numpy as np

from flash_versions.simulator import dtypes, floats
from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.gluon.mbarrier import Barrier
from flash_versions.simulator.gluon.shared import Region, Shared
from flash_versions.simulator.state import here
from flash_versions.simulator.values import Tile

LANES, COLUMNS = 128, 512
BYTES = 4  # of a column in one lane
KINDS = dtypes.float16, dtypes.bfloat16, dtypes.float8e4nv, dtypes.float8e5


class TensorMemoryLayout:
    """A lane for each row; col_stride columns for each 32 bits of it."""

    def __init__(self, block, col_stride=1, *others, **named):
        if block[0] != LANES or col_stride != 1:
            raise CompileError(f"tiles have {LANES} rows here, and columns without gaps")


def get_tmem_reg_layout(element_ty, shape, layout, num_warps=4, *others, **named):
    if num_warps != 4:
        raise CompileError(f"{num_warps} warps; 4 reach all lanes of a tile of {LANES} rows")


class TensorMemory(Region):
    """Of tensor memory, by columns, over which the last dimension runs: no address is as small."""

    kind = "tensor memory"

    def __init__(self, low, shape, dtype):
        super().__init__()
        self.low, self.shape, self.dtype = low, tuple(shape), dtype
        self.columns = max(1, shape[-1] * dtype.itemsize // BYTES)  # of one tile
        self.high = low + self.columns * (shape[0] if len(shape) == 3 else 1)

    @property
    def data(self):
        own = self.program.tensor_memory[:, self.low : self.high]
        return own.view(self.dtype.stored)[:, : self.shape[-1]]

    def index(self, index):
        low = self.low + self.slot(index) * self.columns
        return TensorMemory(low, self.shape[1:], self.dtype)

    def slice(self, start, length):
        self.check_slice(start, length, self.shape[-1])
        low = self.low + start * self.dtype.itemsize // BYTES
        return TensorMemory(low, (*self.shape[:-1], length), self.dtype)

    def reinterpret(self, dtype, shape, layout=None, _semantic=None):
        made = TensorMemory(self.low, shape, dtype)
        if made.high != self.high:
            raise CompileError(f"{self.dtype} {self.shape} is not {dtype} {list(shape)}")
        return made

    def load(self, layout=None):
        here.partition.pause()
        here.program.check_queue(self, "read before its product is done", reads=True)
        return Tile(np.array(self.a), self.dtype)

    def store(self, value, pred=True):
        here.partition.pause()
        if pred:
            self.fill(value)


def allocate_tensor_memory(element_ty, shape, layout, value=None):
    """Tiles (tiles, 128, n) or (128, n); what nothing was written to reads as NaN."""
    program = here.program
    made = TensorMemory(program.columns, shape, element_ty)
    program.columns = made.high
    if made.high > COLUMNS:
        raise CompileError(f"{made.high} columns of {COLUMNS} are allocated")
    if program.tensor_memory is None:
        program.tensor_memory = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
    if value is not None:
        made.store(value)
    return made


class Product:
    """D = A B or D += A B, or a commit without a product, in the queue of its program."""

    def __init__(self, operands, written, use_acc, barriers):
        self.operands, self.written, self.use_acc = operands, written, use_acc
        self.barriers, self.partition, self.queue = barriers, here.partition, here.program.queue
        self.clock = self.partition.clock | {"queue": self.partition.machine.tick()}
        for x in operands:
            if isinstance(x, Shared):
                here.program.read(x, "a product", "queue", self.clock["queue"])
        machine = here.partition.machine
        self.among = machine.able_or_late(machine.options.order.late_products)
        self.queue.append(self)
        if self.queue[0] is self:
            self.among.append(self)

    def land(self):
        """Compute it, and tell its barriers."""
        self.queue.pop(0)
        if self.queue:
            self.queue[0].among.append(self.queue[0])
        for acc in self.written:
            a, b = (np.asarray(x.a, np.float32) for x in self.operands)
            made = floats.product(a, b)
            acc.data[...] = made + acc.a if self.use_acc else made
        for barrier in self.barriers:
            barrier.arrive(1, partition=self.partition, clock=self.clock)


def tcgen05_mma(
    a, b, acc, *, use_acc=True, pred=True, multicast=False, mbarriers=None, mbarrier_preds=None
):
    """Queue a product, whose barriers tell when it is done; without a list of them, wait for it."""
    if not pred:
        return
    check_operands(a, b, acc)
    barriers = [Barrier(count=1)] if mbarriers is None else mbarriers
    preds = [True] * len(barriers) if mbarrier_preds is None else mbarrier_preds
    told = [barrier for barrier, told in zip(barriers, preds, strict=True) if told]
    Product((a, b), (acc,), bool(use_acc), told)
    if mbarriers is None:
        barriers[0].wait_for(0)
    else:
        here.partition.pause()


def check_operands(a, b, acc):
    """Refuse what Blackwell's tensor cores cannot multiply."""
    (M, K), (K_b, N) = a.shape, b.shape
    kinds = f"{a.dtype} {[M, K]} times {b.dtype} {[K_b, N]}"
    is_in_place = acc.dtype is dtypes.float32 and isinstance(acc, TensorMemory)
    fits = M == LANES and N in range(16, 257, 16)
    rules = {
        f"{list(acc.shape)} is no {kinds}": K_b == K and acc.shape == (M, N),
        f"no product of {M} x {N}: {LANES} rows, and 16, 32, ... 256 columns": fits,
        f"a step takes 32 bytes of what is summed over, {K}": K * a.dtype.itemsize % 32 == 0,
        f"no {kinds}: one type of 16 or of 8 bits": a.dtype is b.dtype and a.dtype in KINDS,
        "a product is summed up in fp32 in tensor memory": is_in_place,
        "the right operand of a product is in shared memory": isinstance(b, Shared),
    }
    for said, holds in rules.items():
        if not holds:
            raise CompileError(said)


def tcgen05_commit(barrier, pred=True, descs=()):
    """Arrive at a barrier when all products that were issued before are computed."""
    if pred:
        Product((), (), False, [barrier])
        here.partition.pause()
