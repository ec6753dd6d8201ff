"""FA3's backward for Hopper: the kernel, wider ones for head_dim beyond 128, what runs before and
after.

May import: `fa3`, `tiles`, `dispatch`.
"""
