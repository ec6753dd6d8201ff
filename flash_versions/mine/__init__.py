"""A version of yours in one file: write it, check it, rank it, time it.

May import: the package's public call, `dispatch`, `versions`, `bench`, `inspect`.
"""
