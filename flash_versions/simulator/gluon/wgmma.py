"""Hopper's tensor cores: products in flight."""

import numpy as np

from flash_versions.simulator import floats
from flash_versions.simulator.dtypes import float16, float32
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.simulator.gluon.machine import note
from flash_versions.simulator.gluon.shared import Shared
from flash_versions.simulator.state import here
from flash_versions.simulator.values import Tile, described


class Product(Tile):
    """A product in flight, with which nothing can be done but to wait, and to add another one.

    Attributes:
        operands: the tiles in shared memory that it reads until it is waited for.
        result: a Tile, once it is computed; done: whether it was waited for.
        torn: who has filled one of the operands before it was waited for.
    """

    shape = ()

    def __init__(self, a, b, acc, use_acc):
        self.factors, self.acc = (a, b), acc if use_acc else None
        self.operands = [x for x in (a, b) if isinstance(x, Shared)]
        self.shape, self.dtype, self.partition = acc.shape, acc.dtype, here.partition
        self.result, self.done, self.torn = None, False, getattr(self.acc, "torn", "")

    @property
    def a(self):
        """What is read of a product that was not waited for, or that is torn."""
        raise AccessError(self.torn or "a product is read while it is in flight: wait for it")

    def computed(self):
        """Its result, of what is in the tiles at the first call; what it adds to comes first."""
        if self.result is not None:
            return self.result
        a, b = (np.asarray(x.a, np.float32) for x in self.factors)
        acc, step = self.acc, 32 // self.factors[1].dtype.itemsize
        if isinstance(acc, Product):
            acc = acc.computed()
        kind = np.float16 if self.dtype is float16 else np.float32
        made = np.zeros(self.shape, kind) if acc is None else acc.a
        for i in range(0, a.shape[1], step):  # an instruction sums up 32 bytes, then rounds
            made = (made + floats.product(a[:, i : i + step], b[i : i + step])).astype(kind)
        self.result, self.factors, self.acc = Tile(made, self.dtype), None, None
        return self.result


def warpgroup_mma_init(value):
    return value


def warpgroup_mma(
    a, b, acc, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
):
    check_operands(a, b, acc)
    partition = here.partition
    if use_acc and acc.dtype is float16:
        raise CompileError("sums in fp16 that go on are not simulated")
    product = Product(a, b, acc, bool(use_acc))
    until = partition, None, product
    product.reads = [here.program.read(x, "a product", *until) for x in product.operands]
    if partition.machine.random() >= partition.machine.options.order.late_products:
        product.computed()
    partition.products.append(product)
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
    # Behind what is late, if a product is. Else others may come as far as they can without late
    # loads, so that who fills a tile that is still read is found.
    among = machine.able
    if any(x.result is None for x in waited):
        among = machine.late
    elif waited and machine.random() >= machine.options.order.late_products:
        among = machine.patient
    partition.pause(among)
    del partition.products[: len(waited)]
    for product in waited:
        product.computed()
        product.done = True
        for read in filter(None, product.reads):
            read.end()
        note("done", product)
    results = tuple(
        x.result if isinstance(x, Product) and x.done and not x.torn else x for x in deps
    )
    return results[0] if len(results) == 1 else results
