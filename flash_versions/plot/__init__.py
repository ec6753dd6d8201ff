"""Figures of committed results.

May import: `bench.results` and what that imports; numpy, matplotlib.
"""
