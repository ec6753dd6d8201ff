"""The gradients of attention, from the LSE."""
