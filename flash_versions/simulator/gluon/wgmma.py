"""Hopper's tensor cores: products in flight."""

import numpy as np

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
        result: a Tile, once it is computed.
        torn: who has filled one of the operands before it was waited for.
    """

    __slots__ = (
        "acc", "done", "factors", "operands", "partition", "reads", "result", "shape", "torn",
    )  # fmt: skip

    def __init__(self, a, b, acc, use_acc):
        self.factors, self.acc = (a, b), acc if use_acc else None
        self.operands = [x for x in (a, b) if isinstance(x, Shared)]
        self.shape, self.dtype, self.partition = acc.shape, acc.dtype, here.partition
        self.result, self.done, self.torn, self.reads = None, False, "", []

    @property
    def a(self):
        """What is read of a product that was not waited for, or that is torn."""
        raise AccessError(
            self.torn or "a product is read while it is in flight: wait for it before"
        )

    def compute(self):
        """Multiply what is in the tiles now; what it adds to comes first."""
        a, b = (np.asarray(x.a, np.float32) for x in self.factors)
        if self.dtype is float16:  # rounded after each instruction, which sums up 32
            made = np.zeros(self.shape, np.float16)
            for i in range(0, a.shape[1], 32):
                made = (made + a[:, i : i + 32] @ b[i : i + 32]).astype(np.float16)
        else:
            made = a @ b
            if self.acc is not None:
                made += sum_of(self.acc)
        self.result, self.factors, self.acc = Tile(made, self.dtype), None, None


def sum_of(acc):
    """What a product adds to, which may be in flight, too."""
    if not isinstance(acc, Product):
        return acc.a
    if acc.result is None:
        acc.compute()
    return acc.result.a


def warpgroup_mma_init(value):
    return value


def warpgroup_mma(
    a, b, acc, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
):
    check_operands(a, b, acc)
    partition, use_acc = here.partition, bool(use_acc)
    if use_acc and acc.dtype is float16:
        raise CompileError("sums in fp16 that go on are not simulated")
    product = Product(a, b, acc, use_acc)
    product.torn = getattr(acc, "torn", "") if use_acc else ""
    if hazards := partition.program.hazards:
        product.reads = [
            y for x in product.operands for y in hazards.read(x, partition, None, product)
        ]
    partition.program.check_fenced(product.operands, "a product")
    if not partition.machine.draw(partition.machine.options.order.late_products):
        product.compute()
    partition.products.append(product)
    partition.program.products[product] = None
    note("product", product)
    return product if is_async else warpgroup_mma_wait(0, deps=[product])


def check_operands(a, b, acc):
    """Refuse what a warpgroup cannot multiply."""
    if not isinstance(b, Shared) or not isinstance(a, Shared | Tile) or not isinstance(acc, Tile):
        raise CompileError(
            "a product takes A from registers or shared memory, B from shared memory"
        )
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
    elif waited and not machine.draw(machine.options.order.late_products):
        among = machine.patient
    partition.pause(among)
    del partition.products[: len(waited)]
    for product in waited:
        del partition.program.products[product]
        if product.result is None:
            product.compute()
        product.done = True
        for read in product.reads:
            read.time = partition.clock[partition]
        note("done", product)
    results = tuple(
        x.result if isinstance(x, Product) and x.done and not x.torn else x for x in deps
    )
    return results[0] if len(results) == 1 else results
