"""Hopper's tensor cores: products in flight."""

import numpy as np

from flash_versions.simulator import floats
from flash_versions.simulator.dtypes import float16, float32
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.simulator.gluon import hazards
from flash_versions.simulator.gluon.machine import note
from flash_versions.simulator.gluon.shared import Shared
from flash_versions.simulator.state import here
from flash_versions.simulator.values import Tile, described


class Product(Tile):
    """A product in flight, with which nothing can be done but to wait, and to add another one.

    Attributes:
        reads: of tiles in shared memory, which must stay as they are until it is waited for.
        torn: what is wrong with one of these, if its result is used: it may read what nothing has
            filled, if not.
        result: a Tile; done: whether it was waited for.
    """

    shape = ()

    def __init__(self, a, b, acc, torn):
        self.reads, self.torn = [], torn
        for x in (a, b):
            if isinstance(x, Shared):
                try:
                    self.reads.append(here.program.read(x, "a product", here.partition, None))
                except hazards.Unfilled as error:
                    self.torn = self.torn or str(error)
        self.shape, self.dtype = (a.shape[0], b.shape[1]), acc.dtype
        self.result, self.done = multiplied(a, b, acc), False

    @property
    def a(self):
        """What is read of a product that was not waited for, or that is torn."""
        raise AccessError(self.torn or "a product is read while it is in flight: wait for it")


def multiplied(a, b, acc):
    """acc + A B: an instruction sums up 32 bytes, then rounds."""
    made, step = acc.a, 32 // b.dtype.itemsize
    a, b = (np.asarray(x.a, np.float32) for x in (a, b))
    for i in range(0, a.shape[1], step):
        made = (made + floats.product(a[:, i : i + step], b[i : i + step])).astype(made.dtype)
    return Tile(made, acc.dtype)


def warpgroup_mma_init(value):
    return value


def warpgroup_mma(
    a, b, acc, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
):
    check_operands(a, b, acc)
    if use_acc and acc.dtype is float16:
        raise CompileError("sums in fp16 that go on are not simulated")
    torn = getattr(acc, "torn", "") if use_acc else ""
    if not use_acc:
        acc = Tile(np.zeros(acc.shape, acc.dtype.np), acc.dtype)
    elif isinstance(acc, Product):
        acc = acc.result
    product = Product(a, b, acc, torn)
    here.partition.products.append(product)
    note("product", product)
    return product if is_async else warpgroup_mma_wait(0, deps=[product])


def check_operands(a, b, acc):
    """Refuse what a warpgroup cannot multiply."""
    if not isinstance(b, Shared) or not isinstance(a, Shared | Tile) or not isinstance(acc, Tile):
        raise CompileError("a product takes A from registers or shared memory, B from the latter")
    fit = a.shape[0] % 64 == 0 and a.dtype is b.dtype and a.shape[1] == b.shape[0]
    if not fit or acc.shape != (a.shape[0], b.shape[1]) or acc.dtype not in (float16, float32):
        kinds = f"{a.dtype} {list(a.shape)} times {b.dtype} {list(b.shape)}"
        raise CompileError(f"no product: {kinds} in {described(acc)}; of A by 64 rows")
    if a.dtype.itemsize == 1 and b.data.strides[0] != 1:
        raise CompileError("8 bits need what is summed over to be contiguous in B")


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    if deps is None:
        raise CompileError("warpgroup_mma_wait needs deps: what is waited for")
    partition, machine = here.partition, here.partition.machine
    waited = partition.products[: max(len(partition.products) - num_outstanding, 0)]
    among = machine.able_or_late(machine.options.order.late_products) if waited else None
    partition.pause(among)
    del partition.products[: len(waited)]
    for product in waited:
        product.done = True
        for read in product.reads:
            read.end()
        note("done", product)
    results = tuple(
        x.result if isinstance(x, Product) and x.done and not x.torn else x for x in deps
    )
    return results[0] if len(results) == 1 else results
