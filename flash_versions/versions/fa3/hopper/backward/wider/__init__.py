"""FA3's backward for Hopper above head_dim 128: three other ways to divide the work of a program.

May import: `fa3`, `tiles`, `dispatch`.
"""
