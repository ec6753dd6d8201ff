"""The kernels around attention: matrix products with what follows them."""

import flash_versions  # noqa: F401  # before triton: it lets kernels be simulated
