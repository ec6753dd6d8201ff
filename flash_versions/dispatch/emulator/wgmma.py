"""Hopper's tensor cores for emulator.py: products in flight."""

import torch

from flash_versions.dispatch.emulator.machine import here, note
from flash_versions.dispatch.emulator.values import Tensor


class Product:
    """A product in flight: nothing can be done with it but to wait."""

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result, self.done = None, False

    def compute(self):
        if isinstance(self.acc, Tensor) and self.acc.dtype == torch.float16:
            self.result = Tensor(self.summed_in_fp16())
            return
        product = self.a.data.float() @ self.b.data.float()
        if self.use_acc and isinstance(self.acc, Product):  # one after the other
            if self.acc.result is None:
                self.acc.compute()
            product += self.acc.result.data
        elif self.use_acc:
            product += self.acc.data
        self.result = Tensor(product)

    def summed_in_fp16(self):
        """The product of 8-bit numbers, rounded after each instruction, which sums up 32."""
        assert not self.use_acc, "no sums in fp16 that go on are known"
        total = torch.zeros(())
        for a, b in zip(self.a.data.float().split(32, 1), self.b.data.float().split(32, 0)):
            total = (total + a @ b).half().float()
        return total.half()


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    assert a.shape[0] % 64 == 0 and a.dtype == b.dtype, f"no {a.shape} {a.dtype} times {b.dtype}"
    here.partition.program.check_fenced(a, b)
    k_major = b.data.stride(0) == 1
    assert k_major or b.dtype.itemsize == 2, "8 bits need what is summed over to be contiguous"
    product = Product(a, b, acc, use_acc)
    machine = here.partition.program.machine
    if not machine.draw(machine.order.late_products):
        product.compute()
    here.partition.products.append(product)
    note("product", product)
    return product if is_async else warpgroup_mma_wait(0, deps=[product])


def warpgroup_mma_wait(num_outstanding, deps):
    products = here.partition.products
    waited = products[: max(len(products) - num_outstanding, 0)]
    here.partition.pause(late=any(x.result is None for x in waited))
    for product in waited:
        products.remove(product)
        if product.result is None:
            product.compute()
        product.done = True
        note("done", product)
    assert all(x.done for x in deps), "a product is read while it is in flight"
    results = tuple(x.result for x in deps)
    return results[0] if len(results) == 1 else results
