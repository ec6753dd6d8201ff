"""Hopper's tensor cores for emulator.py: products in flight, issued by Gluon or by inline PTX.

Inline PTX is read here as far as `fa3/hopper/columns.py` writes it: the operands of each
instruction, the descriptor of its tile in shared memory, and the order of fence and commit.
"""

import re

import torch

from flash_versions.dispatch.emulator.machine import here, note
from flash_versions.dispatch.emulator.values import Tensor

ROW_BYTES = 128  # of a row in a swizzled column of a tile
SWIZZLED = 1  # in 128 bytes, as descriptors say it
KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}
MULTIPLY = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k16\.f32\.(?P<kind>\w+)\.(?P=kind)"
    r" \{(?P<sums>[^}]*)\}, \{(?P<left>[^}]*)\}, (?P<tile>\w+), (?P<add>\w+), 1, 1, 1"
)


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
    product = issued(Product(a, b, acc, use_acc))
    return product if is_async else warpgroup_mma_wait(0, deps=[product])


def issued(product):
    """A product, in flight from now on."""
    machine = here.partition.program.machine
    if not machine.draw(machine.order.late_products):
        product.compute()
    here.partition.products.append(product)
    note("product", product)
    return product


def complete(num_outstanding):
    """Wait until no more products than these are in flight."""
    products = here.partition.products
    waited = products[: max(len(products) - num_outstanding, 0)]
    here.partition.pause(late=any(x.result is None for x in waited))
    for product in waited:
        products.remove(product)
        if product.result is None:
            product.compute()
        product.done = True
        note("done", product)


def warpgroup_mma_wait(num_outstanding, deps):
    complete(num_outstanding)
    assert all(x.done for x in deps), "a product is read while it is in flight"
    results = tuple(x.result for x in deps)
    return results[0] if len(results) == 1 else results


# ------------------------------------------------------------------------------- inline PTX
class Chain(Product):
    """Products that are issued together and add to the same sums."""

    def __init__(self, sums, terms):
        self.sums, self.terms = sums, terms  # (64, 16) each; (left operand, tile) each
        self.result, self.done = None, False

    def compute(self):
        total = torch.cat([x.data for x in self.sums], 1)
        for left, tile in self.terms:
            total = total + left.data.float() @ tile.data.float()
        self.result = [Tensor(x) for x in total.split([x.shape[1] for x in self.sums], 1)]

    def parts(self):
        """A token for each of the sums."""
        return tuple(PartOf(self, i) for i in range(len(self.sums)))


class PartOf:
    """A result of a chain."""

    def __init__(self, chain, i):
        self.chain, self.i = chain, i

    @property
    def done(self):
        return self.chain.done

    @property
    def result(self):
        return self.chain.result[self.i]


def inline(asm, constraints, args, pack):
    """Issue the chain of products that a text asks for: tokens of its results.

    args: sums, left operands of 16 bits, and the address of a tile, as tensors of (64, 16) each.
    """
    registers = [(x, i) for x in args for i in range(pack * min(x.dtype.itemsize, 4) // 4)]
    kinds = constraints.split(",")
    number = kinds.count("=f")
    assert kinds[number : 2 * number] == [str(i) for i in range(number)], "results are not the sums"
    assert len(kinds) == number + len(registers), "constraints do not match the arguments"
    named = {f"${number + i}": x for i, x in enumerate(registers)}
    sums = [x for x in args if x.dtype == torch.float32]
    numbers, terms, state = {}, [], ""
    for statement in map(str.strip, asm.strip().removeprefix("{").removesuffix("}").split(";")):
        if found := MULTIPLY.fullmatch(statement):
            assert state in ("fence", "product"), "a product without wgmma.fence"
            assert numbers[found["add"]], "a product that does not add"
            assert listed(found["sums"]) == [f"${i}" for i in range(number)], "other sums"
            assert int(found["columns"]) == 2 * number, "as many columns as there are sums"
            left = [named[x] for x in listed(found["left"])]
            operand = left[0][0]
            assert left == [(operand, i) for i in range(4)], "registers of two operands, or mixed"
            assert operand.dtype == KINDS[found["kind"]], f"{operand.dtype} as {found['kind']}"
            terms.append((operand, described(numbers[found["tile"]], 2 * number)))
            state = "product"
        elif statement.startswith("wgmma."):
            state = re.fullmatch(r"wgmma\.(fence|commit)(_group)?\.sync\.aligned", statement)[1]
        elif statement and not statement.startswith(".reg"):
            calculate(statement, numbers, named)
    assert state == "commit", "products that are not committed"
    here.partition.program.check_fenced(*(tile for _, tile in terms))
    return issued(Chain(sums, terms)).parts()


def listed(text):
    return [x.strip() for x in text.split(",")]


def calculate(statement, numbers, named):
    """A step of the calculation of a descriptor, with numbers that all threads have alike."""

    def value(operand):
        if operand.startswith("{"):
            low, high = map(value, operand.strip("{}").split(", "))
            return low | high << 32
        if operand in named:
            tensor, _ = named[operand]
            assert (tensor.data == tensor.data.flatten()[0]).all(), "threads have other addresses"
            return int(tensor.data.flatten()[0])
        return numbers[operand] if operand in numbers else int(operand)

    name, operands = statement.split(" ", 1)
    target, *operands = map(str.strip, re.findall(r"\{[^}]*\}|[^\s,]+", operands))
    a, *b = map(value, operands)
    match name.split("."):
        case ["mov", _]:
            numbers[target] = a
        case ["setp", "eq", _]:
            numbers[target] = a == b[0]
        case ["shr", _]:
            numbers[target] = a >> b[0]
        case ["or", _]:
            numbers[target] = a | b[0]
        case ["add", _]:
            numbers[target] = a + b[0]
        case _:
            raise AssertionError(f"no instruction {name} is known")


def described(descriptor, columns):
    """The 16 rows and so many columns of a tile that a descriptor is of."""
    address, apart, eight = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    begin, slots = here.partition.program.allocation_at(address)
    rows, width = slots.shape[-2:]
    slot, inside = divmod(address - begin, rows * width * slots.dtype.itemsize)
    row, odd = divmod(inside, ROW_BYTES)
    assert descriptor >> 62 == SWIZZLED and eight == 8 * ROW_BYTES, "a tile that is swizzled else"
    assert apart == rows * ROW_BYTES, "columns of a tile are elsewhere"
    assert not odd and row + 16 <= rows, f"row {row} of a tile of {rows}, and {odd} bytes"
    tile = slots.index(slot).reshape([rows, width])
    return tile.slice(row, 16).slice(0, columns, dim=1)
