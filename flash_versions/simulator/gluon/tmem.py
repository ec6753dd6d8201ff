"""Tensor memory and the products of Blackwell's tensor cores (tcgen05).

A program's products wait in one queue. They are computed in its order, each at a time of its own
between its issue and the moment when no partition can go on without it; then the barriers of its
commit are told. In between it is an error to write an operand or to touch an accumulator.

Simulated: 512 columns of 128 lanes, tiles that share columns, the shapes and types of operands.
Not simulated: layouts of registers, fences of tcgen05, clusters of more than one program, speed.
"""

import operator

import numpy as np

from flash_versions.simulator import dtypes
from flash_versions.simulator.dtypes import decode, encode
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.simulator.gluon.hazards import join
from flash_versions.simulator.gluon.shared import Shared, check_stored
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


class tensor_memory_descriptor_type:
    """Where Triton has `get_tmem_reg_layout` from 3.8 on."""

    def __init__(self, *arguments):
        self.get_reg_layout = lambda num_warps=4, **named: get_tmem_reg_layout(
            *[None] * 3, num_warps
        )


class TensorMemory:
    """Tiles in tensor memory; views share their columns, over which the last dimension runs.

    Attributes:
        low, high: the first column, and the one behind the last. No address is as small.
    """

    kind, layout = "tensor memory", None
    a = property(lambda self: decode(self.data, self.dtype))  # as it is computed

    def __init__(self, low, shape, dtype):
        self.program, self.low, self.shape, self.dtype = here.program, low, shape, dtype
        self.columns = max(1, shape[-1] * dtype.itemsize // BYTES)  # of one tile
        self.high = low + self.columns * (shape[0] if len(shape) == 3 else 1)

    @property
    def data(self):
        """The elements of a tile as they are in memory."""
        own = self.program.tensor_memory[:, self.low : self.high]
        return own.view(self.dtype.stored)[:, : self.shape[-1]]

    def index(self, index):
        i = operator.index(index)
        if not 0 <= i < self.shape[0]:
            raise AccessError(f"tile {i} of {self.shape[0]} in tensor memory")
        return TensorMemory(self.low + i * self.columns, self.shape[1:], self.dtype)

    def slice(self, start, length):
        if not 0 <= start <= start + length <= self.shape[-1]:
            raise CompileError(f"{length} columns from {start} on, of a tile of {list(self.shape)}")
        low = self.low + start * self.dtype.itemsize // BYTES
        return TensorMemory(low, (*self.shape[:-1], length), self.dtype)

    def reinterpret(self, dtype, shape, layout=None, _semantic=None):
        made = TensorMemory(self.low, tuple(shape), dtype)
        if made.high != self.high:
            raise CompileError(f"{self.dtype} {self.shape} is not {dtype} {list(shape)}")
        return made

    _reinterpret = reinterpret

    def load(self, layout=None):
        here.partition.pause()
        here.program.check_queue(self, "read before its product is done", reads=True)
        return Tile(np.array(self.a), self.dtype)

    def store(self, value, pred=True):
        check_stored(value, self)
        here.partition.pause()
        if pred:
            here.program.check_fill(self)
            self.data[...] = encode(value.a, self.dtype)


def allocate_tensor_memory(element_ty, shape, layout, value=None):
    """Tiles (tiles, 128, n) or (128, n); what nothing was written to reads as NaN."""
    program = here.program
    made = TensorMemory(program.columns, tuple(shape), element_ty)
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
        self.waiting = []  # the partition that waits for it without a barrier
        self.clock = None
        if hazards := here.program.hazards:
            hazards.queued += 1
            for x in operands:
                if isinstance(x, Shared):
                    hazards.read(x, "queue", hazards.queued)
            self.clock = dict(self.partition.clock) | {"queue": hazards.queued}
        machine = here.partition.machine
        late = machine.draw(machine.options.order.late_products)
        self.among = machine.late if late else machine.able
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
            acc.data[...] = a @ b + acc.a if self.use_acc else a @ b
        for barrier in self.barriers:
            barrier.arrive(1, partition=self.partition, clock=self.clock)
        self.partition.machine.able += self.waiting


def tcgen05_mma(
    a, b, acc, *, use_acc=True, pred=True, multicast=False, mbarriers=None, mbarrier_preds=None
):
    """Queue a product, whose barriers tell when it is done; without a list of them, wait for it."""
    if not pred:
        return
    check_operands(a, b, acc)
    here.program.check_fenced([x for x in (a, b) if isinstance(x, Shared)], "a product")
    barriers = mbarriers or []
    preds = [True] * len(barriers) if mbarrier_preds is None else mbarrier_preds
    told = [barrier for barrier, told in zip(barriers, preds, strict=True) if told]
    product = Product((a, b), (acc,), bool(use_acc), told)
    if mbarriers is None:
        product.waiting.append(here.partition)
        here.partition.wait()
        join(here.partition.clock, product.clock or {})
    else:
        here.partition.pause()


def check_operands(a, b, acc):
    """Refuse what Blackwell's tensor cores cannot multiply."""
    (M, K), (K_b, N) = a.shape, b.shape
    kinds = f"{a.dtype} {[M, K]} times {b.dtype} {[K_b, N]}"
    if K_b != K or acc.shape != (M, N):
        raise CompileError(f"{list(acc.shape)} is no {kinds}")
    if M != LANES or N % 16 or not 16 <= N <= 256:
        raise CompileError(f"no product of {M} x {N}: {LANES} rows, and 16, 32, ... 256 columns")
    if K * a.dtype.itemsize % 32:
        raise CompileError(f"a step of a product takes 32 bytes of what is summed over, {K}")
    if a.dtype not in KINDS or a.dtype is not b.dtype:
        raise CompileError(f"no {kinds}: one type of 16 or of 8 bits")
    if acc.dtype is not dtypes.float32 or not isinstance(acc, TensorMemory):
        raise CompileError("a product is summed up in fp32 in tensor memory")
    if not isinstance(b, Shared):
        raise CompileError("the right operand of a product is in shared memory")


def tcgen05_commit(barrier, pred=True, descs=()):
    """Arrive at a barrier when all products that were issued before are computed."""
    if pred:
        Product((), (), False, [barrier])
        here.partition.pause()
