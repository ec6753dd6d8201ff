"""FlashAttention 2, forward: one division, causal loops, heads, split keys.

May import: torch and triton, as the learner's file does.
"""
