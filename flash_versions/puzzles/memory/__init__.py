"""Loads, stores, masks, tiles and sums."""
