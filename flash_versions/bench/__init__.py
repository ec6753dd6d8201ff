"""The benchmark: the shapes that it times, the peers that take part, and the committed results.

May import: everything but `plot`, `report`, `inspect` and `diff`. Only the rooms that show its
results import it.
"""
