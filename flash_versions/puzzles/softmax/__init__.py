"""From a softmax to FlashAttention 1."""
