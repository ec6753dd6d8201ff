"""8-bit tensors: their scales, the rotation of Q and K, the transposed V."""
