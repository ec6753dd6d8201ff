"""Tensor memory and the products of Blackwell's tensor cores (tcgen05), for emulator.py.

A program's products wait in one queue. They are computed in its order, each at a time of its own
between its issue and the moment when no partition can go on without it; then the barriers of its
commit are told. A tile is protected in between: it is an error to write an operand or to touch an
accumulator of a product that is in the queue.

Modelled: 512 columns of 128 lanes, tiles that share columns, the shapes and types of operands.
Not modelled: layouts of registers, fences of tcgen05, clusters of more than one program, speed.
"""

import torch

from flash_versions.dispatch.emulator.machine import here
from flash_versions.dispatch.emulator.values import Tensor, allocation

LANES, COLUMNS = 128, 512
BYTES = 4  # of a column in one lane
KINDS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class TensorMemoryLayout:
    """A lane for each row; col_stride columns for each 32 bits of it."""

    def __init__(self, block, col_stride=1):
        assert block[0] == LANES, f"{block[0]} rows; {LANES} are emulated"
        assert col_stride == 1, "columns are emulated without gaps"
        self.block = block


def get_tmem_reg_layout(dtype, shape, layout, num_warps):
    assert num_warps == 4, f"{num_warps} warps; 4 reach all lanes of a tile of 128 rows"


class TensorMemory:
    """Tiles in tensor memory; views share their storage. The last dimension runs over columns."""

    def __init__(self, data, first):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype
        self.first = first  # column

    @property
    def region(self):
        """(storage, first column, the one behind the last)."""
        size = self.shape[-1] * self.dtype.itemsize
        tiles = self.shape[0] if len(self.shape) == 3 else 1
        return allocation(self), self.first, self.first + tiles * max(1, size // BYTES)

    def index(self, i):
        assert 0 <= i < self.shape[0], f"tile {i} of {self.shape[0]}"
        tile = TensorMemory(self.data[int(i)], self.first)
        tile.first += int(i) * (tile.region[2] - tile.first)
        return tile

    def slice(self, start, length):
        assert start >= 0 and start + length <= self.shape[-1], "columns of another tile"
        first = self.first + start * self.dtype.itemsize // BYTES
        return TensorMemory(self.data.narrow(-1, start, length), first)

    def reinterpret(self, dtype, shape, layout, _semantic=None):
        data = self.data.view(dtype)
        assert list(data.shape) == list(shape), f"{self.shape} {self.dtype} is not {shape} {dtype}"
        return TensorMemory(data, self.first)

    def load(self, layout=None):
        here.partition.pause()
        here.partition.program.check_read(self, "tensor memory")
        return Tensor(self.data.clone())

    def store(self, value):
        assert (value.shape, value.dtype) == (self.shape, self.dtype), "a tile of another kind"
        here.partition.pause()
        here.partition.program.check_write(self, "tensor memory")
        self.data.copy_(value.data)


def allocate_tensor_memory(dtype, shape, layout, value=None):
    """Tiles (tiles, 128, n) or (128, n); what nothing was written to reads as NaN."""
    program = here.partition.program
    columns = shape[-1] * dtype.itemsize // BYTES
    data = torch.full([*shape[:-1], columns], -1, dtype=torch.int32).view(dtype)
    made = TensorMemory(data, program.columns)
    _, _, program.columns = made.region
    assert program.columns <= COLUMNS, f"{program.columns} columns of {COLUMNS} are allocated"
    if value is not None:
        made.store(value)
    return made


class Product:
    """D = A B or D += A B, or a commit without a product, in the queue of its program."""

    def __init__(self, operands, written, compute, barriers):
        self.operands, self.written, self.compute = operands, written, compute
        self.barriers = barriers
        self.partition, self.program = here.partition, here.partition.program
        machine = self.program.machine
        self.late = machine.draw(machine.order.late_products)
        self.program.queue.append(self)
        machine.loads.append(self)

    def ready(self):
        return self.program.queue[0] is self

    def land(self):
        self.program.queue.pop(0)
        self.compute()
        for barrier in self.barriers:
            barrier.arrive(1, partition=self.partition)


def tcgen05_mma(a, b, acc, *, use_acc=True, pred=True, mbarriers=None, mbarrier_preds=None):
    """Queue a product, whose barriers tell when it is done; without a list of them, wait for it."""
    if not pred:
        return
    (M, K), (K_b, N) = a.shape, b.shape
    assert K_b == K and acc.shape == [M, N], f"{acc.shape} is no {a.shape} times {b.shape}"
    assert M == LANES and N % 16 == 0 and 16 <= N <= 256, f"no product of {M} x {N}"
    assert K * a.dtype.itemsize % 32 == 0, f"a step of a product takes 32 bytes of {K}"
    assert a.dtype in KINDS and a.dtype == b.dtype, f"no {a.dtype} times {b.dtype}"
    assert acc.dtype == torch.float32 and isinstance(acc, TensorMemory), "no such accumulator"
    assert not isinstance(b, TensorMemory), "B is in shared memory"
    here.partition.program.check_fenced(a, b)

    def compute():
        product = a.data.float() @ b.data.float()
        acc.data.copy_(product + acc.data if use_acc else product)

    use_acc = bool(use_acc)
    barriers = mbarriers or []
    preds = [True] * len(barriers) if mbarrier_preds is None else mbarrier_preds
    told = [barrier for barrier, told in zip(barriers, preds, strict=True) if told]
    product = Product((a, b), (acc,), compute, told)
    if mbarriers is None:
        here.partition.pause(lambda: product not in product.program.queue)
    else:
        here.partition.pause()


def tcgen05_commit(barrier, pred=True):
    """Arrive at a barrier when all products that were issued before are computed."""
    if pred:
        Product((), (), lambda: None, [barrier])
        here.partition.pause()
