"""The kernels around attention: matrix products with what follows them."""
