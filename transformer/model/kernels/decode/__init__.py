"""The kernels of one decoding step: embedding, products with few rows, the choice of a token."""
