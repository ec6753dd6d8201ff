"""Puzzles: kernels to write, from a masked copy to a small FlashAttention 3, checked as you go."""
