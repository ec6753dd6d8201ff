"""Tensor memory and the products of Blackwell (tcgen05), by small kernels of their own."""

from functools import partial

import numpy as np
import pytest

from flash_versions.simulator.dtypes import bfloat16, encode, float32, int1
from flash_versions.simulator.errors import AccessError, CompileError
from flash_versions.simulator.gluon import mbarrier
from flash_versions.simulator.gluon import tmem as blackwell
from flash_versions.simulator.gluon.machine import ORDERS, run_grid, using
from flash_versions.simulator.gluon.shared import allocate_shared_memory
from flash_versions.simulator.gluon.tma import fence_async_shared
from flash_versions.simulator.values import Tile, constant

LATE = ORDERS["late products"]
M, N, K = 128, 64, 32


@pytest.fixture(autouse=True)
def order():
    """Products are computed as late as allowed."""
    with using(order=LATE):
        yield


def barrier():
    made = mbarrier.Barrier()
    mbarrier.init(made, 1)
    return made


def tile(*shape, kind=bfloat16):
    """Random numbers in registers."""
    return Tile(np.random.default_rng(0).normal(size=shape), float32).to(kind)


def shared(*shape, kind=bfloat16):
    """A tile in shared memory, written by TMA."""
    made = allocate_shared_memory(kind, shape)
    made.data[...] = encode(tile(*shape, kind=kind).a, kind)
    return made


def operands():
    """A and B in shared memory."""
    return shared(M, K), shared(K, N)


def product(a, b):
    """What the tensor cores compute."""
    return a.a.astype(np.float64) @ b.a.astype(np.float64)


def columns(shape=(M, N), kind=float32):
    layout = blackwell.TensorMemoryLayout((M, shape[-1]), col_stride=1)
    return blackwell.allocate_tensor_memory(kind, list(shape), layout)


def simulate(kernel):
    """What a kernel of one program leaves in the list that it is given."""
    found = []
    run_grid(kernel, (1, 1, 1), (found,))
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
        mbarrier.wait(done, 0)
        found.append(acc.load().a)

    (result,) = simulate(kernel)
    np.testing.assert_allclose(result, 2 * product(a, b), rtol=1e-5, atol=1e-5)


def test_a_predicate_decides_who_is_told_and_whether_there_is_a_product():
    a, b = operands()

    def kernel(found):
        acc, told, untold = columns(), barrier(), barrier()
        barriers, preds = [told, untold], [True, constant(False, int1)]
        blackwell.tcgen05_mma(a, b, acc, use_acc=False, mbarriers=barriers, mbarrier_preds=preds)
        blackwell.tcgen05_mma(a, b, acc, pred=False, mbarriers=[untold])
        blackwell.tcgen05_commit(untold, pred=False)
        mbarrier.wait(told, 0)
        found.extend((acc.load().a, untold.phase))

    result, phase = simulate(kernel)
    assert phase == 0
    np.testing.assert_allclose(result, product(a, b), rtol=1e-5, atol=1e-5)


def touch_accumulator(a, b, acc):
    acc.load()


def overwrite_accumulator(a, b, acc):
    acc.slice(32, 16).store(tile(M, 16, kind=float32))


def overwrite_operand(a, b, acc):
    b.store(tile(K, N))


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
            mbarrier.wait(done, 0)
        touch(a, b, acc)
        fence_async_shared()
        mbarrier.wait(done, 0)

    simulate(partial(kernel, waits=True))
    with pytest.raises((AccessError, CompileError), match=sentence):
        simulate(partial(kernel, waits=False))


def test_views_share_columns():
    """16-bit numbers lie two to a column: P in the first half of S."""

    def kernel(found):
        pair = columns((2, M, 128))
        s = pair.index(1)
        p = s.reinterpret(bfloat16, [M, 256], None).slice(0, 128)
        found.append([(x.low, x.high) for x in (pair, s, p, s.slice(64, 1))])
        s.store(Tile(np.ones((M, 128), np.float32), float32))
        p.store(Tile(np.zeros((M, 128), np.float32), bfloat16))
        found.append(s.load().a)
        found.append(pair.index(0).load().a)

    regions, s, other = simulate(kernel)
    assert regions == [(0, 256), (128, 256), (128, 192), (192, 193)]
    assert not s[:, :64].any() and (s[:, 64:] == 1).all()
    assert np.isnan(other).all(), "nothing was written there"


def no_product(a=(M, K), b=(K, N), acc=(M, N), kind=bfloat16):
    def kernel(found):
        tiles = shared(*a, kind=kind), shared(*b, kind=kind)
        blackwell.tcgen05_mma(*tiles, columns(acc), use_acc=False)

    return kernel


def from_registers(found):
    a, b = operands()
    a.store(tile(M, K))
    blackwell.tcgen05_mma(a, b, columns(), use_acc=False)


def too_many_columns(found):
    columns((2, M, 256))
    columns((M, 16))


@pytest.mark.parametrize("kernel, sentence", [
    (no_product(b=(K + 16, N)), "is no"),
    (no_product(a=(64, K), acc=(64, N)), "no product of 64 x 64"),
    (no_product(b=(K, 24), acc=(M, 24)), "no product of 128 x 24"),
    (no_product(a=(M, 8), b=(8, N)), "32 bytes"),
    (no_product(kind=float32), "no fp32 .* times"),
    (from_registers, "a product reads .* without fence_async_shared"),
    (too_many_columns, "528 columns of 512"),
])  # fmt: skip
def test_what_the_hardware_refuses_is_refused(kernel, sentence):
    with pytest.raises((AccessError, CompileError), match=sentence):
        simulate(kernel)
