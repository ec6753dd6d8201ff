"""From a softmax to FlashAttention 1.

May import: torch and triton, as the learner's file does.
"""
