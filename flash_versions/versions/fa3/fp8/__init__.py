"""FA3 on 8-bit tensors: a portable kernel, what the Hopper kernel changes, the scales of its tiles.

May import: `fa3`, `tiles`, `fp8`, `dispatch`.
"""
