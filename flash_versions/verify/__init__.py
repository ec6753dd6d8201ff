"""Verify every kernel on a GPU, above all on one that its authors never had.

May import: the package's public call, `dispatch`, `versions`, `bench`.
"""
