"""Loads, stores, masks, tiles and sums.

May import: torch and triton, as the learner's file does.
"""
