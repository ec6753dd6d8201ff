"""The emulator's tensor memory and products (tcgen05), by small kernels of their own."""

from functools import partial

import pytest
import torch

from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.emulator import Shared, Tensor, blackwell, fence_async_shared
from flash_versions.dispatch.emulator.machine import ORDERS, Barrier, Deadlock, run_grid

LATE = ORDERS["late products"]
M, N, K = 128, 64, 32


@pytest.fixture(autouse=True)
def order(monkeypatch):
    """Products are computed as late as allowed."""
    monkeypatch.setattr(gluon_machine, "order", LATE)


def barrier(count=1):
    made = Barrier()
    blackwell.mbarrier.init(made, count)
    return made


def operands(dtype=torch.bfloat16):
    """A and B in shared memory, written by TMA."""
    return Shared(torch.randn(M, K).to(dtype)), Shared(torch.randn(K, N).to(dtype))


def columns(shape=(M, N), dtype=torch.float32):
    layout = blackwell.TensorMemoryLayout((M, shape[-1]), col_stride=1)
    return blackwell.allocate_tensor_memory(dtype, list(shape), layout)


def emulate(kernel):
    """What a kernel of one program leaves in the list that it is given."""
    found = []
    run_grid(kernel, 1, [found])
    return found


@pytest.mark.parametrize("committed", [False, True])
def test_products_add_up_in_their_order(committed):
    """Told of by the second product, or by a commit behind it."""
    a, b = operands()

    def kernel(found):
        acc, done = columns(), barrier()
        blackwell.tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[])
        blackwell.tcgen05_mma(a, b, acc, mbarriers=[] if committed else [done])
        if committed:
            blackwell.tcgen05_commit(done)
        blackwell.mbarrier.wait(done, 0)
        found.append(acc.load().data)

    (result,) = emulate(kernel)
    torch.testing.assert_close(result, (2 * a.data.double() @ b.data.double()).float())


def test_a_predicate_decides_who_is_told_and_whether_there_is_a_product():
    a, b = operands()

    def kernel(found):
        acc, told, untold = columns(), barrier(), barrier()
        barriers, preds = [told, untold], [True, Tensor(torch.tensor(False))]
        blackwell.tcgen05_mma(a, b, acc, use_acc=False, mbarriers=barriers, mbarrier_preds=preds)
        blackwell.tcgen05_mma(a, b, acc, pred=False, mbarriers=[untold])
        blackwell.tcgen05_commit(untold, pred=False)
        blackwell.mbarrier.wait(told, 0)
        found.extend((acc.load().data, untold.phase))

    result, phase = emulate(kernel)
    assert phase == 0
    torch.testing.assert_close(result, (a.data.double() @ b.data.double()).float())


def touch_accumulator(a, b, acc):
    acc.load()


def overwrite_accumulator(a, b, acc):
    acc.slice(32, 16).store(Tensor(torch.zeros(M, 16)))


def overwrite_operand(a, b, acc):
    b.store(Tensor(torch.zeros(K, N, dtype=b.dtype)))


@pytest.mark.parametrize("touch, sentence", [
    (touch_accumulator, "tensor memory is read before its product is done"),
    (overwrite_accumulator, "tensor memory is written while a product is to use it"),
    (overwrite_operand, "shared memory is written while a product is to use it"),
])  # fmt: skip
def test_what_a_product_uses_is_protected_until_it_is_done(touch, sentence):
    a, b = operands()

    def kernel(found, waits):
        acc, done = columns(), barrier()
        blackwell.tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])
        if waits:
            blackwell.mbarrier.wait(done, 0)
        touch(a, b, acc)
        fence_async_shared()
        blackwell.mbarrier.wait(done, 0)

    emulate(partial(kernel, waits=True))
    with pytest.raises(AssertionError, match=sentence):
        emulate(partial(kernel, waits=False))


def test_a_product_that_tells_nobody_is_waited_for_in_vain():
    a, b = operands()

    def kernel(found):
        acc, done = columns(), barrier()
        blackwell.tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[])
        blackwell.mbarrier.wait(done, 0)

    with pytest.raises(Deadlock):
        emulate(kernel)


def test_views_share_columns():
    """16-bit numbers lie two to a column: P in the first half of S."""

    def kernel(found):
        pair = columns((2, M, 128))
        s = pair.index(1)
        p = s.reinterpret(torch.bfloat16, [M, 256], None).slice(0, 128)
        found.append([x.region[1:] for x in (pair, s, p, s.slice(64, 1))])
        s.store(Tensor(torch.ones(M, 128)))
        p.store(Tensor(torch.zeros(M, 128, dtype=torch.bfloat16)))
        found.append(s.load().data)
        found.append(pair.index(0).load().data)

    regions, s, other = emulate(kernel)
    assert regions == [(0, 256), (128, 256), (128, 192), (192, 193)]
    assert not s[:, :64].any() and (s[:, 64:] == 1).all()
    assert other.isnan().all(), "nothing was written there"


def no_product(a=(M, K), b=(K, N), acc=(M, N), dtype=torch.bfloat16):
    def kernel(found):
        tiles = Shared(torch.zeros(a, dtype=dtype)), Shared(torch.zeros(b, dtype=dtype))
        blackwell.tcgen05_mma(*tiles, columns(acc), use_acc=False)

    return kernel


def from_registers(found):
    a, b = operands()
    a.store(Tensor(a.data.clone()))
    blackwell.tcgen05_mma(a, b, columns(), use_acc=False)


def too_many_columns(found):
    columns((2, M, 256))
    columns((M, 16))


@pytest.mark.parametrize("kernel, sentence", [
    (no_product(b=(K + 16, N)), "is no"),
    (no_product(a=(64, K), acc=(64, N)), "no product of 64 x 64"),
    (no_product(b=(K, 24), acc=(M, 24)), "no product of 128 x 24"),
    (no_product(a=(M, 8), b=(8, N)), "32 bytes"),
    (no_product(dtype=torch.float32), "no torch.float32 times"),
    (from_registers, "a product without a fence"),
    (too_many_columns, "528 columns of 512"),
])  # fmt: skip
def test_what_the_hardware_refuses_is_refused(kernel, sentence):
    with pytest.raises(AssertionError, match=sentence):
        emulate(kernel)
