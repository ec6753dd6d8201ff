"""FA3's backward for Hopper: the kernel, what runs before and after; in `wider` the kernels for
head_dim beyond 128.
"""
