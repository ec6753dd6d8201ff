"""The benchmark: the shapes that are timed, against whom, and the results as they are committed.

May import: everything but `plot`, `report`, `inspect` and `diff`; no other room imports it, but
those that show its results.
"""
