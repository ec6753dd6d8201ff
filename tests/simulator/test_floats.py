"""How the CPU computes with numbers of a GPU's types."""

import numpy as np
import pytest
import torch

from flash_versions.simulator.floats import as_on_a_gpu, product


def test_tiny_numbers_are_zero_inside_only():
    torch.set_flush_denormal(False)
    tiny = np.full(4, 1e-40, np.float32)
    with as_on_a_gpu(), as_on_a_gpu():
        assert not (tiny * np.float32(1)).any()
    assert (tiny * np.float32(1)).all()


@pytest.mark.parametrize("shape", [(64, 128, 192), (128, 256, 64), (48, 512, 128), (1, 1024, 512)])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
def test_a_product_in_parts_is_the_product(shape, transposed):
    """Of small whole numbers, whose sums are exact in any order."""
    rows, columns, depth = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, x).astype(np.float32) for x in ((rows, depth), (depth, columns)))
    given = [x.T.copy().T if turned else x for x, turned in zip((a, b), transposed)]
    exact = a.astype(np.int64) @ b.astype(np.int64)
    assert np.array_equal(product(*given), exact)


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("columns, depth", [(16, 64), (64, 64), (64, 80), (128, 128), (128, 256)])
def test_a_row_has_the_same_bits_in_every_place(rows, columns, depth):
    """Whatever the rows beside it are."""
    rng = np.random.default_rng(0)
    row, b = (rng.standard_normal(x, np.float32) for x in ((1, depth), (columns, depth)))
    alike = product(np.tile(row, (rows, 1)), b.T)
    assert (alike == alike[0]).all()
    others = rng.standard_normal((rows, depth), np.float32)
    others[rows - 3] = row
    assert np.array_equal(product(others, b.T)[rows - 3], alike[0])


def test_products_of_a_batch():
    a, b = np.ones((3, 64, 128), np.float32), np.ones((3, 128, 64), np.float32)
    assert product(a, b).shape == (3, 64, 64) and (product(a, b) == 128).all()
