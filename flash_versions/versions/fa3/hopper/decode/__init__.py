"""FA3's forward of few queries, on Hopper: what is computed, the kernel, its launch.

May import: `fa3`, `fa2`, `tiles`, `dispatch`.
"""
