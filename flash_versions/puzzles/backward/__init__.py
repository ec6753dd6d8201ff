"""The gradients of attention, from the LSE.

May import: torch and triton, as the learner's file does.
"""
