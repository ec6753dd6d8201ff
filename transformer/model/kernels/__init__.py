"""The kernels around attention: matrix products with what follows them.

May import: `flash_versions`, below its public API, too.
"""
