"""FlashAttention 2, forward: one division, causal loops, heads, split keys."""
