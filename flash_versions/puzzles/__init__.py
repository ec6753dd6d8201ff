"""Puzzles: kernels to write, from a masked copy to FlashAttention's backward, checked as you go.

May import: the public names, dispatch, versions and what looks at kernels (mine, bench, inspect).
"""
