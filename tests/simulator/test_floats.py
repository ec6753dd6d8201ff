"""How the CPU computes with numbers of a GPU's types."""

import numpy as np
import pytest

from flash_versions.simulator.floats import product


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


def test_products_of_a_batch():
    a, b = np.ones((3, 64, 128), np.float32), np.ones((3, 128, 64), np.float32)
    assert product(a, b).shape == (3, 64, 64) and (product(a, b) == 128).all()
