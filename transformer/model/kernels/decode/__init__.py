"""The kernels of one decoding step: embedding, products with few rows, the choice of a token.

May import: `flash_versions`, below its public API, too.
"""
